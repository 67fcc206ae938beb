"""Exact top-k selection on CUDA by radix select, over one buffer or over every segment of a buffer at once.

Each score becomes an integer key of the same order. Four counting passes find the threshold, which is the key of the
smallest score that is kept: each pass finds one digit of eight bits, the highest first, by counting that digit in the
keys whose higher digits equal the threshold's. The last counting pass also stores the counts of each program, so that
the final pass, which writes the mask, knows how many ties precede each program. The scores are read five times, and
the host never waits for the device.

`SegmentedTopK` repeats the selection over the same segments. Scores change little from one step to the next, so it
first predicts that the upper half of each segment's threshold is that of the previous selection, and one read of the
scores shows whether the prediction holds. Where it holds the first three counting passes have nothing to do, and the
scores are read three times instead of five. The number of scores to keep lies on the device, so that a captured CUDA
graph follows it when it changes.

Both use the same kernels. `SEGMENTED` selects at compile time whether a program reads its segment and range from
tables, with the partial blocks this brings, or takes whole blocks of the one padded buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROW_LENGTH = 4096  # columns that `select_largest_per_row` can hold in one program

BLOCK = 2048  # scores that a program reads at a time
MAX_PROGRAMS = 1024  # a program reads a contiguous run of blocks, so that ties keep their order
DIGIT_BITS = 8
DIGITS = triton.cdiv(32, DIGIT_BITS)  # in a key
RADIX = 2**DIGIT_BITS
# The state of one digit's pass: the count of each value of the digit, the prefix of the first value (the threshold's
# higher digits, shifted), and how many scores remain to be kept among the keys with that prefix.
STATE_SIZE = RADIX + 2


def select_largest(scores: Sequence[Tensor], keep: int) -> Tensor:
    """Return the flat mask of the `keep` largest entries over flat scores; 0 < keep < their total."""
    total = sum(score.numel() for score in scores)
    flat = scores[0]
    if len(scores) > 1 or total % BLOCK:
        # The padding is the smallest score in the last place, so it is kept last and changes no choice.
        flat = torch.cat([*scores, flat.new_full((-total % BLOCK,), -torch.inf)])
    flat = flat.contiguous()
    run = BLOCK * triton.cdiv(flat.numel() // BLOCK, MAX_PROGRAMS)  # scores that a program reads
    grid = (triton.cdiv(flat.numel(), run),)
    states = torch.zeros(DIGITS, STATE_SIZE, dtype=torch.int32, device=flat.device)
    program_counts = torch.empty(RADIX, MAX_PROGRAMS, dtype=torch.int32, device=flat.device)
    mask = torch.empty(flat.shape, dtype=torch.bool, device=flat.device)
    no_tables = None, None, None, None
    common = flat, keep, *no_tables, run, flat.numel(), states
    constants = MAX_PROGRAMS, False, DIGITS, DIGIT_BITS, BLOCK
    with torch.cuda.device_of(flat):
        for digit in range(DIGITS):
            _count[grid](*common, program_counts, digit, *constants)
        _mark[grid](*common, program_counts, None, mask, None, MAX_PROGRAMS, *constants)
    return mask[:total]


def select_largest_per_segment(scores: Tensor, sizes: Sequence[int], keep: Sequence[int]) -> Tensor:
    """Return the flat mask of the `keep[i]` largest entries of segment i of flat scores."""
    mask = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    selection = SegmentedTopK(sizes, scores.device)
    selection.set_counts(keep)
    selection.select(scores, mask)
    return mask


def select_largest_per_row(scores: Tensor, keep: int) -> Tensor:
    """Return the mask of the `keep` largest entries of each row of at most `MAX_ROW_LENGTH` columns."""
    scores = scores.contiguous()
    rows, columns = scores.shape
    mask = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    width = triton.next_power_of_2(columns)
    height = max(1, BLOCK // width)
    with torch.cuda.device_of(scores):
        _mark_rows[(triton.cdiv(rows, height),)](scores, mask, keep, rows, columns, height, width)
    return mask


class SegmentedTopK:
    """Repeated selection of the highest scores of each segment; of equal scores the earlier in the buffer is kept.

    Args:
        sizes: The lengths of the segments, which lie one after another in the flat scores.
        device: The device of the scores and masks.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        blocks = sum(triton.cdiv(size, BLOCK) for size in sizes)
        run = BLOCK * triton.cdiv(blocks, MAX_PROGRAMS)  # scores that a program reads, of one segment
        programs: list[tuple[int, ...]] = []  # of each: its segment, the range it reads, the segment's first program
        offset = 0
        for segment, size in enumerate(sizes):
            first = len(programs)
            programs += [(segment, offset + at, offset + min(at + run, size), first) for at in range(0, size, run)]
            offset += size
        tables = torch.tensor(programs, dtype=torch.int32).t().contiguous()
        self.programs = _pin_for(device, tables).to(device, non_blocking=True)
        self.program_count = len(programs)
        self.max_segment_programs = triton.next_power_of_2(max(triton.cdiv(size, run) for size in sizes))
        # A segment has the states of its digits, and last the state of the digit before the last under the prediction.
        self.states = torch.zeros(len(sizes), DIGITS + 1, STATE_SIZE, dtype=torch.int32, device=device)
        self.program_counts = torch.empty(RADIX, self.program_count, dtype=torch.int32, device=device)
        self.predictions = torch.zeros(len(sizes), dtype=torch.int32, device=device)
        self.keep = torch.zeros(len(sizes), dtype=torch.int32, device=device)
        self.host_keep: list[int] = []  # the values of `keep`

    def set_counts(self, keep: Sequence[int]) -> None:
        """Set how many scores of each segment are kept, without waiting for the device."""
        if list(keep) != self.host_keep:
            self.host_keep = list(keep)
            counts = torch.tensor(self.host_keep, dtype=torch.int32)
            self.keep.copy_(_pin_for(self.keep.device, counts), non_blocking=True)

    def select(self, scores: Tensor, mask: Tensor) -> None:
        """Write the mask of the flat scores into `mask`."""
        self.states.zero_()
        with torch.cuda.device_of(scores):
            _count_predicted[(self.program_count,)](
                scores, self.keep, *self.programs.unbind(), self.states, self.predictions, DIGITS, DIGIT_BITS, BLOCK
            )
        for digit in range(DIGITS):
            self.count(scores, digit)
        self.mark(scores, mask)

    def count(self, scores: Tensor, digit: int) -> None:
        """Count the values of one digit in the keys that agree with the thresholds so far."""
        common = scores, self.keep, *self.programs.unbind(), None, None, self.states, self.program_counts
        with torch.cuda.device_of(scores):
            _count[(self.program_count,)](*common, digit, self.program_count, True, DIGITS, DIGIT_BITS, BLOCK)

    def mark(self, scores: Tensor, mask: Tensor, quotas: Tensor | None = None) -> None:
        """Write the mask once all digits are counted; with `quotas`, so many ties of each segment are kept."""
        common = scores, self.keep, *self.programs.unbind(), None, None, self.states, self.program_counts
        constants = self.max_segment_programs, self.program_count, True, DIGITS, DIGIT_BITS, BLOCK
        with torch.cuda.device_of(scores):
            _mark[(self.program_count,)](*common, self.predictions, mask, quotas, *constants)


def _pin_for(device: torch.device, values: Tensor) -> Tensor:
    """Return `values` in memory from which a copy to the device does not block the host.

    A selection may be made between the replays of a captured training step, where the host must not wait.
    """
    return values.pin_memory() if device.type == "cuda" else values


@triton.jit
def _key(score):
    """Return integers in the order of the scores: -0.0 and 0.0 share a key, and NaNs have the largest."""
    bits = score.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    key = tl.where(bits < 0, -magnitude, magnitude)
    return tl.where(magnitude > 0x7F800000, 0x7FFFFFFF, key)


@triton.jit
def _find_digit(state, RADIX: tl.constexpr):
    """Return the threshold's prefix extended by the state's digit, and how many keys of that prefix to keep."""
    digits = tl.arange(0, RADIX)
    bins = tl.load(state + digits)
    base = tl.load(state + RADIX)
    remaining = tl.load(state + RADIX + 1)
    above = tl.sum(bins, 0) - tl.cumsum(bins, 0)
    found = (above < remaining) & (remaining <= above + bins)
    digit = tl.sum(tl.where(found, digits, 0), 0)
    return base + digit, remaining - tl.sum(tl.where(found, above, 0), 0)


@triton.jit
def _prediction_holds(state, RADIX: tl.constexpr):
    """Return whether the threshold has the predicted prefix."""
    remaining = tl.load(state + RADIX + 1)
    return (remaining > 0) & (remaining <= tl.sum(tl.load(state + tl.arange(0, RADIX)), 0))


@triton.jit
def _locate(program, segments, begins, ends, firsts, run, total, SEGMENTED: tl.constexpr):
    """Return a program's segment, the range of scores it reads, and the first program of the segment."""
    if SEGMENTED:
        segment = tl.load(segments + program)
        begin = tl.load(begins + program)
        end = tl.load(ends + program)
        first = tl.load(firsts + program)
    else:
        segment = 0
        begin = program * run
        end = min(begin + run, total)
        first = 0
    return segment, begin, end, first


@triton.jit
def _count_digits(
    scores,
    begin,
    end,
    base,
    SHIFT: tl.constexpr,
    RADIX: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENTED: tl.constexpr,
    COUNT_ABOVE: tl.constexpr,
):
    """Count the values of a digit in the keys whose prefix is `base`; with COUNT_ABOVE also the keys above them."""
    bins = tl.zeros([RADIX], tl.int32)
    above = tl.zeros([BLOCK], tl.int32)
    for at in range(begin, end, BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        if SEGMENTED:
            inside = offsets < end
            digit = (_key(tl.load(scores + offsets, mask=inside, other=0.0)) >> SHIFT) - base
            agrees = inside & (digit >= 0) & (digit < RADIX)
        else:
            digit = (_key(tl.load(scores + offsets)) >> SHIFT) - base
            agrees = (digit >= 0) & (digit < RADIX)
        if COUNT_ABOVE:
            above += (inside & (digit >= RADIX)).to(tl.int32)
        if tl.max(agrees.to(tl.int32), 0) > 0:  # seldom true at the last digits, where the histogram can be skipped
            bins += tl.histogram(tl.where(agrees, digit, 0), RADIX, mask=agrees)
    return bins, above


@triton.jit
def _count_predicted(
    scores,
    keep,
    segments,
    begins,
    ends,
    firsts,
    states,
    predictions,
    DIGITS: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill the state of the digit before the last, as if each threshold had the predicted prefix."""
    RADIX: tl.constexpr = 2**DIGIT_BITS
    program = tl.program_id(0)
    segment, begin, end, first = _locate(program, segments, begins, ends, firsts, None, None, True)
    state = states + (segment * (DIGITS + 1) + DIGITS) * (RADIX + 2)
    base = tl.load(predictions + segment) * RADIX
    bins, above = _count_digits(scores, begin, end, base, DIGIT_BITS, RADIX, BLOCK, True, True)
    digits = tl.arange(0, RADIX)
    tl.atomic_add(state + digits, bins, mask=bins > 0, sem="relaxed")
    remaining = -tl.sum(above, 0)
    if program == first:
        tl.store(state + RADIX, base)
        remaining += tl.load(keep + segment)
    tl.atomic_add(state + RADIX + 1, remaining, sem="relaxed")


@triton.jit(do_not_specialize=["keep"])
def _count(
    scores,
    keep,
    segments,
    begins,
    ends,
    firsts,
    run,
    total,
    states,
    program_counts,
    DIGIT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SEGMENTED: tl.constexpr,
    DIGITS: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the values of one digit in the keys that agree with the threshold of their segment so far."""
    RADIX: tl.constexpr = 2**DIGIT_BITS
    program = tl.program_id(0)
    segment, begin, end, first = _locate(program, segments, begins, ends, firsts, run, total, SEGMENTED)
    previous = DIGIT - 1  # the state with the threshold's higher digits
    if SEGMENTED:
        states += segment * (DIGITS + 1) * (RADIX + 2)
        holds = _prediction_holds(states + DIGITS * (RADIX + 2), RADIX)
        if DIGIT == DIGITS - 1:
            previous = tl.where(holds, DIGITS, DIGIT - 1)
        else:
            end = tl.where(holds, begin, end)  # nothing to count
    if DIGIT == 0:
        base = -RADIX // 2  # keys are signed
        remaining = tl.load(keep + segment) if SEGMENTED else keep
    else:
        prefix, remaining = _find_digit(states + previous * (RADIX + 2), RADIX)
        base = prefix * RADIX
    state = states + DIGIT * (RADIX + 2)
    if program == first:
        tl.store(state + RADIX, base)
        tl.store(state + RADIX + 1, remaining)
    bins, _ = _count_digits(scores, begin, end, base, DIGIT_BITS * (DIGITS - 1 - DIGIT), RADIX, BLOCK, SEGMENTED, False)
    digits = tl.arange(0, RADIX)
    tl.atomic_add(state + digits, bins, mask=bins > 0, sem="relaxed")
    if DIGIT == DIGITS - 1:
        tl.store(program_counts + digits * PROGRAMS + program, bins)


@triton.jit(do_not_specialize=["keep"])
def _mark(
    scores,
    keep,
    segments,
    begins,
    ends,
    firsts,
    run,
    total,
    states,
    program_counts,
    predictions,
    mask,
    quotas,
    MAX_SEGMENT_PROGRAMS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SEGMENTED: tl.constexpr,
    DIGITS: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the mask: all keys above the threshold of their segment, and the first of the ties."""
    RADIX: tl.constexpr = 2**DIGIT_BITS
    program = tl.program_id(0)
    segment, begin, end, first = _locate(program, segments, begins, ends, firsts, run, total, SEGMENTED)
    if SEGMENTED:
        states += segment * (DIGITS + 1) * (RADIX + 2)
    state = states + (DIGITS - 1) * (RADIX + 2)
    threshold, remaining = _find_digit(state, RADIX)
    if quotas is not None:
        remaining = tl.load(quotas + segment)
    digit = threshold - tl.load(state + RADIX)
    earlier = first + tl.arange(0, MAX_SEGMENT_PROGRAMS)
    ties = tl.load(program_counts + digit * PROGRAMS + earlier, mask=earlier < program, other=0)
    remaining -= tl.sum(ties, 0)
    if SEGMENTED:
        if program == first:
            tl.store(predictions + segment, threshold >> 2 * DIGIT_BITS)
        keeps_any = tl.load(keep + segment) > 0  # otherwise there is no threshold
    for at in range(begin, end, BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        if SEGMENTED:
            inside = offsets < end
            key = _key(tl.load(scores + offsets, mask=inside, other=0.0))
            tie = (inside & (key == threshold)).to(tl.int32)
        else:
            key = _key(tl.load(scores + offsets))
            tie = (key == threshold).to(tl.int32)
        kept = (key > threshold) | ((tie > 0) & (tl.cumsum(tie, 0) <= remaining))
        if SEGMENTED:
            tl.store(mask + offsets, kept & keeps_any, mask=inside)
        else:
            tl.store(mask + offsets, kept)
        remaining -= tl.sum(tie, 0)


@triton.jit(do_not_specialize=["keep"])
def _mark_rows(
    scores,
    mask,
    keep,
    rows,
    COLUMNS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Find the threshold of each row bit by bit, then keep all keys above it and the first of the ties."""
    lowest: tl.constexpr = -0x80000000  # below the key of every score
    row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (column < COLUMNS)
    offsets = row * COLUMNS + column
    key = tl.where(inside, _key(tl.load(scores + offsets, mask=inside, other=0.0)), lowest)
    threshold = tl.where(tl.sum((key >= 0).to(tl.int32), 1) >= keep, 0, lowest)
    for bit in tl.static_range(31):
        higher = threshold + (1 << (30 - bit))
        threshold = tl.where(tl.sum((key >= higher[:, None]).to(tl.int32), 1) >= keep, higher, threshold)
    above = (key > threshold[:, None]).to(tl.int32)
    tie = (key == threshold[:, None]).to(tl.int32)
    remaining = keep - tl.sum(above, 1)
    kept = (above > 0) | ((tie > 0) & (tl.cumsum(tie, 1) <= remaining[:, None]))
    tl.store(mask + offsets, kept, mask=inside)
