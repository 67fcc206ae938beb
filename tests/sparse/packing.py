"""Sparse weights and networks, shared by the tests of packed weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pomona.patterns.balanced import select_per_block


def balanced_weight(*shape: int, block: int, kept: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a random weight that keeps `kept` of every `block`."""
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(select_per_block(weight.abs(), block, kept), weight, 0).to(dtype)


def unstructured_weight(rows: int, columns: int, sparsity: float, seed: int = 0) -> Tensor:
    """Return a random weight without its smallest values, with rows of unequal scale and thus of unequal length."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.randn(rows, 1, generator=generator).exp()
    pruned = weight.abs().flatten().argsort()[: round(sparsity * weight.numel())]
    return weight.flatten().index_fill(0, pruned, 0).view(rows, columns)


def prune_unstructured(model: nn.Module, sparsity: float) -> nn.Module:
    """Prune the smallest values of every weight, of rows that get unequal scales; return the model in eval mode."""
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.ndim > 1 and "embedding" not in name:
            matrix = unstructured_weight(parameter.shape[0], parameter[0].numel(), sparsity, seed)
            parameter.data.copy_((matrix / matrix.shape[1] ** 0.5).view(parameter.shape))
    return model.eval()


def prune_balanced(model: nn.Module, block: int, kept: int) -> nn.Module:
    """Prune every weight whose rows divide by the block; return the model in evaluation mode."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and parameter[0].numel() % block == 0 and "embedding" not in name:
            mask = select_per_block(parameter.detach().abs(), block, kept)
            parameter.data.copy_(torch.where(mask, parameter.detach(), 0))
    return model.eval()


def is_close(actual: Tensor, exact: Tensor, magnitude: float = 0.0) -> bool:
    """Return whether a product differs from the one in float64 by rounding alone, with the same infinities and NaNs.

    The `magnitude` is the sum of the absolute values of its terms, which may cancel.
    """
    eps = torch.finfo(actual.dtype).eps
    scale = float(exact[exact.isfinite()].abs().max()) if exact.isfinite().any() else 1.0
    scale = max(scale, 1.0) + magnitude / 16
    return torch.allclose(actual.double(), exact, rtol=4 * eps, atol=64 * max(eps, 1.2e-7) * scale, equal_nan=True)


def agree(one: Any, other: Any, tolerance: float = 1e-5) -> bool:
    """Return whether two nested outputs are equal up to rounding."""
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=tolerance, atol=tolerance)
    return len(one) == len(other) and all(agree(a, b, tolerance) for a, b in zip(one, other, strict=True))


def has_same_state(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two models have equal state dicts, in the same order."""
    mine, theirs = one.state_dict(), other.state_dict()
    return list(mine) == list(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)


def two_of_four_weight(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Return a random weight that keeps the largest two of every four weights along a row."""
    wide = torch.randn(rows, -(-columns // 4) * 4, generator=torch.Generator().manual_seed(seed))
    smallest = wide.view(rows, -1, 4).abs().argsort(2)[..., :2]
    return wide.view(rows, -1, 4).scatter(2, smallest, 0).view(rows, -1)[:, :columns].contiguous()


def block_weight(rows: int, columns: int, height: int, width: int, sparsity: float, seed: int = 0) -> Tensor:
    """Return a random weight without some of its blocks of height × width."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(-(-rows // height), -(-columns // width), generator=generator) >= sparsity
    mask = kept.repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :columns]
    return torch.where(mask, torch.randn(rows, columns, generator=generator), 0)
