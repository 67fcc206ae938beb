"""Products with more vectors on a Hopper GPU: hopper_wgmma.cu, where wgmma reads both factors from shared memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch import Tensor

from ..format import DTYPE_CODES, LANES
from .launcher import CompiledKernel, compile_kernel, supports_early_launch
from .tensor_core_common import (
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
)

MAJOR = 9  # the compute capability of Hopper: later ones do not have wgmma
LOADER_WARPS = 4  # warps of a thread block that load x and multiply nothing
ARRANGE_WARPS = 4  # warps of a thread block of arrange_input.cu
BARRIER_BYTES = 8
MAX_KEPT = 12  # survivors of a block
MIN_GROUPS = 5  # groups of rows: with fewer, half of a thread block's rows would be missing
MEMORY_BYTES_PER_CYCLE = 18  # that a multiprocessor reads from memory, as measured on an H200


@dataclass(frozen=True)
class WgmmaConfig(TensorCoreConfig):
    """The division of the work; the fields are macros of hopper_wgmma.cu, which describes them."""

    width: int
    vector_tiles: int
    warpgroups: int
    split_k: int
    cluster: int
    stages: int
    swap_operands: int

    def macros(self) -> dict[str, int | str]:
        """Return the fields as macros, and the operands of the wgmma instruction as text for the assembler."""
        sums = self.instruction_tiles * 4  # of a thread
        operands = {
            "WGMMA_N": f'"{self.instruction_tiles * VECTOR_TILE}"',
            "WGMMA_SUM_REGISTERS": '"' + ", ".join(f"%{i}" for i in range(sums)) + '"',
            "WGMMA_SUM_OPERANDS": ", ".join(f'"+f"(d[{i}])' for i in range(sums)),
            "WGMMA_A": f'"%{sums}"',
            "WGMMA_B": f'"%{sums + 1}"',
        }
        return {**{name.upper(): value for name, value in asdict(self).items()}, "WARPS": self.warps, **operands}

    @property
    def instruction_tiles(self) -> int:
        """The tiles of 8 vectors, or of 8 rows with swapped operands, that an instruction multiplies by 64 others."""
        return 32 if self.swap_operands else self.vector_tiles

    @property
    def warps(self) -> int:
        """The warps of a thread block."""
        return 4 * self.warpgroups + LOADER_WARPS

    @property
    def rows(self) -> int:
        return 4 * self.warpgroups * WARP_ROWS

    @property
    def shared_bytes(self) -> int:
        """The bytes of shared memory: of the expanded matrix and x, at the end of all sums; and of the barriers."""
        step_bytes = STEP_BLOCKS * self.width * 2
        vectors = self.vector_tiles * VECTOR_TILE
        operands = (self.rows + self.stages * vectors) * step_bytes + 64 * self.width
        return max(operands, vectors * (self.rows + 4) * 4) + 2 * self.stages * BARRIER_BYTES

    def arrange_input(self, x: Tensor, columns: int, blocks: int) -> Tensor | None:
        """Return x in steps of the vectors that a thread block multiplies, one after another; see arrange_input.cu."""
        code = DTYPE_CODES[x.dtype]
        macros = {"VALUE_TYPE": code, "WIDTH": self.width, "VECTOR_TILES": self.vector_tiles, "WARPS": ARRANGE_WARPS}
        kernel = compile_kernel("arrange_input", x.get_device(), ARRANGE_WARPS * LANES, **macros)
        if kernel is None:
            return None
        n, steps, vectors = len(x), -(-blocks // STEP_BLOCKS), VECTOR_TILE * self.vector_tiles
        arranged = x.new_empty(-(-n // vectors), steps * STEP_BLOCKS * self.width * vectors)
        threads = steps * vectors * self.width // 8
        grid = -(-threads // (ARRANGE_WARPS * LANES)), len(arranged), 1
        kernel(grid, (x, arranged), (columns, x.stride(0), steps, n))
        return arranged


def multiply(
    x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, y: Tensor, columns: int, block: int, relu: bool
) -> bool:
    """Write x Wᵀ + bias to y; return False for arguments this kernel does not take."""
    return multiply_with(prepare_launch, x, values, indices, bias, y, block, relu)


@cache
def prepare_launch(
    dtype: torch.dtype, n: int, kept: int, block: int, groups: int, blocks: int, device: int, **convolution: int
) -> tuple[WgmmaConfig, CompiledKernel] | None:
    """Return the division of the work on this device, and the kernel; None where it cannot be used.

    `convolution` is the macros of a convolution, for which the kernel gathers its input itself.
    """
    properties = torch.cuda.get_device_properties(device)
    if properties.major != MAJOR or kept > MAX_KEPT or groups < MIN_GROUPS:
        return None
    config = choose_config(n, kept, block, groups, blocks, properties.multi_processor_count, bool(convolution))
    early = {} if convolution else {"EARLY_LAUNCH": int(supports_early_launch(device))}
    macros = {"VALUE_TYPE": DTYPE_CODES[dtype], "KEPT": kept, **config.macros(), **convolution, **early}
    kernel = compile_kernel("hopper_wgmma", device, config.warps * LANES, config.shared_bytes, **macros)
    return None if kernel is None else (config, kernel)


def choose_config(
    n: int, kept: int, block: int, groups: int, blocks: int, processors: int, gather: bool = False
) -> WgmmaConfig:
    """Return the config with the fewest estimated cycles; `gather` is for a convolution."""
    width, steps = padded_block_width(block), -(-blocks // STEP_BLOCKS)
    configs = [
        WgmmaConfig(width, tiles, warpgroups, split_k, cluster, 4 if gather or tiles > 4 else 6, int(tiles > 4))
        for tiles in candidate_vector_tiles(n, kept, gather)
        for warpgroups in (2, 1)
        for split_k in range(1, min(MAX_SPLIT_K, steps) + 1)
        for cluster in (2, 1)
        if split_k % cluster == 0
    ]
    possible = (config for config in configs if config.shared_bytes <= MAX_SHARED_BYTES)
    return min(
        possible, key=lambda config: estimate_cycles(config, config.grid(n, groups), kept, steps, processors, gather)
    )


def candidate_vector_tiles(n: int, kept: int, gather: bool) -> list[int]:
    """Return candidates for the tiles of vectors of a thread block.

    Operands are swapped for 8 tiles; fewer are limited by registers. Where a convolution gathers its input, the
    vectors are a multiple of a warp's lanes or divide them.
    """
    needed = -(-n // VECTOR_TILE)
    fitting = [tiles for tiles in ((1, 2, 4) if gather else (1, 2, 3, 4)) if tiles >= needed][:1] or [4]
    return fitting + [8] * (needed > 4 and kept <= 9)


def estimate_cycles(
    config: WgmmaConfig, grid: tuple[int, int, int], kept: int, steps: int, processors: int, gather: bool
) -> float:
    """Return an estimate of the cycles a product takes, fitted to measurements on an H200."""
    own_steps = -(-steps // config.split_k)
    waves = -(-grid[0] * grid[1] * grid[2] // processors)
    multiply_cycles = config.width * (32 if config.swap_operands else 16 + 2 * config.vector_tiles)  # of a warpgroup
    expand_cycles = 150 + 130 * kept
    matrix_cycles = config.rows * STEP_BLOCKS * (kept + -(-kept // 3)) * 2 / MEMORY_BYTES_PER_CYCLE
    x_cycles = config.vector_tiles * config.width * (5.5 if gather else 1)
    # One warpgroup expands while others multiply.
    step_cycles = max(
        config.warpgroups * multiply_cycles, expand_cycles + multiply_cycles, matrix_cycles, x_cycles
    )  # fmt: skip
    return waves * (START_CYCLES + own_steps * step_cycles) + exchange_cycles(config)
