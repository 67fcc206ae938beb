"""Apply masks to tensors, and count what a sparsity prunes."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .native import step
from .sharding import local_part

MIN_NATIVE_VALUES = 4096  # values from which the C kernels' single pass outweighs their call


def apply_mask(values: Tensor, mask: Tensor, out: Tensor) -> None:
    """Write m ⊙ values into `out`, which may be `values` itself.

    A product would turn a pruned −w into −0.0 and a pruned inf into NaN; `torch.where` does neither.
    """
    values, mask, out = local_part(values), local_part(mask), local_part(out)
    if values.numel() < MIN_NATIVE_VALUES or not step.mask_values(values, mask, out):
        torch.where(mask, values, _zero(values.dtype, values.device), out=out)


def fill_pruned(values: Tensor, mask: Tensor, fill: float) -> Tensor:
    """Return a new tensor with the values on a mask, and `fill` off it."""
    filled = torch.empty_like(values)
    if values.numel() >= MIN_NATIVE_VALUES and step.mask_values(values, mask, filled, fill):
        return filled
    return values.masked_fill(~mask, fill)


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return one scalar zero for each dtype and device, so that applying a mask launches one kernel."""
    return torch.zeros((), dtype=dtype, device=device)


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return the shape of a weight as a matrix, out × (in · kh · kw). A vector is one row."""
    return (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1:].numel())


def count_pruned(sparsity: float, count: int) -> int:
    """Return how many of `count` weights a sparsity prunes: the nearest whole number."""
    return round(sparsity * count)
