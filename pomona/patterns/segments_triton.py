"""Exact selection in every segment of one flat buffer on CUDA, again and again, in six launches for all of them.

The radix select of `selection_triton`, with records of each segment. Scores move little from one step to the next, so
first the upper half of each segment's last threshold is assumed to be that of the new one, and one read tells whether
it is. Where it holds the first three levels have nothing to do, and the scores are read three times instead of five.
The counts to keep lie on the device, so that a captured graph follows them when they change.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .selection_triton import BITS, BLOCK, LEVELS, PROGRAMS, _key, _narrow

RADIX = 2**BITS


class Selection:
    """Keeps the highest scores of each segment; of equal ones those that come first in the buffer."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        run = BLOCK * triton.cdiv(sum(triton.cdiv(size, BLOCK) for size in sizes), PROGRAMS)  # entries a program reads
        rows: list[tuple[int, ...]] = []
        offset = 0
        for segment, size in enumerate(sizes):
            first = len(rows)
            rows += [(segment, offset + at, offset + min(at + run, size), first) for at in range(0, size, run)]
            offset += size
        # It may be made between the replays of a training loop, so the host does not wait.
        table = torch.tensor(rows, dtype=torch.int32).t().contiguous().pin_memory()
        self.programs = table.to(device, non_blocking=True)
        self.count = len(rows)
        self.most = triton.next_power_of_2(max(triton.cdiv(size, run) for size in sizes))  # programs in a segment
        # A level's record: its counts, the prefix its first bin stands for, and how many are left to keep. Behind
        # the levels stands one more record, of the level before the last under the prefix that is assumed.
        self.levels = torch.zeros(len(sizes), LEVELS + 1, RADIX + 2, dtype=torch.int32, device=device)
        self.bins = torch.empty(RADIX, self.count, dtype=torch.int32, device=device)
        self.prefixes = torch.zeros(len(sizes), dtype=torch.int32, device=device)
        self.keep = torch.zeros(len(sizes), dtype=torch.int32, device=device)
        self.aimed: list[int] = []

    def aim(self, keep: Sequence[int]) -> None:
        """How many to keep of each segment; the host does not wait."""
        if list(keep) != self.aimed:
            self.aimed = list(keep)
            self.keep.copy_(torch.tensor(self.aimed, dtype=torch.int32).pin_memory(), non_blocking=True)

    def run(self, scores: Tensor, mask: Tensor) -> None:
        """Write the mask of the flat scores."""
        self.levels.zero_()
        common = scores, self.keep, *self.programs.unbind(), self.levels
        shape = LEVELS, BITS, BLOCK
        grid = (self.count,)
        with torch.cuda.device_of(scores):
            _assume[grid](*common, self.prefixes, *shape)
            for level in range(LEVELS):
                _count[grid](*common, self.bins, self.count, level, *shape)
            _mark[grid](*common, self.bins, self.prefixes, mask, self.count, self.most, *shape)


@triton.jit
def _assume(
    scores,
    keep,
    segments,
    begins,
    ends,
    firsts,
    levels,
    prefixes,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The record of the level before the last, as if the threshold's prefix were the last one's."""
    RADIX: tl.constexpr = 2**BITS
    program = tl.program_id(0)
    segment = tl.load(segments + program)
    end = tl.load(ends + program)
    record = levels + (segment * (LEVELS + 1) + LEVELS) * (RADIX + 2)
    base = tl.load(prefixes + segment) * RADIX
    above = tl.zeros([BLOCK], tl.int32)
    bins = tl.zeros([RADIX], tl.int32)
    for at in range(tl.load(begins + program), end, BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        inside = offsets < end
        digit = (_key(tl.load(scores + offsets, mask=inside, other=0.0)) >> BITS) - base
        above += (inside & (digit >= RADIX)).to(tl.int32)
        agrees = inside & (digit >= 0) & (digit < RADIX)
        if tl.max(agrees.to(tl.int32), 0) > 0:
            bins += tl.histogram(tl.where(agrees, digit, 0), RADIX, mask=agrees)
    digits = tl.arange(0, RADIX)
    tl.atomic_add(record + digits, bins, mask=bins > 0, sem="relaxed")
    left = -tl.sum(above, 0)
    if program == tl.load(firsts + program):
        tl.store(record + RADIX, base)
        left += tl.load(keep + segment)
    tl.atomic_add(record + RADIX + 1, left, sem="relaxed")


@triton.jit
def _holds(record, RADIX: tl.constexpr):
    """Whether the threshold has the prefix that was assumed."""
    left = tl.load(record + RADIX + 1)
    return (left > 0) & (left <= tl.sum(tl.load(record + tl.arange(0, RADIX)), 0))


@triton.jit
def _count(
    scores,
    keep,
    segments,
    begins,
    ends,
    firsts,
    levels,
    counts,
    PROGRAMS: tl.constexpr,
    LEVEL: tl.constexpr,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the digits at `LEVEL` of the keys whose prefix is their segment's threshold's."""
    RADIX: tl.constexpr = 2**BITS
    program = tl.program_id(0)
    segment = tl.load(segments + program)
    begin = tl.load(begins + program)
    end = tl.load(ends + program)
    records = levels + segment * (LEVELS + 1) * (RADIX + 2)
    held = _holds(records + LEVELS * (RADIX + 2), RADIX)
    if LEVEL == 0:
        base = -RADIX // 2  # keys are signed
        left = tl.load(keep + segment)
    else:
        before = LEVEL - 1
        if LEVEL == LEVELS - 1:
            before = tl.where(held, LEVELS, LEVEL - 1)
        prefix, left = _narrow(records + before * (RADIX + 2), RADIX)
        base = prefix * RADIX
    if LEVEL < LEVELS - 1:
        end = tl.where(held, begin, end)  # nothing to do
    level = records + LEVEL * (RADIX + 2)
    if program == tl.load(firsts + program):
        tl.store(level + RADIX, base)
        tl.store(level + RADIX + 1, left)
    bins = tl.zeros([RADIX], tl.int32)
    for at in range(begin, end, BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        inside = offsets < end
        key = _key(tl.load(scores + offsets, mask=inside, other=0.0))
        digit = (key >> BITS * (LEVELS - 1 - LEVEL)) - base
        agrees = inside & (digit >= 0) & (digit < RADIX)
        if tl.max(agrees.to(tl.int32), 0) > 0:  # seldom so at the last levels
            bins += tl.histogram(tl.where(agrees, digit, 0), RADIX, mask=agrees)
    digits = tl.arange(0, RADIX)
    tl.atomic_add(level + digits, bins, mask=bins > 0, sem="relaxed")
    if LEVEL == LEVELS - 1:
        tl.store(counts + digits * PROGRAMS + program, bins)


@triton.jit
def _mark(
    scores,
    keep,
    segments,
    begins,
    ends,
    firsts,
    levels,
    counts,
    prefixes,
    mask,
    PROGRAMS: tl.constexpr,
    MOST: tl.constexpr,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the mask: all above the segment's threshold, and the first of the ties."""
    RADIX: tl.constexpr = 2**BITS
    program = tl.program_id(0)
    segment = tl.load(segments + program)
    first = tl.load(firsts + program)
    end = tl.load(ends + program)
    level = levels + (segment * (LEVELS + 1) + LEVELS - 1) * (RADIX + 2)
    threshold, left = _narrow(level, RADIX)
    if program == first:
        tl.store(prefixes + segment, threshold >> 2 * BITS)
    digit = threshold - tl.load(level + RADIX)
    before = first + tl.arange(0, MOST)
    left -= tl.sum(tl.load(counts + digit * PROGRAMS + before, mask=before < program, other=0), 0)
    some = tl.load(keep + segment) > 0  # else there is no threshold
    for at in range(tl.load(begins + program), end, BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        inside = offsets < end
        key = _key(tl.load(scores + offsets, mask=inside, other=0.0))
        tie = (inside & (key == threshold)).to(tl.int32)
        kept = (key > threshold) | ((tie > 0) & (tl.cumsum(tie, 0) <= left))
        tl.store(mask + offsets, kept & some, mask=inside)
        left -= tl.sum(tie, 0)
