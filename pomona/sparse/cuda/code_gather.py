"""Products of a balanced matrix of int4 or int8 codes with a few vectors: code_gather.cu."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..format import LANES
from ..packed_tensor import DTYPE_CODES
from .arrival_counters import arrival_counters
from .code_units import LOAD_WORDS, UnitLayout
from .launcher import CompiledKernel, compile_kernel, prepare_bias
from .tensor_core_common import MAX_SHARED_BYTES, read_shared_limit

MAX_VECTORS = 16
MAX_LAUNCH_BYTES = 16  # of the inputs of one column, which a thread reads at a time
WARPS = 16  # of a thread block
MAX_STAGES = 2  # units of a warp in shared memory; with 1, it loads them into registers
RING_SHARE = 200 / 227  # of shared memory for units, half of it where inputs are there too
MAX_PARTS = 16  # thread blocks that share the columns
# For estimates of the time: the bytes that a multiprocessor reads in the time in which thread blocks exchange sums.
EXCHANGE_BYTES = 52 << 10
INPUT_RATE = 2  # bytes of inputs, from the cache, that it reads in the time of one byte of units
MULTIPROCESSOR_EXTRA_BYTES = 1 << 10  # of shared memory, besides those that a thread block may have
RESERVED_SHARED_BYTES = 2 << 10  # of a thread block, by the system and for variables of the kernel


class GatherConfig(NamedTuple):
    """The division of the work; the fields are macros of code_gather.cu."""

    vectors: int
    warps: int  # of a thread block
    stages: int  # units of a warp in shared memory
    min_blocks: int  # thread blocks that a multiprocessor has to hold
    gather: int  # whether rows read their columns of x from shared memory

    @property
    def macros(self) -> dict[str, int]:
        """The macros of code_gather.cu."""
        return {name.upper(): value for name, value in self._asdict().items()}


class Tiles(NamedTuple):
    """The groups of rows of a thread block, and the thread blocks that share the columns."""

    groups: int
    parts: int


class Launch(NamedTuple):
    """A kernel and how it is launched."""

    config: GatherConfig
    tiles: Tiles
    kernel: CompiledKernel


def multiply(
    layout: UnitLayout, x: Tensor, units: Tensor, bias: Tensor | None, y: Tensor, columns: int, relu: bool
) -> bool:
    """Write x Wᵀ + bias to y, both of any strides; return False for arguments this kernel does not take."""
    if len(x) > MAX_VECTORS or x.dtype not in DTYPE_CODES:
        return False
    launch = prepare_launch(x.dtype, len(x), layout, *units.shape[:2], x.get_device())
    if launch is None:
        return False
    run(launch, x, units, bias, y, columns, relu)
    return True


def run(launch: Launch, x: Tensor, units: Tensor, bias: Tensor | None, y: Tensor, columns: int, relu: bool) -> None:
    """Write x Wᵀ + bias to y by a kernel, in as many launches as it needs."""
    config, tiles, kernel = launch
    (n, rows), (groups, slices) = y.shape, units.shape[:2]
    if x.stride(1) != 1:
        x = x.contiguous()
    bias, float_bias = prepare_bias(bias, x.dtype)
    grid = (-(-groups // tiles.groups), tiles.parts, 1)
    exchange, arrivals = None, None
    if tiles.parts > 1:
        size = grid[0] * tiles.parts * tiles.groups * config.vectors * LANES
        exchange = torch.empty(size, device=x.device, dtype=torch.float32)
        arrivals = arrival_counters(grid[0], x.device)
    for first in range(0, n, config.vectors):
        some, their_y = x[first : first + config.vectors], y[first : first + config.vectors]
        y_vector, y_row = their_y.stride()
        tensors = units, some, bias, their_y, exchange, arrivals
        sizes = rows, columns, x.stride(0), slices, tiles.groups, len(some), y_row, y_vector, float_bias, relu
        kernel(grid, tensors, sizes)


@cache
def prepare_launch(
    dtype: torch.dtype, n: int, layout: UnitLayout, groups: int, slices: int, device: int
) -> Launch | None:
    """Return the kernel and the division of the work; None where the inputs do not fit into shared memory."""
    limit = read_shared_limit(device)
    config = choose_config(dtype, n, layout, limit)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    tiles = choose_tiles(config, layout, dtype, groups, slices, processors, limit)
    return None if tiles is None else compile_launch(config, tiles, layout, dtype, slices, device)


def compile_launch(
    config: GatherConfig, tiles: Tiles, layout: UnitLayout, dtype: torch.dtype, slices: int, device: int
) -> Launch | None:
    """Return the kernel for a division of the work; None where it cannot be compiled."""
    macros = {**layout.macros, **config.macros, "VALUE_TYPE": DTYPE_CODES[dtype]}
    used = shared_bytes(config, layout, dtype, slices, tiles)
    kernel = compile_kernel("code_gather", device, config.warps * LANES, used, **macros)
    return None if kernel is None else Launch(config, tiles, kernel)


def choose_config(dtype: torch.dtype, n: int, layout: UnitLayout, limit: int = MAX_SHARED_BYTES) -> GatherConfig:
    """Return the division of the work for n vectors."""
    vectors = min(1 << (n - 1).bit_length(), MAX_LAUNCH_BYTES // dtype.itemsize)
    gather = layout.block > LANES or vectors > 1
    stage_bytes = WARPS * LANES * layout.loads * LOAD_WORDS * 4
    stages = min(MAX_STAGES, max(1, round(limit * RING_SHARE) // (1 + gather) // stage_bytes))
    return GatherConfig(vectors, WARPS, stages, 1, int(gather))


def choose_tiles(
    config: GatherConfig,
    layout: UnitLayout,
    dtype: torch.dtype,
    groups: int,
    slices: int,
    processors: int,
    limit: int = MAX_SHARED_BYTES,
) -> Tiles | None:
    """Return the tiles that keep the busiest multiprocessor busy for the least time; None where none fit."""
    places, unit_bytes = processors * config.min_blocks, layout.loads * LOAD_WORDS * 4 * LANES
    best, least = None, float("inf")
    for parts in range(1, min(slices, MAX_PARTS) + 1):
        tiles = Tiles(max(1, -(-groups * parts // places)), parts)
        while tiles.groups > 1 and not fits(config, layout, dtype, slices, tiles, limit):
            tiles = Tiles(tiles.groups // 2, parts)
        if not fits(config, layout, dtype, slices, tiles, limit):
            continue
        rounds = -(-(-(-groups // tiles.groups) * parts) // places)
        own_slices = -(-slices // parts)
        inputs = own_slices * layout.unit_blocks * layout.block * config.vectors * dtype.itemsize // INPUT_RATE
        cost = rounds * (tiles.groups * own_slices * unit_bytes + inputs) + (parts > 1) * EXCHANGE_BYTES
        if cost < least:
            best, least = tiles, cost
    return best


def fits(
    config: GatherConfig,
    layout: UnitLayout,
    dtype: torch.dtype,
    slices: int,
    tiles: Tiles,
    limit: int = MAX_SHARED_BYTES,
) -> bool:
    """Return whether a multiprocessor has the shared memory for `min_blocks` of these thread blocks."""
    used = shared_bytes(config, layout, dtype, slices, tiles) + RESERVED_SHARED_BYTES
    return used * config.min_blocks <= limit + MULTIPROCESSOR_EXTRA_BYTES


def shared_bytes(config: GatherConfig, layout: UnitLayout, dtype: torch.dtype, slices: int, tiles: Tiles) -> int:
    """Return the bytes of the inputs, of the rings and of the sums of a thread block."""
    staged = -(-slices // tiles.parts) * layout.unit_blocks * layout.block * config.vectors * dtype.itemsize
    lanes = config.warps * LANES
    ring = lanes * config.stages * layout.loads * LOAD_WORDS * 4 if config.stages > 1 else 0
    return config.gather * (-(-staged // 16) * 16) + ring + tiles.groups * config.vectors * lanes * 4
