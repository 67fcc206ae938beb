"""Clipping of per-example gradients, and flat views of gradients by parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from .per_example_gradients import Gradients

MIN_NORM = 1e-30  # keeps the clipping factor of a zero gradient finite


def clip_and_sum(gradients: list[Tensor], clip: float) -> Tensor:
    """Return Σ_i g_i min(1, C / ‖g_i‖) as a flat tensor, from parts of shape (rows, …).

    An example whose norm is not finite counts as zero; its gradients are set to zero in place.
    """
    norms = torch.stack([torch.linalg.vector_norm(part, dim=1) for part in gradients]).norm(dim=0)
    finite = norms.isfinite()
    if not finite.all():  # NaN · 0 is NaN
        for part in gradients:
            part[~finite] = 0
    scale = torch.where(finite, (clip / norms.clamp(min=MIN_NORM)).clamp(max=1.0), 0.0)
    return torch.cat([scale.to(part.dtype) @ part for part in gradients])


def flatten(gradients: Gradients) -> Tensor:
    """Return the gradients of all parameters as one flat tensor."""
    return torch.cat([gradient.flatten() for gradient in gradients.values()])
