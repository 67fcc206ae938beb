"""Triton kernels of the engine's step on flat buffers: one or two launches for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...patterns.radix_select_triton import SegmentedTopK
from ...patterns.ranked_top_k_triton import RankedTopK
from .gradient_bound_triton import BoundedGradients, can_bound
from .random_stream import DRAW_BITS, ROUNDS, RandomStream
from .triton_types import ROW, TRITON_DTYPES

__all__ = [
    "BoundedGradients",
    "OutputThresholds",
    "RankedTopK",
    "SegmentedTopK",
    "UpdateFigures",
    "can_bound",
    "make_block_table",
    "redraw",
    "run_copy",
]

BLOCK = 4096  # weights that one program copies

COPIES = {
    "load": 0,  # parameter ← latent
    "store_and_project": 1,  # latent ← parameter, then parameter ← C(parameter)
    "project": 2,  # parameter ← C(latent)
    "store": 3,  # latent ← parameter
}  # C(w) is m ⊙ w, or with a scale s and a threshold t for each output m ⊙ s · sign(w) · max(|w| − t, 0)


def make_block_table(addresses: Sequence[int], sizes: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """Return the parameters' addresses, and for each program its slot, its start, its buffer offset and its size."""
    rows, offset = [], 0
    for slot, size in enumerate(sizes):
        rows += [(slot, start, offset + start, min(BLOCK, size - start)) for start in range(0, size, BLOCK)]
        offset += size
    columns = torch.tensor(rows, dtype=torch.int64).t().contiguous().to(device)
    return torch.tensor(addresses, dtype=torch.int64).to(device), *columns


class OutputThresholds:
    """The scales and thresholds of all outputs: each slot has its scales in a row, followed by its thresholds."""

    def __init__(self, values: Tensor, counts: Sequence[int], sizes: Sequence[int], rescale: bool) -> None:
        starts, outputs_before = ([0, *accumulate(numbers)][:-1] for numbers in (sizes, counts))
        lengths = [size // count for size, count in zip(sizes, counts, strict=True)]
        columns = torch.tensor([starts, outputs_before, counts, lengths], dtype=torch.int64).to(values.device)
        self.starts, self.outputs_before, self.counts, self.lengths = columns  # of each slot
        self.slots = (
            torch.arange(len(sizes)).repeat_interleave(torch.tensor(counts)).to(values.device)
        )  # of each output
        self.values, self.rescale = values, rescale

    @property
    def lookup(self) -> tuple[Tensor, ...]:
        """The tensors that kernels need to find a weight's scale and threshold."""
        return self.values, self.outputs_before, self.counts, self.lengths

    def calibrate(self, latent: Tensor, mask: Tensor) -> None:
        """Measure the scales and thresholds of a mask, as `SoftThreshold.calibrate` does."""
        exact = TRITON_DTYPES[torch.promote_types(latent.dtype, torch.float32)]
        with torch.cuda.device_of(mask):
            _calibrate[(len(self.slots),)](
                latent, mask, *self.lookup, self.starts, self.slots, RESCALE=self.rescale, EXACT=exact, ROW=ROW
            )
            _share_threshold[(len(self.counts),)](self.values, self.outputs_before, self.counts, EXACT=exact, ROW=ROW)


class UpdateFigures:
    """What an update changed in each target: kept, flipped and previously kept entries, ‖w − w̃‖ and ‖w‖."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        ends = [0, *accumulate(triton.cdiv(size, BLOCK) for size in sizes)]
        self.ends = torch.tensor(ends, dtype=torch.int64).to(device)  # of each target's programs
        self.parts = torch.empty(5, ends[-1], dtype=torch.float64, device=device)
        self.values = torch.empty(5, len(sizes), dtype=torch.float64, device=device)

    def measure(
        self,
        block_table: tuple[Tensor, ...],
        dense: Tensor | None,
        mask: Tensor,
        before: Tensor,
        like: Tensor,
        thresholds: OutputThresholds | None,
    ) -> None:
        """Compare the mask with the one `before`. Where `dense` is None, the parameter holds the dense weights."""
        programs, targets = self.parts.shape[1], self.values.shape[1]
        with torch.cuda.device_of(mask):
            _measure_block[(programs,)](
                *block_table,
                mask if dense is None else dense,
                mask,
                before,
                *((mask,) * 4 if thresholds is None else thresholds.lookup),
                self.parts,
                programs,
                IN_PLACE=dense is None,
                SHRINK=thresholds is not None,
                DTYPE=TRITON_DTYPES[like.dtype],
                EXACT=TRITON_DTYPES[torch.promote_types(like.dtype, torch.float32)],
                BLOCK=BLOCK,
            )
            _sum_blocks[(targets,)](self.parts, self.ends, self.values, programs, targets, ROW=ROW)


def run_copy(
    name: str,
    block_table: tuple[Tensor, ...],
    latent: Tensor | None,
    mask: Tensor,
    like: Tensor,
    thresholds: OutputThresholds | None = None,
) -> None:
    """Run one of COPIES. Where `latent` is None, the parameter is its own latent."""
    addresses, slot, start, offset, size = block_table
    in_place = latent is None
    with torch.cuda.device_of(mask):
        _copy[(len(slot),)](
            addresses,
            slot,
            start,
            offset,
            size,
            mask if latent is None else latent,
            mask,
            *((mask,) * 4 if thresholds is None else thresholds.lookup),
            COPY=COPIES["project" if in_place else name],
            IN_PLACE=in_place,
            SHRINK=thresholds is not None,
            DTYPE=TRITON_DTYPES[like.dtype],
            EXACT=TRITON_DTYPES[torch.promote_types(like.dtype, torch.float32)],
            BLOCK=BLOCK,
        )


@triton.jit
def _project(
    value,
    kept,
    index_in_slot,
    inside,
    slot,
    thresholds,
    outputs_before,
    counts,
    lengths,
    SHRINK: tl.constexpr,
    DTYPE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Return what the model runs on, bit for bit what `Method.project` writes."""
    if SHRINK:
        row = index_in_slot.to(tl.int32) // tl.load(lengths + slot).to(tl.int32)
        scales = thresholds + 2 * tl.load(outputs_before + slot) + row
        threshold = tl.load(scales + tl.load(counts + slot), mask=inside, other=0.0).to(EXACT)
        exact = value.to(EXACT)
        shrunk = (exact - tl.minimum(tl.maximum(exact, -threshold), threshold)).to(DTYPE)
        value = (shrunk.to(EXACT) * tl.load(scales, mask=inside, other=0.0).to(EXACT)).to(DTYPE)
    return tl.where(kept != 0, value, 0.0)


@triton.jit
def _copy(
    addresses,
    slots,
    starts,
    offsets,
    sizes,
    latent,
    mask,
    thresholds,
    outputs_before,
    counts,
    lengths,
    COPY: tl.constexpr,
    IN_PLACE: tl.constexpr,
    SHRINK: tl.constexpr,
    DTYPE: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    slot, start = tl.load(slots + program), tl.load(starts + program)
    weights = tl.load(addresses + slot).to(tl.pointer_type(DTYPE)) + start
    offset = tl.load(offsets + program)
    index = tl.arange(0, BLOCK)
    inside = index < tl.load(sizes + program)
    if COPY == 0:
        tl.store(weights + index, tl.load(latent + offset + index, mask=inside), mask=inside)
    else:
        if IN_PLACE or COPY != 2:
            value = tl.load(weights + index, mask=inside)
        else:
            value = tl.load(latent + offset + index, mask=inside)
        if COPY == 1 or COPY == 3:
            tl.store(latent + offset + index, value, mask=inside)
        if COPY != 3:
            kept = tl.load(mask + offset + index, mask=inside, other=0)
            sparse = _project(
                value,
                kept,
                start + index,
                inside,
                slot,
                thresholds,
                outputs_before,
                counts,
                lengths,
                SHRINK,
                DTYPE,
                EXACT,
            )
            tl.store(weights + index, sparse, mask=inside)


@triton.jit
def _mean(values, size):
    """Return Σ values / size in float64, so that the share of two equal means is exactly 1."""
    return tl.sum(values, 0).to(tl.float64) / size.to(tl.float64)


@triton.jit
def _calibrate(
    latent,
    mask,
    thresholds,
    outputs_before,
    counts,
    lengths,
    starts,
    slots,
    RESCALE: tl.constexpr,
    EXACT: tl.constexpr,
    ROW: tl.constexpr,
):
    """Store the scale of an output, and as its threshold the largest magnitude that the mask pruned there."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    before, length = tl.load(outputs_before + slot), tl.load(lengths + slot)
    begin = tl.load(starts + slot) + (row - before) * length
    total, kept, pruned = tl.zeros([ROW], EXACT), tl.zeros([ROW], EXACT), tl.zeros([ROW], EXACT)
    for at in range(0, length, ROW):
        index = at + tl.arange(0, ROW)
        inside = index < length
        magnitude = tl.abs(tl.load(latent + begin + index, mask=inside, other=0.0).to(EXACT))
        on = tl.load(mask + begin + index, mask=inside, other=0) != 0
        total += magnitude
        kept += tl.where(on, magnitude, 0.0)
        pruned = tl.maximum(pruned, tl.where(on, 0.0, magnitude))
    scale = thresholds + before + row  # a slot has two values an output, so its own begin at 2 * before
    # The constants are MEAN_FLOOR and SCALE_DAMPING of `compressors`.
    share = (_mean(kept, length) + 1e-6) / (_mean(total, length) + 1e-6)
    tl.store(scale, (1 + (1 - share) / (share + 0.01)).to(EXACT) if RESCALE else 1.0)
    tl.store(scale + tl.load(counts + slot), tl.max(pruned, 0))


@triton.jit
def _share_threshold(thresholds, outputs_before, counts, EXACT: tl.constexpr, ROW: tl.constexpr):
    """Give all outputs of a slot the largest of their thresholds, which is the slot's."""
    slot = tl.program_id(0)
    count = tl.load(counts + slot)
    own = thresholds + 2 * tl.load(outputs_before + slot) + count
    most = tl.zeros([ROW], EXACT)
    for at in range(0, count, ROW):
        index = at + tl.arange(0, ROW)
        most = tl.maximum(most, tl.load(own + index, mask=index < count, other=0.0).to(EXACT))
    largest = tl.max(most, 0)
    for at in range(0, count, ROW):
        index = at + tl.arange(0, ROW)
        tl.store(own + index, largest, mask=index < count)


@triton.jit
def _measure_block(
    addresses,
    slots,
    starts,
    offsets,
    sizes,
    dense,
    mask,
    mask_before,
    thresholds,
    outputs_before,
    counts,
    lengths,
    parts,
    programs,
    IN_PLACE: tl.constexpr,
    SHRINK: tl.constexpr,
    DTYPE: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the five figures of a program's block of weights."""
    program = tl.program_id(0)
    slot, start, offset = tl.load(slots + program), tl.load(starts + program), tl.load(offsets + program)
    index = tl.arange(0, BLOCK)
    inside = index < tl.load(sizes + program)
    weights = (tl.load(addresses + slot).to(tl.pointer_type(DTYPE)) + start) if IN_PLACE else (dense + offset)
    value = tl.load(weights + index, mask=inside, other=0.0)
    kept = tl.load(mask + offset + index, mask=inside, other=0)
    kept_before = tl.load(mask_before + offset + index, mask=inside, other=0)
    sparse = _project(
        value, kept, start + index, inside, slot, thresholds, outputs_before, counts, lengths, SHRINK, DTYPE, EXACT
    )
    whole = value.to(EXACT)
    lost = whole - sparse.to(EXACT)
    part = parts + program
    tl.store(part, tl.sum((kept != 0).to(tl.int32), 0))
    tl.store(part + programs, tl.sum((kept != kept_before).to(tl.int32), 0))
    tl.store(part + 2 * programs, tl.sum((kept_before != 0).to(tl.int32), 0))
    tl.store(part + 3 * programs, tl.sum(lost * lost, 0))
    tl.store(part + 4 * programs, tl.sum(whole * whole, 0))


@triton.jit
def _sum_blocks(parts, ends, values, programs, targets, ROW: tl.constexpr):
    """Add the figures of a target's blocks, and take the root of those that are sums of squares."""
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
    block_table: tuple[Tensor, ...],
    draw_inputs: tuple[Tensor, ...],
    mask: Tensor,
    weight: Tensor,
    draw_number: Tensor,
    stream: RandomStream,
    number: int,
    limit: int,
) -> None:
    """Draw weights off the mask again as `RandomStream.redraw` does, bit for bit.

    `draw_inputs` has for each slot the stream's key, the two words of its name, its position layout and its bound.
    """
    _, slot, start, offset, size = block_table
    with torch.cuda.device_of(mask):
        _redraw[(len(slot),)](
            slot,
            start,
            offset,
            size,
            *draw_inputs,
            mask,
            weight,
            draw_number,
            number,
            limit,
            UNIFORM=stream.distribution == "ku",
            ROUNDS=ROUNDS,
            DRAW_BITS=DRAW_BITS,
            BLOCK=BLOCK,
        )


@triton.jit(do_not_specialize=["number", "limit"])
def _redraw(
    slots,
    starts,
    offsets,
    sizes,
    key_low,
    key_high,
    name_low,
    name_high,
    channels,
    spatial,
    bounds,
    mask,
    weight,
    draw_number,
    number,
    limit,
    UNIFORM: tl.constexpr,
    ROUNDS: tl.constexpr,
    DRAW_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    slot = tl.load(slots + program)
    index = tl.arange(0, BLOCK)
    inside = index < tl.load(sizes + program)
    at = tl.load(offsets + program) + index

    # Memory counts (outer, spatial, channels), positions (outer, channels, spatial).
    wide, deep = tl.load(channels + slot), tl.load(spatial + slot)
    index_in_slot = tl.load(starts + program) + index
    rest = index_in_slot % (wide * deep)
    position = index_in_slot - rest + rest % wide * deep + rest // wide

    # Philox4x32-10, as in `random_stream.philox`.
    a = position.to(tl.uint64)
    b = a * 0 + number.to(tl.uint64)
    c = a * 0 + tl.load(name_low + slot).to(tl.uint64)
    d = a * 0 + tl.load(name_high + slot).to(tl.uint64)
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
        odd = (a >> (32 - DRAW_BITS)).to(tl.int32) * 2 + 1 - (1 << DRAW_BITS)
        value = odd.to(tl.float32) * (1.0 / (1 << DRAW_BITS)) * bound
    else:
        value = tl.where((a >> 31) == 0, bound, -bound)
    off = tl.load(mask + at, mask=inside, other=1) == 0
    chosen = inside & off & ((b >> (32 - DRAW_BITS)).to(tl.int32) < limit)
    tl.store(weight + at, value, mask=chosen)
    tl.store(draw_number + at, number, mask=chosen)
