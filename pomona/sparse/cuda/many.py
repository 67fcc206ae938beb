"""Triton: load sparse, compute dense. Blocks are spread out in registers and multiplied on the tensor cores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..format import LANES, index_bits

WIDEST = 256  # columns of a block that are spread out at a time
KINDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def multiply(
    x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, y: Tensor, columns: int, block: int, relu: bool
) -> bool:
    """y = x Wᵀ + bias, all of any strides; False where this is not for this kernel."""
    (n, rows), (groups, blocks, kept, _) = y.shape, values.shape
    if block > WIDEST or x.dtype not in KINDS:
        return False
    width = max(16, triton.next_power_of_2(block))
    tile = min(128, max(16, triton.next_power_of_2(n)))
    height = LANES if groups < 4 * 132 else 2 * LANES
    _spread[(triton.cdiv(rows, height), triton.cdiv(n, tile))](
        x,
        values,
        indices,
        bias,
        y,
        n,
        rows,
        columns,
        blocks,
        x.stride(0),
        x.stride(1),
        y.stride(0),
        y.stride(1),
        KEPT=kept,
        BITS=index_bits(block),
        BLOCK=block,
        WIDTH=width,
        HEIGHT=height,
        TILE=tile,
        COMPUTE=KINDS[torch.promote_types(x.dtype, values.dtype)],
        RELU=relu,
        num_warps=4 if height * tile <= 4096 else 8,
    )
    return True


@triton.jit
def _spread(
    x,
    values,
    indices,
    bias,
    y,
    n,
    rows,
    columns,
    blocks,
    x_row,
    x_column,
    y_row,
    y_column,
    KEPT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
    RELU: tl.constexpr,
):
    """HEIGHT rows of the matrix times TILE vectors."""
    PER: tl.constexpr = 16 // BITS
    WORDS: tl.constexpr = (KEPT + PER - 1) // PER
    row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    vector = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = tl.arange(0, WIDTH)
    lane = row % 32
    there = row < rows
    sums = tl.zeros([HEIGHT, TILE], tl.float32)
    for block in range(blocks):
        place = (row // 32).to(tl.int64) * blocks + block
        spread = tl.zeros([HEIGHT, WIDTH], COMPUTE)
        for w in tl.static_range(WORDS):
            word = tl.load(indices + (place * WORDS + w) * 32 + lane, mask=there, other=0).to(tl.int32)
            for s in tl.static_range(PER):
                if w * PER + s < KEPT:
                    index = (word >> (BITS * s)) & ((1 << BITS) - 1)
                    at = values + (place * KEPT + w * PER + s) * 32 + lane
                    value = tl.load(at, mask=there, other=0.0).to(COMPUTE)
                    spread = tl.where(inside[None, :] == index[:, None], value[:, None], spread)
        column = block * BLOCK + inside
        known = (inside < BLOCK) & (column < columns)
        part = tl.load(
            x + column[:, None].to(tl.int64) * x_column + vector[None, :].to(tl.int64) * x_row,
            mask=known[:, None] & (vector < n)[None, :],
            other=0.0,
        ).to(COMPUTE)
        sums = tl.dot(spread, part, sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)[:, None]
    if RELU:
        sums = tl.where(sums < 0, 0.0, sums)  # a NaN stays
    out = y + vector[None, :].to(tl.int64) * y_row + row[:, None].to(tl.int64) * y_column
    tl.store(out, sums.to(y.dtype.element_ty), mask=there[:, None] & (vector < n)[None, :])
