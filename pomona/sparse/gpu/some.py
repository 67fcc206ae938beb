"""More vectors: some.cu, where blocks are spread out in shared memory and multiplied on the tensor cores."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..balanced import LANES
from .compiled import KINDS, Kernel, kernel, legible

WIDEST = 32  # columns of a block
ROWS, SIDE = 64, 4  # of a warp; blocks side by side
PICKED = 3  # survivors of a block that stay in registers
LIMIT = 227 << 10  # bytes of shared memory that a thread block may have


@dataclass(frozen=True)
class Shape:
    """How the work is cut; see some.cu."""

    width: int
    eights: int
    warps: int
    team: int
    split: int
    tiles: int
    span: int
    stages: int

    def macros(self) -> dict[str, int]:
        return {name.upper(): value for name, value in asdict(self).items()}

    @property
    def rows(self) -> int:
        """Rows of a thread block."""
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
    (n, rows), (groups, blocks, kept, _) = y.shape, values.shape
    if block > WIDEST or x.dtype != values.dtype or x.dtype == torch.float32:
        return False
    made = plan(values.dtype, n, kept, block, groups, blocks, x.get_device())
    if made is None:
        return False
    shape, go = made
    x, columns = arrange(x, blocks, block, shape.width)
    bias, wide = legible(bias, values.dtype)
    grid = -(-n // (8 * shape.eights)), shape.split, -(-groups * LANES // shape.rows)
    sizes = rows, columns, x.stride(0), blocks, n, y.stride(1), y.stride(0), wide, relu
    go(grid, (values, indices, x, bias, y), sizes)
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
    shape = cut(n, kept, block, groups, blocks, properties.multi_processor_count, properties.major >= 9)
    if shape is None or properties.major < 8:
        return None
    macros = {"KIND": KINDS[dtype], "KEPT": kept, **shape.macros()}
    made = kernel("some", device, shape.warps * LANES, shape.shared(kept), **macros)
    return None if made is None else (shape, made)


def registers(kept: int) -> int:
    """The eights of vectors that the registers have room for, besides survivors and their places."""
    return (200 - 14 * kept) // 18


def cut(n: int, kept: int, block: int, groups: int, blocks: int, processors: int, clusters: bool) -> Shape | None:
    """How the work is cut: all processors busy, x read by as few of them as can be; None where registers run out."""
    width, tiles = 16 if block <= 16 else 32, 4 if kept <= PICKED else 2
    fit = registers(kept)
    if fit < 1:
        return None
    slices = -(-n // (8 * fit))
    eights = -(-n // (8 * slices))
    slabs, room = -(-groups // 2) * slices, processors * (16 if eights <= 2 else 8)  # warps, if each has its own rows
    share = min(room // slabs, -(-blocks // SIDE))  # of them, for the same rows
    split = 2 if clusters and share > 1 else 1  # larger clusters leave processors without one
    for team in (8, 4, 2, 1):
        warps = 16 if eights <= 2 and 2 * slabs * team * split > room else 8
        shape = Shape(width, eights, warps, team, split, tiles, max(team, 4 if eights <= 2 else 2), 2)
        if team == 1 or (team * split <= share and shape.shared(kept) <= LIMIT):
            return shape
    raise AssertionError("a team of one fits")
