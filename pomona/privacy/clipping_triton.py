"""Triton kernels of `clipping`: squared norms of gradients, and the sum of their integers, in one read each.

Gradients may have any floating-point dtype. Integers are added by several programs in any order, which changes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NORM_BLOCK = 1024  # squares that are summed in float32, as `clipping` assumes
NORM_BLOCKS = 4  # that one program sums
ROWS, COLUMNS = 16, 512  # of a tile whose integers are added
PROGRAM_ROWS = 128  # whose integers one program adds, in 32 bits
MAGIC = tl.constexpr(1.5 * 2**23)  # of `clipping`
MAGIC_BITS = tl.constexpr(0x4B400000)


def sum_squares(parts: list[Tensor]) -> Tensor:
    """Return the squared norm of each row over all parts in float64, from float32 sums of 1024 squares."""
    rows, device = len(parts[0]), parts[0].device
    squares = torch.zeros(rows, dtype=torch.float64, device=device)
    for part in parts:
        size = part.shape[1]
        programs = triton.cdiv(size, NORM_BLOCK * NORM_BLOCKS)
        sums = torch.empty(rows, programs, dtype=torch.float64, device=device)
        with torch.cuda.device_of(part):
            sum_squares_kernel[(programs, rows)](part, sums, size, BLOCK=NORM_BLOCK, BLOCKS=NORM_BLOCKS)
        squares += sums.sum(1)
    return squares


def add_rounded_rows(parts: list[Tensor], scales: Tensor, total: Tensor) -> None:
    """Add Σ round(s g) over the rows to `total`; rows with s = 0 add nothing, whatever they hold."""
    places = total.split([part.shape[1] for part in parts])
    for part, place in zip(parts, places, strict=True):
        rows, size = part.shape
        grid = triton.cdiv(size, COLUMNS), triton.cdiv(rows, PROGRAM_ROWS)
        with torch.cuda.device_of(part):
            add_rounded_rows_kernel[grid](
                part, scales, place, rows, size, ROWS=ROWS, COLUMNS=COLUMNS, PROGRAM_ROWS=PROGRAM_ROWS, num_warps=8
            )


@triton.jit
def sum_squares_kernel(values, sums, size, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Sum the squares of some blocks of one row."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(values + row * size + column, mask=column < size, other=0.0).to(tl.float32)
    found = tl.sum(tl.sum(x * x, 1).to(tl.float64), 0)
    tl.store(sums + row * tl.num_programs(0) + tl.program_id(0), found)


@triton.jit
def add_rounded_rows_kernel(
    values, scales, total, rows, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAM_ROWS: tl.constexpr
):
    """Add the integers of some rows in a range of columns."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * PROGRAM_ROWS
    found = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, PROGRAM_ROWS, ROWS):
        row = first + start + tl.arange(0, ROWS)
        scale = tl.load(scales + row, mask=row < rows, other=0.0)
        place = row[:, None].to(tl.int64) * size + column[None, :]
        inside = (row < rows)[:, None] & (column < size)[None, :]
        x = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
        bits = (x * scale[:, None] + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
        found += tl.where((scale > 0)[:, None], bits, 0)
    tl.atomic_add(total + column, tl.sum(found, 0).to(tl.int64), mask=column < size)
