"""Balanced weights and networks, shared by the tests of the packed format."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pomona.patterns.balanced import select_per_block


def balanced_weight(*shape: int, block: int, kept: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A random weight that keeps `kept` of every `block`."""
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(select_per_block(weight.abs(), block, kept), weight, 0).to(dtype)


def cut(model: nn.Module, block: int, kept: int) -> nn.Module:
    """Prune every weight whose rows divide by the block."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and parameter[0].numel() % block == 0 and "embedding" not in name:
            keep = select_per_block(parameter.detach().abs(), block, kept)
            parameter.data.copy_(torch.where(keep, parameter.detach(), 0))
    return model.eval()


def close(actual: Tensor, exact: Tensor) -> bool:
    """Whether a product differs from the one in float64 by rounding only, infinities and NaNs in the same places."""
    eps = torch.finfo(actual.dtype).eps
    scale = float(exact[exact.isfinite()].abs().max()) if exact.isfinite().any() else 1.0
    return torch.allclose(
        actual.double(), exact, rtol=4 * eps, atol=64 * max(eps, 1.2e-7) * max(scale, 1), equal_nan=True
    )
