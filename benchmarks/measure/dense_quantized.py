"""Dense matrices of int8 and int4 codes on a GPU: torch's kernels, and one in Triton for int8.

Each returns a function of x, and the weight in float32 that its codes stand for. They raise RuntimeError or ValueError
where they cannot be used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

INT4_GROUP, INT4_TILES = 128, 8  # columns of a scale, and tiles along the columns: as gpt-fast uses them
INT4_LEVELS, INT8_LEVELS = 15, 127


class DenseCodes(NamedTuple):
    """A dense matrix of codes."""

    run: Callable[[Tensor], Tensor]
    weight: Tensor  # that the codes stand for, in float32
    nbytes: int


def torch_int4(weight: Tensor) -> DenseCodes:
    """Return the matrix for `torch._weight_int4pack_mm`, with a scale and an offset for every 128 columns."""
    rows, columns = weight.shape
    if columns % (16 * INT4_TILES) or rows % 8:
        raise ValueError(f"{rows}×{columns} does not divide into its tiles")
    groups = weight.view(rows, columns // INT4_GROUP, INT4_GROUP)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scale = ((high - low) / INT4_LEVELS).clamp(min=1e-6).bfloat16().float()
    middle = (low + scale * 8).bfloat16().float()
    codes = ((groups - middle) / scale + 8).round().clamp(0, INT4_LEVELS)
    exact = ((codes - 8) * scale + middle).view(rows, columns)
    flat = codes.view(rows, columns).to(torch.uint8)
    packed = torch._convert_weight_to_int4pack(flat[:, ::2] << 4 | flat[:, 1::2], INT4_TILES)
    factors = torch.cat([scale, middle], 2).transpose(0, 1).contiguous().bfloat16()

    def run(x: Tensor) -> Tensor:
        return torch._weight_int4pack_mm(x, packed, INT4_GROUP, factors)

    return DenseCodes(run, exact, packed.nbytes + factors.nbytes)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes, and a scale for each row that bfloat16 holds exactly."""
    scale = (weight.abs().amax(1, keepdim=True) / INT8_LEVELS).bfloat16().float()
    return (weight / scale).round().clamp(-INT8_LEVELS, INT8_LEVELS).to(torch.int8), scale


def torch_int8(weight: Tensor) -> DenseCodes:
    """Return the matrix for `torch._weight_int8pack_mm`, with a scale for each row."""
    codes, scale = quantize_rows(weight)
    factors = scale.flatten().bfloat16()

    def run(x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x, codes, factors)

    run(torch.zeros(1, weight.shape[1], dtype=torch.bfloat16, device=weight.device))  # is there a kernel?
    return DenseCodes(run, codes.float() * scale, codes.nbytes + factors.nbytes)


def triton_int8(weight: Tensor, rows_each: int, columns_each: int, warps: int) -> DenseCodes:
    """Return the matrix for a product in Triton, whose programs read so many rows and columns at a time."""
    from triton_int8 import multiply_int8

    codes, scale = quantize_rows(weight)
    factors = scale.flatten()

    def run(x: Tensor) -> Tensor:
        return multiply_int8(x, codes, factors, rows_each, columns_each, warps)

    return DenseCodes(run, codes.float() * scale, codes.nbytes + factors.nbytes)
