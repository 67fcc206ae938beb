"""The moves of the engine on CUDA, each a launch or two for all layers, and the re-draw of random weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...patterns.radix_select_triton import SegmentedTopK
from .random_stream import GRAIN, ROUNDS, Stream

__all__ = ["Figures", "Rows", "SegmentedTopK", "move", "redraw", "table"]

BLOCK = 4096  # weights a program moves
ROW = 1024  # weights of an output that a program reads at a time

MOVES = {
    "enter": 0,  # parameter ← latent
    "leave": 1,  # latent ← parameter, then parameter ← C(parameter)
    "project": 2,  # parameter ← C(latent)
    "take": 3,  # latent ← parameter
}  # C(w) is m ⊙ w, or with a gauge (s, t) of each output m ⊙ s · sign(w) · max(|w| − t, 0)

TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def table(addresses: Sequence[int], sizes: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """For each program: the address its weights start at, where they lie in the buffers, and how many they are."""
    rows, offset = [], 0
    for slot, size in enumerate(sizes):
        rows += [(slot, start, offset + start, min(BLOCK, size - start)) for start in range(0, size, BLOCK)]
        offset += size
    columns = torch.tensor(rows, dtype=torch.int64).t().contiguous().to(device)
    return torch.tensor(addresses, dtype=torch.int64).to(device), *columns


class Rows:
    """The gauges of all outputs: each slot has its scales one after another, and then its thresholds."""

    def __init__(self, gauge: Tensor, counts: Sequence[int], sizes: Sequence[int], rescale: bool) -> None:
        starts, befores = ([0, *accumulate(numbers)][:-1] for numbers in (sizes, counts))
        lengths = [size // count for size, count in zip(sizes, counts, strict=True)]
        columns = torch.tensor([starts, befores, counts, lengths], dtype=torch.int64).to(gauge.device)
        self.starts, self.befores, self.counts, self.lengths = columns  # of each slot; `befores` counts rows
        self.slots = torch.arange(len(sizes)).repeat_interleave(torch.tensor(counts)).to(gauge.device)  # of each row
        self.gauge, self.rescale = gauge, rescale

    @property
    def places(self) -> tuple[Tensor, ...]:
        """What kernels must know to find a weight's gauge."""
        return self.gauge, self.befores, self.counts, self.lengths

    def measure(self, latent: Tensor, mask: Tensor) -> None:
        """The gauges of a mask, as in `Soft.gauge`."""
        exact = TYPES[torch.promote_types(latent.dtype, torch.float32)]
        with torch.cuda.device_of(mask):
            _measure[(len(self.slots),)](
                latent, mask, *self.places, self.starts, self.slots, RESCALE=self.rescale, EXACT=exact, ROW=ROW
            )
            _level[(len(self.counts),)](self.gauge, self.befores, self.counts, EXACT=exact, ROW=ROW)


class Figures:
    """What an update changed, for each target: how many are kept, flipped, were kept, and ‖w − w̃‖ and ‖w‖."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        ends = [0, *accumulate(triton.cdiv(size, BLOCK) for size in sizes)]
        self.ends = torch.tensor(ends, dtype=torch.int64).to(device)  # of each target's programs
        self.parts = torch.empty(5, ends[-1], dtype=torch.float64, device=device)
        self.values = torch.empty(5, len(sizes), dtype=torch.float64, device=device)

    def run(
        self,
        table: tuple[Tensor, ...],
        dense: Tensor | None,
        mask: Tensor,
        before: Tensor,
        like: Tensor,
        rows: Rows | None,
    ) -> None:
        """Note what became of the masks `before`. Where nothing is dense, the parameter is."""
        programs, targets = self.parts.shape[1], self.values.shape[1]
        with torch.cuda.device_of(mask):
            _note[(programs,)](
                *table,
                mask if dense is None else dense,
                mask,
                before,
                *((mask,) * 4 if rows is None else rows.places),
                self.parts,
                programs,
                OWN=dense is None,
                SHRINK=rows is not None,
                TYPE=TYPES[like.dtype],
                EXACT=TYPES[torch.promote_types(like.dtype, torch.float32)],
                BLOCK=BLOCK,
            )
            _total[(targets,)](self.parts, self.ends, self.values, programs, targets, ROW=ROW)


def move(
    name: str, table: tuple[Tensor, ...], latent: Tensor | None, mask: Tensor, like: Tensor, rows: Rows | None = None
) -> None:
    """Run one of MOVES. Where there is no latent, the parameter is its own."""
    addresses, slot, start, offset, size = table
    own = latent is None
    with torch.cuda.device_of(mask):
        _move[(len(slot),)](
            addresses,
            slot,
            start,
            offset,
            size,
            mask if latent is None else latent,
            mask,
            *((mask,) * 4 if rows is None else rows.places),
            MOVE=MOVES["project" if own else name],
            OWN=own,
            SHRINK=rows is not None,
            TYPE=TYPES[like.dtype],
            EXACT=TYPES[torch.promote_types(like.dtype, torch.float32)],
            BLOCK=BLOCK,
        )


@triton.jit
def _sparse(
    value,
    kept,
    place,
    inside,
    slot,
    gauge,
    befores,
    counts,
    lengths,
    SHRINK: tl.constexpr,
    TYPE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """What the model runs on, to the bit what `Method.project` writes; `place` counts the weights of the slot."""
    if SHRINK:
        row = place.to(tl.int32) // tl.load(lengths + slot).to(tl.int32)
        scales = gauge + 2 * tl.load(befores + slot) + row
        threshold = tl.load(scales + tl.load(counts + slot), mask=inside, other=0.0).to(EXACT)
        exact = value.to(EXACT)
        shrunk = (exact - tl.minimum(tl.maximum(exact, -threshold), threshold)).to(TYPE)
        value = (shrunk.to(EXACT) * tl.load(scales, mask=inside, other=0.0).to(EXACT)).to(TYPE)
    return tl.where(kept != 0, value, 0.0)


@triton.jit
def _move(
    addresses,
    slots,
    starts,
    offsets,
    sizes,
    latent,
    mask,
    gauge,
    befores,
    counts,
    lengths,
    MOVE: tl.constexpr,
    OWN: tl.constexpr,
    SHRINK: tl.constexpr,
    TYPE: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    slot, start = tl.load(slots + program), tl.load(starts + program)
    weights = tl.load(addresses + slot).to(tl.pointer_type(TYPE)) + start
    offset = tl.load(offsets + program)
    index = tl.arange(0, BLOCK)
    inside = index < tl.load(sizes + program)
    if MOVE == 0:
        tl.store(weights + index, tl.load(latent + offset + index, mask=inside), mask=inside)
    else:
        if OWN or MOVE != 2:
            value = tl.load(weights + index, mask=inside)
        else:
            value = tl.load(latent + offset + index, mask=inside)
        if MOVE == 1 or MOVE == 3:
            tl.store(latent + offset + index, value, mask=inside)
        if MOVE != 3:
            kept = tl.load(mask + offset + index, mask=inside, other=0)
            sparse = _sparse(
                value, kept, start + index, inside, slot, gauge, befores, counts, lengths, SHRINK, TYPE, EXACT
            )
            tl.store(weights + index, sparse, mask=inside)


@triton.jit
def _mean(values, size):
    """Σ values / size, in a type whose quotients are exact: of equal ones the share is 1."""
    return tl.sum(values, 0).to(tl.float64) / size.to(tl.float64)


@triton.jit
def _measure(
    latent,
    mask,
    gauge,
    befores,
    counts,
    lengths,
    starts,
    slots,
    RESCALE: tl.constexpr,
    EXACT: tl.constexpr,
    ROW: tl.constexpr,
):
    """The scale of an output, and in its threshold's place the largest magnitude that was cut off there."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    before, length = tl.load(befores + slot), tl.load(lengths + slot)
    begin = tl.load(starts + slot) + (row - before) * length
    whole, kept, cut = tl.zeros([ROW], EXACT), tl.zeros([ROW], EXACT), tl.zeros([ROW], EXACT)
    for at in range(0, length, ROW):
        index = at + tl.arange(0, ROW)
        inside = index < length
        magnitude = tl.abs(tl.load(latent + begin + index, mask=inside, other=0.0).to(EXACT))
        on = tl.load(mask + begin + index, mask=inside, other=0) != 0
        whole += magnitude
        kept += tl.where(on, magnitude, 0.0)
        cut = tl.maximum(cut, tl.where(on, 0.0, magnitude))
    scale = gauge + before + row  # the slot's own begin at twice `before`
    share = (_mean(kept, length) + 1e-6) / (_mean(whole, length) + 1e-6)
    tl.store(scale, (1 + (1 - share) / (share + 0.01)).to(EXACT) if RESCALE else 1.0)
    tl.store(scale + tl.load(counts + slot), tl.max(cut, 0))


@triton.jit
def _level(gauge, befores, counts, EXACT: tl.constexpr, ROW: tl.constexpr):
    """Give all outputs of a slot the largest of their thresholds."""
    slot = tl.program_id(0)
    count = tl.load(counts + slot)
    thresholds = gauge + 2 * tl.load(befores + slot) + count
    most = tl.zeros([ROW], EXACT)
    for at in range(0, count, ROW):
        index = at + tl.arange(0, ROW)
        most = tl.maximum(most, tl.load(thresholds + index, mask=index < count, other=0.0).to(EXACT))
    largest = tl.max(most, 0)
    for at in range(0, count, ROW):
        index = at + tl.arange(0, ROW)
        tl.store(thresholds + index, largest, mask=index < count)


@triton.jit
def _note(
    addresses,
    slots,
    starts,
    offsets,
    sizes,
    dense,
    mask,
    past,
    gauge,
    befores,
    counts,
    lengths,
    parts,
    programs,
    OWN: tl.constexpr,
    SHRINK: tl.constexpr,
    TYPE: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The figures of a program's weights."""
    program = tl.program_id(0)
    slot, start, offset = tl.load(slots + program), tl.load(starts + program), tl.load(offsets + program)
    index = tl.arange(0, BLOCK)
    inside = index < tl.load(sizes + program)
    weights = (tl.load(addresses + slot).to(tl.pointer_type(TYPE)) + start) if OWN else (dense + offset)
    value = tl.load(weights + index, mask=inside, other=0.0)
    kept = tl.load(mask + offset + index, mask=inside, other=0)
    was = tl.load(past + offset + index, mask=inside, other=0)
    sparse = _sparse(value, kept, start + index, inside, slot, gauge, befores, counts, lengths, SHRINK, TYPE, EXACT)
    whole = value.to(EXACT)
    lost = whole - sparse.to(EXACT)
    part = parts + program
    tl.store(part, tl.sum((kept != 0).to(tl.int32), 0))
    tl.store(part + programs, tl.sum((kept != was).to(tl.int32), 0))
    tl.store(part + 2 * programs, tl.sum((was != 0).to(tl.int32), 0))
    tl.store(part + 3 * programs, tl.sum(lost * lost, 0))
    tl.store(part + 4 * programs, tl.sum(whole * whole, 0))


@triton.jit
def _total(parts, ends, values, programs, targets, ROW: tl.constexpr):
    """Those of a target: sums, of squares their roots."""
    target = tl.program_id(0)
    begin, end = tl.load(ends + target), tl.load(ends + target + 1)
    for figure in tl.static_range(5):
        total = tl.zeros([ROW], tl.float64)
        for at in range(begin, end, ROW):
            index = at + tl.arange(0, ROW)
            total += tl.load(parts + figure * programs + index, mask=index < end, other=0.0)
        value = tl.sum(total, 0)
        tl.store(values + figure * targets + target, value if figure < 3 else tl.sqrt(value))


def redraw(
    table: tuple[Tensor, ...],
    draws: tuple[Tensor, ...],
    mask: Tensor,
    weight: Tensor,
    drawn: Tensor,
    stream: Stream,
    number: int,
    coin: int,
) -> None:
    """Draw weights off the mask anew as `Stream.redraw` does, bit for bit.

    `draws` has for each slot the stream's key, the name's label, how positions lie in memory, and the bound.
    """
    _, slot, start, offset, size = table
    with torch.cuda.device_of(mask):
        _redraw[(len(slot),)](
            slot,
            start,
            offset,
            size,
            *draws,
            mask,
            weight,
            drawn,
            number,
            coin,
            UNIFORM=stream.distribution == "ku",
            ROUNDS=ROUNDS,
            GRAIN=GRAIN,
            BLOCK=BLOCK,
        )


@triton.jit(do_not_specialize=["number", "coin"])
def _redraw(
    slots,
    starts,
    offsets,
    sizes,
    key_low,
    key_high,
    label_low,
    label_high,
    channels,
    spatial,
    bounds,
    mask,
    weight,
    drawn,
    number,
    coin,
    UNIFORM: tl.constexpr,
    ROUNDS: tl.constexpr,
    GRAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    slot = tl.load(slots + program)
    index = tl.arange(0, BLOCK)
    inside = index < tl.load(sizes + program)
    at = tl.load(offsets + program) + index

    # Memory counts (outer, spatial, channels), positions (outer, channels, spatial).
    wide, deep = tl.load(channels + slot), tl.load(spatial + slot)
    place = tl.load(starts + program) + index
    rest = place % (wide * deep)
    position = place - rest + rest % wide * deep + rest // wide

    # Philox4x32-10, as in `stream`.
    a = position.to(tl.uint64)
    b = a * 0 + number.to(tl.uint64)
    c = a * 0 + tl.load(label_low + slot).to(tl.uint64)
    d = a * 0 + tl.load(label_high + slot).to(tl.uint64)
    k, m = tl.load(key_low + slot).to(tl.uint64), tl.load(key_high + slot).to(tl.uint64)
    for _ in tl.static_range(ROUNDS):
        p = a * 0xD2511F53
        q = c * 0xCD9E8D57
        a = (q >> 32) ^ b ^ k
        c = (p >> 32) ^ d ^ m
        b = q & 0xFFFFFFFF
        d = p & 0xFFFFFFFF
        k = (k + 0x9E3779B9) & 0xFFFFFFFF
        m = (m + 0xBB67AE85) & 0xFFFFFFFF

    bound = tl.load(bounds + slot)
    if UNIFORM:
        odd = (a >> (32 - GRAIN)).to(tl.int32) * 2 + 1 - (1 << GRAIN)
        value = odd.to(tl.float32) * (1.0 / (1 << GRAIN)) * bound
    else:
        value = tl.where((a >> 31) == 0, bound, -bound)
    off = tl.load(mask + at, mask=inside, other=1) == 0
    chosen = inside & off & ((b >> (32 - GRAIN)).to(tl.int32) < coin)
    tl.store(weight + at, value, mask=chosen)
    tl.store(drawn + at, number, mask=chosen)
