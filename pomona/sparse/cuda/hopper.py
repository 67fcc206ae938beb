"""More vectors on a Hopper GPU: hopper.cu, where blocks are spread out for the tensor cores to read by themselves."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch import Tensor

from ..format import LANES
from .compiled import KINDS, Kernel, kernel, overlaps
from .some import LIMIT, MOST, PACE, ROWS, SIDE, START, TICKET, Cut, attempt

MAJOR = 9  # of the compute capability
FEEDERS = 4  # warps
CUTTERS = 4  # warps of a thread block that cuts x
BARRIER = 8  # bytes
KEPT = 12  # of a block, at most
LEAST = 5  # groups of rows: with fewer, half of a thread block's would be missing
STREAM = 18  # bytes a cycle that a processor has from memory


@dataclass(frozen=True)
class Shape(Cut):
    """See hopper.cu."""

    width: int
    eights: int
    groups: int
    split: int
    cluster: int
    stages: int
    turned: int

    def macros(self) -> dict[str, int | str]:
        sums = self.tile * 4  # of a thread
        text = {
            "N": f'"{self.tile * 8}"',
            "LIST": '"' + ", ".join(f"%{i}" for i in range(sums)) + '"',
            "SUMS": ", ".join(f'"+f"(d[{i}])' for i in range(sums)),
            "A": f'"%{sums}"',
            "B": f'"%{sums + 1}"',
        }
        return {**{name.upper(): value for name, value in asdict(self).items()}, "WARPS": self.warps, **text}

    @property
    def tile(self) -> int:
        """Eights of vectors, or of rows, that are multiplied by 64 of the others at a time."""
        return 32 if self.turned else self.eights

    @property
    def warps(self) -> int:
        return 4 * self.groups + FEEDERS

    @property
    def rows(self) -> int:
        return 4 * self.groups * ROWS

    @property
    def shared(self) -> int:
        """Bytes of shared memory: what is spread out and x, at the end all sums; and the barriers."""
        step = SIDE * self.width * 2
        room = (self.rows + self.stages * self.eights * 8) * step + 64 * self.width
        return max(room, self.eights * 8 * (self.rows + 4) * 4) + 2 * self.stages * BARRIER

    def lay(self, x: Tensor, columns: int, blocks: int) -> Tensor | None:
        """All steps of as many vectors as are multiplied together, one after another; see cut.cu."""
        macros = {"KIND": KINDS[x.dtype], "WIDTH": self.width, "EIGHTS": self.eights, "WARPS": CUTTERS}
        go = kernel("cut", x.get_device(), CUTTERS * LANES, **macros)
        if go is None:
            return None
        n, steps, vectors = len(x), -(-blocks // SIDE), 8 * self.eights
        laid = x.new_empty(-(-n // vectors), steps * SIDE * self.width * vectors)
        threads = steps * vectors * self.width // 8
        go((-(-threads // (CUTTERS * LANES)), len(laid), 1), (x, laid), (columns, x.stride(0), steps, n))
        return laid


def multiply(
    x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, y: Tensor, columns: int, block: int, relu: bool
) -> bool:
    """y = x Wᵀ + bias; False where this is not for this kernel."""
    return attempt(plan, x, values, indices, bias, y, block, relu)


@cache
def plan(
    dtype: torch.dtype, n: int, kept: int, block: int, groups: int, blocks: int, device: int, **convolution: int
) -> tuple[Shape, Kernel] | None:
    """How the work is cut on this device, and the kernel."""
    properties = torch.cuda.get_device_properties(device)
    if properties.major != MAJOR or kept > KEPT or groups < LEAST:
        return None
    shape = cut(n, kept, block, groups, blocks, properties.multi_processor_count, bool(convolution))
    early = {} if convolution else {"EARLY": int(overlaps(device))}
    macros = {"KIND": KINDS[dtype], "KEPT": kept, **shape.macros(), **convolution, **early}
    made = kernel("hopper", device, shape.warps * LANES, shape.shared, **macros)
    return None if made is None else (shape, made)


def cut(n: int, kept: int, block: int, groups: int, blocks: int, processors: int, gather: bool = False) -> Shape:
    """How the work is cut: as is fastest by `cycles`."""
    width, steps = 16 if block <= 16 else 32, -(-blocks // SIDE)
    shapes = [
        Shape(width, eights, warpgroups, split, cluster, 4 if gather or eights > 4 else 6, int(eights > 4))
        for eights in ways(n, kept, gather)
        for warpgroups in (2, 1)
        for split in range(1, min(MOST, steps) + 1)
        for cluster in (2, 1)
        if split % cluster == 0
    ]
    possible = (shape for shape in shapes if shape.shared <= LIMIT)
    return min(possible, key=lambda shape: cycles(shape, shape.grid(n, groups), kept, steps, processors, gather))


def ways(n: int, kept: int, gather: bool) -> list[int]:
    """Eights of vectors of a thread block: all of 64 where they are turned, and as registers allow; where they are
    gathered, those that a warp's lanes are a part or a multiple of."""
    least = -(-n // 8)
    fit = [eights for eights in ((1, 2, 4) if gather else (1, 2, 3, 4)) if eights >= least][:1] or [4]
    return fit + [8] * (least > 4 and kept <= 9)


def cycles(shape: Shape, grid: tuple[int, int, int], kept: int, steps: int, processors: int, gather: bool) -> float:
    """About how long it takes on an H200."""
    share, sums = -(-steps // shape.split), 8 * shape.eights * shape.rows
    waves = -(-grid[0] * grid[1] * grid[2] // processors)
    multiplied = shape.width * (32 if shape.turned else 16 + 2 * shape.eights)  # by one group
    spread = 150 + 130 * kept
    loaded = shape.rows * SIDE * (kept + -(-kept // 3)) * 2 / STREAM
    fed = shape.eights * shape.width * (5.5 if gather else 1)
    step = max(shape.groups * multiplied, spread + multiplied, loaded, fed)  # while others multiply, one spreads
    end = TICKET + (1 + shape.shares) * sums * 4 / shape.cluster / PACE if shape.shares > 1 else 0
    return waves * (START + share * step) + end
