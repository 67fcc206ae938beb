"""Products of matrices packed in dense blocks, in Triton: the blocks of a block row lie side by side."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_dense import TRITON_DTYPES

MAX_HEIGHT = 64  # rows of a block that a program takes
DEPTH = 64  # weights of a row that are multiplied at a time, those of several blocks where they are narrow


def multiply(x: Tensor, values: Tensor, block_columns: Tensor, starts: Tensor, bias: Tensor | None, y: Tensor,
             columns: int, relu: bool) -> bool:  # fmt: skip
    """Write x Wᵀ + bias to y, both of any strides; return False for arguments this kernel does not take."""
    (n, rows), (blocks, height, width) = y.shape, values.shape
    if x.dtype not in TRITON_DTYPES:
        return False
    part = min(MAX_HEIGHT, max(16, triton.next_power_of_2(height)))
    tile = min(64, max(16, triton.next_power_of_2(n)))
    options = {
        "HEIGHT": height,
        "WIDTH": width,
        "PART": part,
        "DEPTH": DEPTH,
        "TILE": tile,
        "COMPUTE": TRITON_DTYPES[torch.promote_types(x.dtype, values.dtype)],
        "RELU": relu,
        "num_warps": 4,
    }
    # A pruned weight times an infinity or NaN is NaN: the kernel compares this with the number that it reads.
    nonfinite = (~x.isfinite()).sum(1, dtype=torch.int32)
    grid = len(starts) - 1, triton.cdiv(height, part), triton.cdiv(n, tile)
    sizes = n, rows, columns, blocks, *x.stride(), *y.stride()
    _multiply_block_rows[grid](x, values, block_columns, starts, nonfinite, bias, y, *sizes, **options)
    return True


@triton.jit
def _multiply_block_rows(
    x, values, block_columns, starts, nonfinite, bias, y, n, rows, columns, blocks, x_row, x_column, y_row, y_column,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, DEPTH: tl.constexpr, TILE: tl.constexpr,
    COMPUTE: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Multiply PART rows of a block row by TILE vectors, DEPTH weights of each row at a time.

    Starts and block columns are limited to what there is, whatever they are.
    """
    block_row = tl.program_id(0)
    inside = tl.program_id(1) * PART + tl.arange(0, PART)  # the rows in a block
    vector = tl.program_id(2) * TILE + tl.arange(0, TILE)
    row = block_row * HEIGHT + inside
    row_exists = (inside < HEIGHT) & (row < rows)
    first = tl.minimum(tl.maximum(tl.load(starts + block_row), 0), blocks)
    end = tl.minimum(tl.maximum(tl.load(starts + block_row + 1), first), blocks)
    weights = (end - first) * WIDTH  # of a row
    sums = tl.zeros([PART, TILE], tl.float32)
    read = tl.zeros([TILE], tl.int32)  # infinities and NaNs of each vector
    for start in range(0, weights, DEPTH):
        place = start + tl.arange(0, DEPTH)
        exists = place < weights
        block = first + place // WIDTH
        column = tl.load(block_columns + block, mask=exists, other=-1) * WIDTH + place % WIDTH
        reads = exists & (column >= 0) & (column < columns)
        at = (block.to(tl.int64)[None, :] * HEIGHT + inside[:, None]) * WIDTH + (place % WIDTH)[None, :]
        part = tl.load(values + at, mask=row_exists[:, None] & reads[None, :], other=0.0).to(COMPUTE)
        inputs = tl.load(
            x + column[:, None].to(tl.int64) * x_column + vector[None, :].to(tl.int64) * x_row,
            mask=reads[:, None] & (vector < n)[None, :],
            other=0.0,
        ).to(COMPUTE)
        read += tl.sum((inputs * 0 != 0).to(tl.int32), 0)
        sums = tl.dot(part, inputs, sums, input_precision="ieee")
    skipped = tl.load(nonfinite + vector, mask=vector < n, other=0) > read
    sums = tl.where(skipped[None, :], float("nan"), sums)
    if bias is not None:
        sums += tl.load(bias + row, mask=row_exists, other=0.0).to(tl.float32)[:, None]
    if RELU:
        sums = tl.where(sums < 0, 0.0, sums)  # keeps a NaN
    out = y + vector[None, :].to(tl.int64) * y_row + row[:, None].to(tl.int64) * y_column
    tl.store(out, sums.to(y.dtype.element_ty), mask=row_exists[:, None] & (vector < n)[None, :])
