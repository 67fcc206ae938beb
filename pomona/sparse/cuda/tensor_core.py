"""Products with more vectors: tensor_core.cu, where blocks are expanded in shared memory for the tensor cores."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch import Tensor

from ..format import DTYPE_CODES, LANES
from .launcher import CompiledKernel, compile_kernel
from .tensor_core_common import (
    CACHE_BYTES_PER_CYCLE,
    MAX_SHARED_BYTES,
    MAX_SPLIT_K,
    START_CYCLES,
    STEP_BLOCKS,
    VECTOR_TILE,
    WARP_ROWS,
    TensorCoreConfig,
    exchange_cycles,
    multiply_with,
    padded_block_width,
    read_shared_limit,
)

MIN_MAJOR = 8  # the oldest compute capability that has the instructions
CLUSTER_MAJOR = 9  # the oldest compute capability that has clusters
MAX_REGISTER_SURVIVORS = 3  # survivors of a block that stay in registers; more are written to shared memory
BARRIER_CYCLES = 1500  # cycles that a stage of x takes at least, as measured on an H200


@dataclass(frozen=True)
class MmaConfig(TensorCoreConfig):
    """The division of the work; the fields are macros of tensor_core.cu, which describes them."""

    width: int
    vector_tiles: int
    warps: int
    slice_k: int
    split_k: int
    row_tiles: int
    stage_steps: int
    stages: int
    cluster: int = 1

    def macros(self) -> dict[str, int]:
        """Return the fields as macros."""
        return {name.upper(): value for name, value in asdict(self).items()}

    @property
    def rows(self) -> int:
        return self.warps // self.slice_k * WARP_ROWS

    def shared_bytes(self, kept: int) -> int:
        """Return the bytes of shared memory: first of the expanded matrix and x, at the end of all sums."""
        bytes_per_place = 1 if kept <= MAX_REGISTER_SURVIVORS else 2
        expanded = self.warps * LANES * 2 * self.row_tiles * self.width * bytes_per_place
        staged = self.stages * self.stage_steps * STEP_BLOCKS * self.width * self.vector_tiles * VECTOR_TILE * 2
        sums = self.slice_k * self.vector_tiles * VECTOR_TILE * (self.rows + 4) * 4
        return max(expanded + staged, sums)


def multiply(
    x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, y: Tensor, columns: int, block: int, relu: bool
) -> bool:
    """Write x Wᵀ + bias to y; return False for arguments this kernel does not take."""
    return multiply_with(prepare_launch, x, values, indices, bias, y, block, relu)


@cache
def prepare_launch(
    dtype: torch.dtype, n: int, kept: int, block: int, groups: int, blocks: int, device: int
) -> tuple[MmaConfig, CompiledKernel] | None:
    """Return the division of the work on this device, and the kernel; None where it cannot be used."""
    properties = torch.cuda.get_device_properties(device)
    limit = read_shared_limit(device)
    clusters = properties.major >= CLUSTER_MAJOR
    config = choose_config(n, kept, block, groups, blocks, properties.multi_processor_count, clusters, limit)
    if config is None or properties.major < MIN_MAJOR:
        return None
    return compile_config(config, dtype, kept, device)


def compile_config(
    config: MmaConfig, dtype: torch.dtype, kept: int, device: int, **convolution: int
) -> tuple[MmaConfig, CompiledKernel] | None:
    """Return the config with its kernel, with the macros of a convolution if given; None where it does not compile."""
    macros = {"VALUE_TYPE": DTYPE_CODES[dtype], "KEPT": kept, **config.macros(), **convolution}
    kernel = compile_kernel("tensor_core", device, config.warps * LANES, config.shared_bytes(kept), **macros)
    return None if kernel is None else (config, kernel)


def max_vector_tiles(kept: int) -> int:
    """Return the tiles of vectors whose sums fit the registers, besides the survivors and their places."""
    return (200 - 14 * kept) // 18


def choose_config(
    n: int,
    kept: int,
    block: int,
    groups: int,
    blocks: int,
    processors: int,
    clusters: bool,
    limit: int = MAX_SHARED_BYTES,
) -> MmaConfig | None:
    """Return the config with the fewest estimated cycles; None where registers or shared memory do not suffice."""
    for most in range(max_vector_tiles(kept), 0, -1):  # of tiles of vectors, fewer where shared memory is short
        slices = -(-n // (VECTOR_TILE * most))
        vector_tiles = -(-n // (VECTOR_TILE * slices))
        configs = candidate_configs(vector_tiles, kept, block, blocks, clusters)
        possible = [config for config in configs if config.shared_bytes(kept) <= limit]
        if possible:
            steps = -(-blocks // STEP_BLOCKS)
            return min(possible, key=lambda config: estimate_cycles(config, config.grid(n, groups), steps, processors))
    return None


def candidate_configs(vector_tiles: int, kept: int, block: int, blocks: int, clusters: bool) -> list[MmaConfig]:
    """Return candidates for the division of the work, for this many tiles of vectors of a thread block."""
    steps = -(-blocks // STEP_BLOCKS)
    return [
        MmaConfig(
            padded_block_width(block), vector_tiles, warps, slice_k, split_k, *staging,
            2 if clusters and split_k % 2 == 0 else 1,  # pairs: larger clusters leave multiprocessors without one
        )
        for warps in ((16, 8) if vector_tiles <= 2 else (8,))
        for slice_k in (8, 4, 2, 1)
        for split_k in range(1, min(MAX_SPLIT_K, steps) + 1)
        for staging in candidate_stagings(kept, slice_k, -(-steps // split_k))
    ]  # fmt: skip


def candidate_stagings(kept: int, slice_k: int, steps: int) -> list[tuple[int, int, int]]:
    """Return candidates for row_tiles, stage_steps and stages, for this many steps of a thread block.

    All of the thread block's x stays in shared memory, or a few steps at a time.
    """
    tiles = 4 if kept <= MAX_REGISTER_SURVIVORS else 2
    return [(tiles, steps, 1), (tiles // 2, steps, 1), (tiles, max(slice_k, 4), 2), (tiles, max(slice_k, 2), 2)]


def estimate_cycles(config: MmaConfig, grid: tuple[int, int, int], steps: int, processors: int) -> float:
    """Return an estimate of the cycles a product takes, fitted to measurements on an H200."""
    own_steps = -(-steps // config.split_k)
    waves = -(-grid[0] * grid[1] * grid[2] // processors)
    # Of a warp; tiles of rows share what they read of x.
    step_cycles = 120 + config.vector_tiles * (40 + 16 * (4 // config.row_tiles - 1))
    # A few warps do not keep a multiprocessor busy.
    multiply_cycles = -(-own_steps // config.slice_k) * (config.warps + 4) * step_cycles
    if config.stages == 1:
        x_bytes = own_steps * STEP_BLOCKS * config.width * config.vector_tiles * VECTOR_TILE * 2
        x_cycles = x_bytes / CACHE_BYTES_PER_CYCLE
    else:
        x_cycles = -(-own_steps // config.stage_steps) * BARRIER_CYCLES
    return waves * (START_CYCLES + x_cycles + multiply_cycles) + exchange_cycles(config)
