"""Products in Triton, for all other cases: blocks are expanded in registers and multiplied on the tensor cores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..format import LANES, index_bits

MAX_DENSE_BLOCK = 256  # columns of a block that are expanded at a time
TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# Groups of rows from which on a program takes two of them: four programs for each of an H200's 132 multiprocessors.
MANY_GROUPS = 4 * 132


def multiply(
    x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, y: Tensor, columns: int, block: int, relu: bool
) -> bool:
    """Write x Wᵀ + bias to y, all of any strides; return False for arguments this kernel does not take."""
    (n, rows), (groups, blocks, kept, _) = y.shape, values.shape
    if block > MAX_DENSE_BLOCK or x.dtype not in TRITON_DTYPES:
        return False
    height = LANES if groups < MANY_GROUPS else 2 * LANES
    tile = min(128, max(16, triton.next_power_of_2(n)))
    options = {
        "KEPT": kept,
        "BITS": index_bits(block),
        "BLOCK": block,
        "WIDTH": max(16, triton.next_power_of_2(block)),
        "HEIGHT": height,
        "TILE": tile,
        "COMPUTE": TRITON_DTYPES[torch.promote_types(x.dtype, values.dtype)],
        "RELU": relu,
        "num_warps": 4 if height * tile <= 4096 else 8,
    }
    grid = triton.cdiv(rows, height), triton.cdiv(n, tile)
    sizes = n, rows, columns, blocks, *x.stride(), *y.stride()
    _multiply_expanded_blocks[grid](x, values, indices, bias, y, *sizes, **options)
    return True


@triton.jit
def _multiply_expanded_blocks(
    x, values, indices, bias, y, n, rows, columns, blocks, x_row, x_column, y_row, y_column,
    KEPT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr,
    TILE: tl.constexpr, COMPUTE: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Multiply HEIGHT rows of the matrix by TILE vectors, block by block, each padded to WIDTH columns."""
    PER_WORD: tl.constexpr = 16 // BITS
    WORDS: tl.constexpr = (KEPT + PER_WORD - 1) // PER_WORD
    row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    vector = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = tl.arange(0, WIDTH)
    lane = row % 32
    row_exists = row < rows
    sums = tl.zeros([HEIGHT, TILE], tl.float32)
    for block in range(blocks):
        place = (row // 32).to(tl.int64) * blocks + block
        expanded = tl.zeros([HEIGHT, WIDTH], COMPUTE)
        for w in tl.static_range(WORDS):
            word = tl.load(indices + (place * WORDS + w) * 32 + lane, mask=row_exists, other=0).to(tl.int32)
            for s in tl.static_range(PER_WORD):
                if w * PER_WORD + s < KEPT:
                    index = (word >> (BITS * s)) & ((1 << BITS) - 1)
                    value_at = values + (place * KEPT + w * PER_WORD + s) * 32 + lane
                    value = tl.load(value_at, mask=row_exists, other=0.0).to(COMPUTE)
                    expanded = tl.where(inside[None, :] == index[:, None], value[:, None], expanded)
        column = block * BLOCK + inside
        column_exists = (inside < BLOCK) & (column < columns)
        part = tl.load(
            x + column[:, None].to(tl.int64) * x_column + vector[None, :].to(tl.int64) * x_row,
            mask=column_exists[:, None] & (vector < n)[None, :],
            other=0.0,
        ).to(COMPUTE)
        sums = tl.dot(expanded, part, sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + row, mask=row_exists, other=0.0).to(tl.float32)[:, None]
    if RELU:
        sums = tl.where(sums < 0, 0.0, sums)  # keeps a NaN
    out = y + vector[None, :].to(tl.int64) * y_row + row[:, None].to(tl.int64) * y_column
    tl.store(out, sums.to(y.dtype.element_ty), mask=row_exists[:, None] & (vector < n)[None, :])
