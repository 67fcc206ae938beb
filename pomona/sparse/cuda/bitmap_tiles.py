"""Products of a matrix packed with bitmaps: bitmap_tiles.cu, where lanes expand their weights for the tensor cores."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch import Tensor

from ..bitmap import ALIGNMENT, LANES, SLAB_ROWS, STEP_COLUMNS, STEP_ENTRIES
from ..packed_tensor import DTYPE_CODES
from .launcher import CompiledKernel, compile_kernel, prepare_bias
from .tensor_core import CLUSTER_MAJOR, MIN_MAJOR
from .tensor_core_common import (
    MAX_SHARED_BYTES,
    MAX_SPLIT_K,
    START_CYCLES,
    VECTOR_TILE,
    TensorCoreConfig,
    exchange_cycles,
    pad_blocks,
    read_shared_limit,
)

PIECE_BYTES = 16  # that are copied to shared memory at a time
WORD_PIECES = 32  # of the bits of a step
MAX_VECTOR_TILES = 8  # whose sums fit the registers
WARPS = {1: (32, 16, 8, 4), 2: (16, 8, 4), 4: (8, 4), 8: (8, 4)}  # of a thread block, as registers allow
MAX_STAGES = 4
# Estimates of the cycles of a step of a warp, for a multiprocessor that has other warps, and for each tile of vectors.
STEP_CYCLES, VECTOR_TILE_CYCLES = 170, 25
INPUT_BYTES_PER_CYCLE = 10  # of x that a multiprocessor copies
MEMORY_BYTES_PER_CYCLE = 18  # that a multiprocessor reads from memory, as measured on an H200


@dataclass(frozen=True)
class BitmapConfig(TensorCoreConfig):
    """The division of the work; the fields are macros of bitmap_tiles.cu, which describes them."""

    vector_tiles: int
    warps: int
    slice_k: int
    split_k: int
    cluster: int
    stages: int

    @property
    def rows(self) -> int:
        return self.warps // self.slice_k * SLAB_ROWS

    def shared_bytes(self, steps: int, stage_pieces: int) -> int:
        """Return the bytes of shared memory: first of the stages and x, at the end of all sums."""
        staged = self.warps * self.stages * stage_pieces * PIECE_BYTES
        vectors = self.vector_tiles * VECTOR_TILE
        x_bytes = -(-steps // self.split_k) * STEP_COLUMNS * vectors * 2
        # A lane may read as many values past the last stage as a step can have.
        past_stages = (STEP_ENTRIES + ALIGNMENT) * 2
        sums = self.slice_k * vectors * (self.rows + 4) * 4
        return max(staged + max(x_bytes, past_stages), sums)


def multiply(x: Tensor, values: Tensor, words: Tensor, starts: Tensor, bias: Tensor | None, y: Tensor, columns: int,
             most: int, relu: bool) -> bool:  # fmt: skip
    """Write x Wᵀ + bias to y, both of any strides; return False for arguments this kernel does not take."""
    (n, rows), (slabs, steps, _, _), dtype = y.shape, words.shape, values.dtype
    if x.dtype != dtype or dtype == torch.float32 or (values.data_ptr() | words.data_ptr()) % PIECE_BYTES:
        return False
    prepared = prepare_launch(dtype, n, slabs, steps, most, x.get_device())
    if prepared is None:
        return False
    config, kernel = prepared
    x, columns = pad_blocks(x, steps, STEP_COLUMNS, STEP_COLUMNS)
    bias, float_bias = prepare_bias(bias, dtype)
    grid = config.grid(n, slabs * SLAB_ROWS // LANES)
    stage = rows, columns, x.stride(0), steps, len(values), stage_pieces(most)
    sizes = *stage, n, y.stride(1), y.stride(0), float_bias, relu
    kernel(grid, (values, words, starts, x, bias, y, *config.allocate_exchange(grid, x.device)), sizes)
    return True


def stage_pieces(most: int) -> int:
    """Return the pieces of a stage: of the bits of a step, and of values that may start and end within a piece."""
    return WORD_PIECES + (most + 2 * (ALIGNMENT - 1)) // ALIGNMENT


@cache
def prepare_launch(
    dtype: torch.dtype, n: int, slabs: int, steps: int, most: int, device: int
) -> tuple[BitmapConfig, CompiledKernel] | None:
    """Return the division of the work on this device, and the kernel; None where it cannot be used."""
    properties = torch.cuda.get_device_properties(device)
    limit = read_shared_limit(device)
    clusters = properties.major >= CLUSTER_MAJOR
    config = choose_config(n, slabs, steps, most, properties.multi_processor_count, clusters, limit)
    if config is None or properties.major < MIN_MAJOR:
        return None
    macros = {name.upper(): value for name, value in asdict(config).items()} | {"VALUE_TYPE": DTYPE_CODES[dtype]}
    shared_bytes = config.shared_bytes(steps, stage_pieces(most))
    kernel = compile_kernel("bitmap_tiles", device, config.warps * LANES, shared_bytes, **macros)
    return None if kernel is None else (config, kernel)


def choose_config(
    n: int, slabs: int, steps: int, most: int, processors: int, clusters: bool, limit: int = MAX_SHARED_BYTES
) -> BitmapConfig | None:
    """Return the config with the fewest estimated cycles; None where shared memory does not suffice."""
    needed = -(-n // VECTOR_TILE)
    vector_tiles = next((tiles for tiles in (1, 2, 4) if tiles >= needed), MAX_VECTOR_TILES)
    configs = [
        BitmapConfig(vector_tiles, warps, slice_k, split_k, cluster, stages)
        for warps in WARPS[vector_tiles]
        for slice_k in (8, 4, 2, 1)
        if slice_k <= warps
        for split_k in range(1, min(MAX_SPLIT_K, steps) + 1)
        for cluster in ((2, 1) if clusters else (1,))
        if split_k % cluster == 0
        for stages in range(2, MAX_STAGES + 1)
    ]
    pieces = stage_pieces(most)
    possible = (config for config in configs if config.shared_bytes(steps, pieces) <= limit)
    return min(possible, key=lambda c: estimate_cycles(c, n, slabs, steps, most, processors), default=None)


def estimate_cycles(config: BitmapConfig, n: int, slabs: int, steps: int, most: int, processors: int) -> float:
    """Return an estimate of the cycles a product takes, fitted to measurements on an H200."""
    grid = config.grid(n, slabs * SLAB_ROWS // LANES)
    waves = -(-grid[0] * grid[1] * grid[2] // processors)
    own_steps = -(-steps // config.split_k)
    step_bytes = most * 2 + WORD_PIECES * PIECE_BYTES
    # A few warps do not keep a multiprocessor busy.
    busy_cycles = (config.warps + 4) * (STEP_CYCLES + VECTOR_TILE_CYCLES * config.vector_tiles)
    memory_cycles = config.warps * step_bytes / MEMORY_BYTES_PER_CYCLE
    step_cycles = max(busy_cycles + memory_cycles / 2, memory_cycles)  # which overlap in part
    x_bytes = own_steps * STEP_COLUMNS * min(n, config.vector_tiles * VECTOR_TILE) * 2
    start = START_CYCLES + x_bytes / INPUT_BYTES_PER_CYCLE
    return waves * (start + -(-own_steps // config.slice_k) * step_cycles) + exchange_cycles(config)
