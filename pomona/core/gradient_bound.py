"""How much the gradients of a layer's outputs are shortened, from their norms: `methods._latent.BoundedFeedback`."""

from __future__ import annotations

import torch
from torch import Tensor

from .method import GradientBound


def output_factors(weight_norm: Tensor, norm: Tensor, bound: GradientBound) -> Tensor:
    """Return the factor of each output's gradient, 1 or less, given the norms of its weights and of its gradient.

    Norms are (layers, outputs). The lower median of a layer's outputs is found without a host sync, which
    `torch.nanmedian` has; where none are compared it is inf.
    """
    weak = weight_norm < bound.weak * weight_norm.mean(1, keepdim=True)
    compared = ~weak & (norm > 0)
    ranked = norm.masked_fill(~compared, torch.inf).sort(1).values
    median = ranked.gather(1, (compared.sum(1, keepdim=True) - 1).clamp(min=0) // 2)
    largest = median * torch.where(weak, bound.feedback, 1 / bound.weak)
    return torch.where(norm > largest, largest / norm, 1)
