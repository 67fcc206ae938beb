"""A few vectors: few.cu, where a shuffle hands every row the inputs of its survivors."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..format import LANES
from .compiled import KINDS, Kernel, kernel, legible

WIDEST = 32  # the columns of a block that a warp holds
MOST = 16  # vectors
WARPS = 16  # of a thread block
REGISTERS = 56  # of a thread, for sums and what is on its way: of 64, so that a processor holds two thread blocks


def multiply(
    x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, y: Tensor, columns: int, block: int, relu: bool
) -> bool:
    """y = x Wᵀ + bias; False where this is not for this kernel."""
    (n, rows), (groups, blocks, kept, _) = y.shape, values.shape
    dtype = values.dtype
    if n > MOST or block > WIDEST or x.dtype != dtype:
        return False
    made = plan(dtype, n, kept, block, groups, blocks, x.get_device())
    if made is None:
        return False
    together, go = made
    if x.stride(1) != 1:
        x = x.contiguous()
    bias, wide = legible(bias, dtype)
    y_vector, y_row = y.stride()
    sizes = rows, columns, x.stride(0), blocks, y_row, y_vector, wide, relu
    go((-(-groups // together), 1, 1), (values, indices, x, bias, y), sizes)
    return True


@cache
def plan(
    dtype: torch.dtype, n: int, kept: int, block: int, groups: int, blocks: int, device: int
) -> tuple[int, Kernel] | None:
    """How many groups of rows a warp works on, and the kernel."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    together, warps, unroll = shape(n, kept, groups, blocks, processors)
    macros = {"KIND": KINDS[dtype], "KEPT": kept, "BLOCK": block, "BATCH": n}
    cut = {"GROUPS": together, "WARPS": warps, "UNROLL": unroll, "TWINS": twins(dtype, n, kept, blocks, warps)}
    made = kernel("few", device, warps * LANES, **macros, **cut)
    return None if made is None else (together, made)


def shape(n: int, kept: int, groups: int, blocks: int, processors: int) -> tuple[int, int, int]:
    """How many groups of rows a warp works on, how many warps share them, and the blocks on their way at a time.

    Two groups read x once for both, which pays for several vectors as long as all processors have work; their thread
    blocks may have half the warps, and twice the registers each. Of a lone vector, eight blocks are on their way where
    registers allow it; of several, four are enough.
    """
    together = 2 if 3 <= n <= 8 and groups >= 3 * processors else 1
    waiting, sums = together * (kept + -(-kept // 3)) + n, together * n  # registers for a block, and for all
    ways = [(WARPS // half, unroll) for unroll in (8, 4, 2, 1)[n > 1 :] for half in (1, 2)[:together]]
    fits = (way for way in ways if way[1] * waiting + sums <= REGISTERS * WARPS // way[0])
    warps, unroll = next(fits, (WARPS, 1))
    return together, min(warps, 1 << (blocks - 1).bit_length()), unroll


def twins(dtype: torch.dtype, n: int, kept: int, blocks: int, warps: int) -> int:
    """How many pairs of blocks are on their way at a time, if a lone vector's are taken in pairs.

    As many as the registers hold, up to four, but so that all warps have some.
    """
    if n > 1 or dtype == torch.float32:
        return 0
    each = kept + -(-kept // 3) + 2  # registers for a pair
    return next((many for many in (4, 2, 1) if many * each <= REGISTERS and 2 * many * warps <= blocks), 0)
