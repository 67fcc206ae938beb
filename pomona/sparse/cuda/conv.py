"""Convolutions: hopper.cu or some.cu, where threads gather what each position sees on its way to shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..format import LANES
from . import hopper
from .compiled import KINDS, Kernel, kernel, legible
from .some import LIMIT, PICKED, ROWS, SIDE, WIDEST, Cut, Shape, registers

MOST = 31  # taps of a kernel: a bit each
WARPS, BUSY = 8, 0.6  # of a thread block; of the processors, that are worth more positions to each of them
CLUSTER, SPAN = 8, 4  # thread blocks; steps of x at a time, at least


@dataclass(frozen=True)
class Geometry:
    """How a kernel moves over images, (down, right) each."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """All of it, as an operator takes it."""
        return self.kernel, self.stride, self.padding, self.dilation

    @classmethod
    def of(cls, *pairs: Sequence[int]) -> Geometry:
        """The inverse."""
        return cls(*((down, right) for down, right in pairs))

    def size(self, image: tuple[int, int]) -> tuple[int, int]:
        """The positions of the kernel, (down, right)."""
        high, wide = (
            (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for side, kernel, stride, padding, dilation in zip(image, *self.pairs, strict=True)
        )
        return high, wide

    def macros(self) -> dict[str, int]:
        names = [f"{side}{part}" for part in ("", "_STRIDE", "_PADDING", "_DILATION") for side in ("HIGH", "WIDE")]
        return dict(zip(names, [number for pair in self.pairs for number in pair], strict=True))


def convolve(
    x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, block: int, how: Geometry, relu: bool
) -> Tensor | None:
    """The convolution of images (n, channels, height, width); None where there is no kernel for it."""
    device = x.get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return convolve(x, values, indices, bias, rows, block, how, relu)
    dtype = values.dtype
    made = plan(dtype, x.shape, values.shape, rows, block, how, device) if x.dtype == dtype else None
    if made is None:
        return None
    bias, floats = legible(bias, dtype)
    y = x.new_empty(made.size)
    exchange = made.cut.exchange(made.grid, x.device)
    made.go(made.grid, (values, indices, x.contiguous(), bias, y, *exchange, made.taps), (*made.sizes, floats, relu))
    return y


class Plan(NamedTuple):
    """All of a convolution that is known before its numbers are."""

    cut: Cut
    go: Kernel
    grid: tuple[int, int, int]
    taps: Tensor
    size: tuple[int, int, int, int]  # of what comes out
    sizes: tuple[int, ...]  # that the kernel is told


@cache
def taps(
    channels: int, height: int, width: int, how: Geometry, block: int, room: int, blocks: int, device: torch.device
) -> Tensor:
    """For each column how many bytes on in an image it looks, and its tap as a bit; a block has so much room, and zeros
    in what is left of it, as have blocks that are not there."""
    (high, wide), (down, right) = how.kernel, how.dilation
    column = torch.arange(channels * high * wide)
    channel, tap = column // (high * wide), column % (high * wide)
    offset = 2 * ((channel * height + tap // wide * down) * width + tap % wide * right)
    table = torch.zeros(-(-blocks // SIDE) * SIDE, room, 2, dtype=torch.int32)
    table[column // block, column % block] = torch.stack([offset, 1 << tap], 1).int()
    return table.to(device)


@cache
def plan(
    dtype: torch.dtype, given: torch.Size, packed: torch.Size, rows: int, block: int, how: Geometry, device: int
) -> Plan | None:
    """How images of this size are convolved on this device; None where there is no kernel for it."""
    (images, channels, height, width), (groups, blocks, kept, _) = given, packed
    high, wide = how.size((height, width))
    n = images * high * wide
    if max(given.numel(), n * rows) >= 1 << 30 or not fits(dtype, kept, block, how):
        return None
    made = choose(dtype, n, kept, block, groups, blocks, how, device)
    if made is None:
        return None
    cut, go = made
    where = torch.device("cuda", device) if device >= 0 else torch.device("cpu")
    seen = taps(channels, height, width, how, block, cut.width, blocks + SIDE * max(SPAN, WARPS), where)
    sizes = rows, blocks, n, channels * height * width, height, width, wide, high * wide
    return Plan(cut, go, cut.grid(n, groups), seen, (images, rows, high, wide), sizes)


def choose(
    dtype: torch.dtype, n: int, kept: int, block: int, groups: int, blocks: int, how: Geometry, device: int
) -> tuple[Cut, Kernel] | None:
    """How the work is cut on this device, and the kernel."""
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 8:
        return None
    newest = hopper.plan(dtype, n, kept, block, groups, blocks, device, CONV=1, **how.macros())
    if newest is not None:
        return newest
    shape = cut(n, kept, block, groups, blocks, properties.multi_processor_count, properties.major >= 9)
    macros = {"KIND": KINDS[dtype], "KEPT": kept, "CONV": 1, **shape.macros(), **how.macros()}
    made = kernel("some", device, shape.warps * LANES, shape.shared(kept), **macros)
    return None if made is None else (shape, made)


def fits(dtype: torch.dtype, kept: int, block: int, how: Geometry) -> bool:
    """Whether the kernel is for such a convolution."""
    taps = how.kernel[0] * how.kernel[1]
    return dtype != torch.float32 and block <= WIDEST and taps <= MOST and registers(kept) >= 1


def cut(n: int, kept: int, block: int, groups: int, blocks: int, processors: int, clusters: bool) -> Shape:
    """How the work is cut: a thread block has as many rows as can be, since all share what is gathered for a position,
    then as many positions as leave most processors busy; a cluster shares the columns."""
    width, tiles = 16 if block <= 16 else 32, 4 if kept <= PICKED else 2
    slabs, steps = -(-groups * LANES // ROWS), -(-blocks // SIDE)
    team = next(t for t in (8, 4, 2, 1) if t == 1 or slabs * t <= WARPS)
    best, most = None, 0
    for eights in (e for e in (4, 2, 1) if e <= registers(kept)):
        thread_blocks = -(-slabs * team // WARPS) * -(-n // (8 * eights))
        room = min(CLUSTER, max(1, processors // thread_blocks), max(1, steps // team))
        split = 1 << room.bit_length() - 1
        shape = Shape(width, eights, WARPS, team, split, tiles, max(team, SPAN), 2, split if clusters else 1)
        if thread_blocks * split > most and shape.shared(kept) <= LIMIT:
            best, most = shape, thread_blocks * split
        if most >= BUSY * processors:
            break
    assert best is not None, "a few positions fit"
    return best
