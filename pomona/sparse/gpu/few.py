"""A few vectors: few.cu, where a shuffle hands every row the inputs of its survivors."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..balanced import LANES
from .compiled import KINDS, Kernel, kernel, legible

WIDEST = 32  # the columns of a block that a warp holds
MOST = 16  # vectors
REGISTERS = 48  # of a thread, that may wait for what is on its way


def multiply(
    x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, y: Tensor, columns: int, block: int, relu: bool
) -> bool:
    """y = x Wᵀ + bias; False where this is not for this kernel."""
    (n, rows), (groups, blocks, kept, _) = y.shape, values.shape
    if n > MOST or block > WIDEST or x.dtype != values.dtype:
        return False
    made = plan(values.dtype, n, kept, block, groups, blocks, x.get_device())
    if made is None:
        return False
    together, go = made
    if x.stride(1) != 1:
        x = x.contiguous()
    bias, wide = legible(bias, values.dtype)
    sizes = rows, columns, x.stride(0), blocks, y.stride(1), y.stride(0), wide, relu
    go((-(-groups // together), 1, 1), (values, indices, x, bias, y), sizes)
    return True


@cache
def plan(
    dtype: torch.dtype, n: int, kept: int, block: int, groups: int, blocks: int, device: int
) -> tuple[int, Kernel] | None:
    """How many groups of rows a warp works on, and the kernel."""
    together, warps, unroll = shape(n, kept, groups, blocks)
    macros = {"KIND": KINDS[dtype], "KEPT": kept, "BLOCK": block, "BATCH": n}
    made = kernel("few", device, warps * LANES, **macros, GROUPS=together, WARPS=warps, UNROLL=unroll)
    return None if made is None else (together, made)


def shape(n: int, kept: int, groups: int, blocks: int) -> tuple[int, int, int]:
    """How many groups of rows a warp works on, how many warps share them, and the blocks on their way at a time."""
    together = 2 if 3 <= n <= 8 and groups * n >= 2048 else 1
    waiting = together * (kept + -(-kept // 3)) + n  # registers of a block
    unroll = next(u for u in (8, 4, 2, 1) if u * waiting <= REGISTERS or u == 1)
    return together, min(16, 1 << (blocks - 1).bit_length()), unroll
