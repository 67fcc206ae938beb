"""More vectors: some.cu, where blocks are spread out in shared memory and multiplied on the tensor cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..format import LANES
from .compiled import KINDS, Kernel, kernel, legible
from .tickets import tickets

WIDEST = 32  # columns of a block
ROWS, SIDE = 64, 4  # of a warp; blocks side by side
PICKED = 3  # survivors of a block that stay in registers
LIMIT = 227 << 10  # bytes of shared memory that a thread block may have, where a device does not say
MOST = 16  # thread blocks that share the columns
PACE, START, BARRIER, TICKET = 64, 2000, 1500, 2500  # bytes a cycle that a processor has from the cache; cycles


class Cut:
    """How the work is cut for tensor cores; see sums.cuh."""

    width: int
    eights: int
    split: int
    cluster: int

    @property
    def rows(self) -> int:
        """Rows of a thread block."""
        raise NotImplementedError

    @property
    def shares(self) -> int:
        """Of a sum, that are added up with tickets."""
        return self.split // self.cluster

    def grid(self, n: int, groups: int) -> tuple[int, int, int]:
        """The thread blocks for so many vectors and groups of rows."""
        return -(-n // (8 * self.eights)), self.split, -(-groups * LANES // self.rows)

    def exchange(self, grid: tuple[int, int, int], device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Where thread blocks leave shares of their sums, and their tickets; nothing where there is but one share."""
        if self.shares == 1:
            return None, None
        tiles = grid[0] * grid[2]
        parts = torch.empty(tiles * self.shares * self.eights * 8 * self.rows, device=device, dtype=torch.float32)
        return parts, tickets(tiles * self.cluster, device)

    def lay(self, x: Tensor, columns: int, blocks: int) -> Tensor | None:
        """x as the kernel reads it; None where there is no kernel that lays it so."""
        return x


@dataclass(frozen=True)
class Shape(Cut):
    """See some.cu."""

    width: int
    eights: int
    warps: int
    team: int
    split: int
    tiles: int
    span: int
    stages: int
    cluster: int = 1

    def macros(self) -> dict[str, int]:
        return {name.upper(): value for name, value in asdict(self).items()}

    @property
    def rows(self) -> int:
        return self.warps // self.team * ROWS

    def shared(self, kept: int) -> int:
        """Bytes of shared memory: first what is spread out and x, at the end all sums."""
        spread = self.warps * LANES * 2 * self.tiles * self.width * (1 if kept <= PICKED else 2)
        stages = self.stages * self.span * SIDE * self.width * self.eights * 8 * 2
        return max(spread + stages, self.team * self.eights * 8 * (self.rows + 4) * 4)


def multiply(
    x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, y: Tensor, columns: int, block: int, relu: bool
) -> bool:
    """y = x Wᵀ + bias; False where this is not for this kernel."""
    return attempt(plan, x, values, indices, bias, y, block, relu)


def attempt(
    plan: Callable[..., tuple[Cut, Kernel] | None], x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None,
    y: Tensor, block: int, relu: bool,
) -> bool:  # fmt: skip
    """The same by a kernel for tensor cores, whichever is planned."""
    (n, rows), (groups, blocks, kept, _) = y.shape, values.shape
    if block > WIDEST or x.dtype != values.dtype or x.dtype == torch.float32:
        return False
    made = plan(values.dtype, n, kept, block, groups, blocks, x.get_device())
    if made is None:
        return False
    shape, go = made
    x, columns = arrange(x, blocks, block, shape.width)
    bias, wide = legible(bias, values.dtype)
    laid = shape.lay(x, columns, blocks)
    if laid is None:
        return False
    grid = shape.grid(n, groups)
    sizes = rows, columns, laid.stride(0), blocks, n, y.stride(1), y.stride(0), wide, relu
    go(grid, (values, indices, laid, bias, y, *shape.exchange(grid, x.device)), sizes)
    return True


def arrange(x: Tensor, blocks: int, block: int, width: int) -> tuple[Tensor, int]:
    """x and its columns, each block so wide, where all 16 bytes of a vector can be read at once."""
    columns = x.shape[1]
    if block == width and x.stride(1) == 1 and not (columns % 8 or x.stride(0) % 8 or x.data_ptr() % 16):
        return x, columns
    cut = pad(x, (0, blocks * block - columns)).view(len(x), blocks, block)
    return pad(cut, (0, width - block)).view(len(x), -1).contiguous(), blocks * width


@cache
def plan(
    dtype: torch.dtype, n: int, kept: int, block: int, groups: int, blocks: int, device: int
) -> tuple[Shape, Kernel] | None:
    """How the work is cut on this device, and the kernel."""
    properties = torch.cuda.get_device_properties(device)
    limit = getattr(properties, "shared_memory_per_block_optin", LIMIT)
    shape = cut(n, kept, block, groups, blocks, properties.multi_processor_count, properties.major >= 9, limit)
    if shape is None or properties.major < 8:
        return None
    macros = {"KIND": KINDS[dtype], "KEPT": kept, **shape.macros()}
    made = kernel("some", device, shape.warps * LANES, shape.shared(kept), **macros)
    return None if made is None else (shape, made)


def registers(kept: int) -> int:
    """The eights of vectors that the registers have room for, besides survivors and their places."""
    return (200 - 14 * kept) // 18


def cut(
    n: int, kept: int, block: int, groups: int, blocks: int, processors: int, clusters: bool, limit: int = LIMIT
) -> Shape | None:
    """How the work is cut: as is fastest by `cycles`; None where registers or shared memory run out."""
    fit = registers(kept)
    if fit < 1:
        return None
    slices = -(-n // (8 * fit))
    width, eights, steps = 16 if block <= 16 else 32, -(-n // (8 * slices)), -(-blocks // SIDE)
    shapes = [
        Shape(width, eights, warps, team, split, *stages, 2 if clusters and split % 2 == 0 else 1)
        for warps in ((16, 8) if eights <= 2 else (8,))
        for team in (8, 4, 2, 1)
        for split in range(1, min(MOST, steps) + 1)  # in pairs: larger clusters leave processors without one
        for stages in ways(kept, team, -(-steps // split))
    ]
    possible = (shape for shape in shapes if shape.shared(kept) <= limit)
    return min(possible, key=lambda shape: cycles(shape, shape.grid(n, groups), steps, processors), default=None)


def ways(kept: int, team: int, share: int) -> list[tuple[int, int, int]]:
    """Tiles, span and stages: all of a thread block's x in shared memory for good, or a few steps at a time."""
    tiles = 4 if kept <= PICKED else 2
    return [(tiles, share, 1), (tiles // 2, share, 1), (tiles, max(team, 4), 2), (tiles, max(team, 2), 2)]


def cycles(shape: Shape, grid: tuple[int, int, int], steps: int, processors: int) -> float:
    """About how long it takes, from what an H200 was measured to do."""
    share, sums = -(-steps // shape.split), 8 * shape.eights * shape.rows
    waves = -(-grid[0] * grid[1] * grid[2] // processors)
    step = 120 + shape.eights * (40 + 16 * (4 // shape.tiles - 1))  # of a warp: tiles share what they read of x
    work = -(-share // shape.team) * (shape.warps + 4) * step  # a few warps do not keep a processor busy
    if shape.stages == 1:
        x = share * SIDE * shape.width * shape.eights * 8 * 2 / PACE
    else:
        x = -(-share // shape.span) * BARRIER
    end = TICKET + (1 + shape.shares) * sums * 4 / shape.cluster / PACE if shape.shares > 1 else 0
    return waves * (START + x + work) + end
