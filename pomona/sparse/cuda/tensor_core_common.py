"""The parts that the kernels for tensor cores share: division of the work, arrangement of x, partial sums, launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..format import LANES
from .arrival_counters import arrival_counters
from .launcher import MAX_WARP_BLOCK, CompiledKernel, prepare_bias

WARP_ROWS = 64  # rows of a warp
STEP_BLOCKS = 4  # blocks that a warp multiplies in one step, side by side
VECTOR_TILE = 8  # vectors of a tile, as the tensor cores multiply them
MAX_SPLIT_K = 16  # thread blocks that share the columns
MAX_SHARED_BYTES = 227 << 10  # of a thread block of a Hopper GPU
# For estimates of the time: bytes a cycle that a multiprocessor reads from the cache, and cycles until a thread block
# has started and until the last one has arrived, as measured on an H200.
CACHE_BYTES_PER_CYCLE, START_CYCLES, ARRIVAL_CYCLES = 64, 2000, 2500


def read_shared_limit(device: int) -> int:
    """Return the bytes of shared memory that a thread block may have on a device: from 99 to 227 KiB."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", MAX_SHARED_BYTES)


class TensorCoreConfig:
    """The division of the work of a kernel for tensor cores among thread blocks; see split_sums.cuh."""

    width: int  # columns of a block in x, padded
    vector_tiles: int  # tiles of vectors of a thread block
    split_k: int  # thread blocks that share the columns
    cluster: int  # thread blocks of a cluster, which add up their sums in shared memory

    @property
    def rows(self) -> int:
        """The rows of a thread block."""
        raise NotImplementedError

    @property
    def partial_sums(self) -> int:
        """The parts of a sum that are added up through global memory."""
        return self.split_k // self.cluster

    def grid(self, n: int, groups: int) -> tuple[int, int, int]:
        """Return the grid of thread blocks for n vectors and this many groups of rows."""
        return -(-n // (VECTOR_TILE * self.vector_tiles)), self.split_k, -(-groups * LANES // self.rows)

    def allocate_exchange(
        self, grid: tuple[int, int, int], device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return memory for partial sums and arrival counters; None for both where there is a single part."""
        if self.partial_sums == 1:
            return None, None
        tiles = grid[0] * grid[2]
        size = tiles * self.partial_sums * self.vector_tiles * VECTOR_TILE * self.rows
        sums = torch.empty(size, device=device, dtype=torch.float32)
        return sums, arrival_counters(tiles * self.cluster, device)

    def arrange_input(self, x: Tensor, columns: int, blocks: int) -> Tensor | None:
        """Return x in the order in which the kernel reads it; None where that needs a kernel and there is none."""
        return x


def multiply_with(
    prepare_launch: Callable[..., tuple[TensorCoreConfig, CompiledKernel] | None], x: Tensor, values: Tensor,
    indices: Tensor, bias: Tensor | None, y: Tensor, block: int, relu: bool,
) -> bool:  # fmt: skip
    """Write x Wᵀ + bias to y by the kernel that `prepare_launch` returns; return False where there is none."""
    (n, rows), (groups, blocks, kept, _) = y.shape, values.shape
    if block > MAX_WARP_BLOCK or x.dtype != values.dtype or x.dtype == torch.float32:
        return False
    prepared = prepare_launch(values.dtype, n, kept, block, groups, blocks, x.get_device())
    if prepared is None:
        return False
    config, kernel = prepared
    x, columns = pad_blocks(x, blocks, block, config.width)
    bias, float_bias = prepare_bias(bias, values.dtype)
    arranged = config.arrange_input(x, columns, blocks)
    if arranged is None:
        return False
    grid = config.grid(n, groups)
    sizes = rows, columns, arranged.stride(0), blocks, n, y.stride(1), y.stride(0), float_bias, relu
    kernel(grid, (values, indices, arranged, bias, y, *config.allocate_exchange(grid, x.device)), sizes)
    return True


def pad_blocks(x: Tensor, blocks: int, block: int, width: int) -> tuple[Tensor, int]:
    """Return x with every block padded to `width` and aligned for loads of 16 bytes, and its number of columns."""
    columns = x.shape[1]
    if block == width and x.stride(1) == 1 and not (columns % 8 or x.stride(0) % 8 or x.data_ptr() % 16):
        return x, columns
    divided = pad(x, (0, blocks * block - columns)).view(len(x), blocks, block)
    return pad(divided, (0, width - block)).view(len(x), -1).contiguous(), blocks * width


def padded_block_width(block: int) -> int:
    """Return the width to which a kernel for tensor cores pads a block in x."""
    return 16 if block <= 16 else 32


def exchange_cycles(config: TensorCoreConfig) -> float:
    """Return an estimate of the cycles in which thread blocks add up their partial sums."""
    if config.partial_sums == 1:
        return 0
    sums = VECTOR_TILE * config.vector_tiles * config.rows
    return ARRIVAL_CYCLES + (1 + config.partial_sums) * sums * 4 / config.cluster / CACHE_BYTES_PER_CYCLE
