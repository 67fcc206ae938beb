"""Products with a few vectors: warp_shuffle.cu, where a shuffle gives every row the inputs of its survivors."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..format import DTYPE_CODES, LANES
from .launcher import MAX_WARP_BLOCK, CompiledKernel, compile_kernel, prepare_bias

MAX_VECTORS = 16
MAX_WARPS = 16  # of a thread block
# Registers of a thread for sums and loads in flight: of 64, so that a multiprocessor holds two thread blocks.
REGISTERS = 56


class ShuffleConfig(NamedTuple):
    """The division of the work; the fields are macros of warp_shuffle.cu."""

    row_groups: int  # groups of 32 rows that a warp works on
    warps: int  # of a thread block, which share the blocks of these rows
    unroll: int  # blocks that are loaded at a time


def multiply(
    x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, y: Tensor, columns: int, block: int, relu: bool
) -> bool:
    """Write x Wᵀ + bias to y; return False for arguments this kernel does not take."""
    (n, rows), (groups, blocks, kept, _) = y.shape, values.shape
    dtype = values.dtype
    if n > MAX_VECTORS or block > MAX_WARP_BLOCK or x.dtype != dtype:
        return False
    prepared = prepare_launch(dtype, n, kept, block, groups, blocks, x.get_device())
    if prepared is None:
        return False
    row_groups, kernel = prepared
    if x.stride(1) != 1:
        x = x.contiguous()
    bias, float_bias = prepare_bias(bias, dtype)
    y_vector, y_row = y.stride()
    sizes = rows, columns, x.stride(0), blocks, y_row, y_vector, float_bias, relu
    kernel((-(-groups // row_groups), 1, 1), (values, indices, x, bias, y), sizes)
    return True


@cache
def prepare_launch(
    dtype: torch.dtype, n: int, kept: int, block: int, groups: int, blocks: int, device: int
) -> tuple[int, CompiledKernel] | None:
    """Return the groups of rows that a warp works on, and the kernel; None where it cannot be compiled."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    config = choose_config(n, kept, groups, blocks, processors)
    pairs = choose_block_pairs(dtype, n, kept, blocks, config.warps)
    macros = kernel_macros(dtype, n, kept, block, config)
    kernel = compile_kernel("warp_shuffle", device, config.warps * LANES, **macros, BLOCK_PAIRS=pairs)
    return None if kernel is None else (config.row_groups, kernel)


def kernel_macros(dtype: torch.dtype, n: int, kept: int, block: int, config: ShuffleConfig) -> dict[str, int]:
    """Return the macros that warp_shuffle.cu always takes."""
    sizes = {"VALUE_TYPE": DTYPE_CODES[dtype], "KEPT": kept, "BLOCK": block, "VECTORS": n}
    return sizes | {"ROW_GROUPS": config.row_groups, "WARPS": config.warps, "UNROLL": config.unroll}


def choose_config(n: int, kept: int, groups: int, blocks: int, processors: int) -> ShuffleConfig:
    """Return the division of the work, as measured to be fastest on an H200.

    A warp with two groups reads x once for both, which pays for several vectors as long as all multiprocessors have
    work; its thread block may have half the warps, and twice the registers each. For one vector, eight blocks are in
    flight where registers allow it; for several, four are enough.
    """
    row_groups = 2 if 3 <= n <= 8 and groups >= 3 * processors else 1
    block_registers, sums = row_groups * (kept + -(-kept // 3)) + n, row_groups * n
    candidates = [(MAX_WARPS // half, unroll) for unroll in (8, 4, 2, 1)[n > 1 :] for half in (1, 2)[:row_groups]]
    fitting = (
        (warps, unroll) for warps, unroll in candidates
        if unroll * block_registers + sums <= REGISTERS * MAX_WARPS // warps
    )  # fmt: skip
    warps, unroll = next(fitting, (MAX_WARPS, 1))
    return ShuffleConfig(row_groups, min(warps, 1 << (blocks - 1).bit_length()), unroll)


def choose_block_pairs(dtype: torch.dtype, n: int, kept: int, blocks: int, warps: int) -> int:
    """Return how many pairs of blocks a warp loads at a time for one vector of 16 bits, or 0 for single blocks.

    That is as many as the registers hold, up to four, but so that all warps have some.
    """
    if n > 1 or dtype == torch.float32:
        return 0
    pair_registers = kept + -(-kept // 3) + 2
    fitting = (
        pairs for pairs in (4, 2, 1) if pairs * pair_registers <= REGISTERS and 2 * pairs * warps <= blocks
    )  # fmt: skip
    return next(fitting, 0)
