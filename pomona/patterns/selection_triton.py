"""Exact selection on CUDA by radix select: five reads of the scores, and the host never waits.

Four passes find the threshold eight bits at a time, highest first: each counts the next digit of the
keys that agree with the digits found so far. The last pass also leaves each program's own counts, from
which the marking pass knows how many ties come before each program.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST_ROW = 4096

BLOCK = 2048  # entries a program reads at a time
PROGRAMS = 1024  # at most; each takes a contiguous run of blocks, so that ties keep their order
BITS = 8  # in a digit
LEVELS = triton.cdiv(32, BITS)  # digits in a key


def select_largest(scores: Sequence[Tensor], keep: int) -> Tensor:
    """The flat mask of the `keep` largest entries over flat scores; 0 < keep < their total."""
    total = sum(score.numel() for score in scores)
    flat = scores[0]
    if len(scores) > 1 or total % BLOCK:
        # Filling the last block with the smallest score, in last place, changes no choice.
        flat = torch.cat([*scores, flat.new_full((-total % BLOCK,), -torch.inf)])
    flat = flat.contiguous()
    blocks = flat.numel() // BLOCK
    run = triton.cdiv(blocks, PROGRAMS)
    grid = (triton.cdiv(blocks, run),)
    # A level's record: its counts, the prefix its first bin stands for, and how many are left to keep.
    levels = torch.zeros(LEVELS, 2**BITS + 2, dtype=torch.int32, device=flat.device)
    counts = torch.empty(2**BITS, PROGRAMS, dtype=torch.int32, device=flat.device)
    mask = torch.empty(flat.shape, dtype=torch.bool, device=flat.device)
    with torch.cuda.device_of(flat):
        for level in range(LEVELS):
            _count[grid](flat, levels, counts, keep, blocks, run, level, LEVELS, BITS, PROGRAMS, BLOCK)
        _mark[grid](flat, levels, counts, mask, blocks, run, LEVELS, BITS, PROGRAMS, BLOCK)
    return mask[:total]


def select_largest_per_row(scores: Tensor, keep: int) -> Tensor:
    """The mask of the `keep` largest entries of each row of at most `LONGEST_ROW` columns."""
    scores = scores.contiguous()
    rows, columns = scores.shape
    mask = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    width = triton.next_power_of_2(columns)
    height = max(1, BLOCK // width)
    with torch.cuda.device_of(scores):
        _mark_rows[(triton.cdiv(rows, height),)](scores, mask, keep, rows, columns, height, width)
    return mask


@triton.jit
def _key(score):
    """Integers in the order of the scores; -0.0 and 0.0 are one key, and NaNs are the largest."""
    bits = score.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    key = tl.where(bits < 0, -magnitude, magnitude)
    return tl.where(magnitude > 0x7F800000, 0x7FFFFFFF, key)


@triton.jit
def _narrow(level, RADIX: tl.constexpr):
    """The threshold's prefix with this level's digit added, and how many of that prefix to keep."""
    digits = tl.arange(0, RADIX)
    bins = tl.load(level + digits)
    base = tl.load(level + RADIX)
    left = tl.load(level + RADIX + 1)
    above = tl.sum(bins, 0) - tl.cumsum(bins, 0)
    found = (above < left) & (left <= above + bins)
    digit = tl.sum(tl.where(found, digits, 0), 0)
    return base + digit, left - tl.sum(tl.where(found, above, 0), 0)


@triton.jit(do_not_specialize=["keep"])
def _count(
    scores,
    levels,
    counts,
    keep,
    blocks,
    run,
    LEVEL: tl.constexpr,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the digits at `LEVEL` of the keys whose prefix is the threshold's."""
    RADIX: tl.constexpr = 2**BITS
    program = tl.program_id(0)
    level = levels + LEVEL * (RADIX + 2)
    if LEVEL == 0:
        base = -RADIX // 2  # keys are signed
        left = keep
    else:
        prefix, left = _narrow(level - (RADIX + 2), RADIX)
        base = prefix * RADIX
    if program == 0:
        tl.store(level + RADIX, base)
        tl.store(level + RADIX + 1, left)
    bins = tl.zeros([RADIX], tl.int32)
    for block in range(program * run, min(program * run + run, blocks)):
        key = _key(tl.load(scores + block * BLOCK + tl.arange(0, BLOCK)))
        digit = (key >> BITS * (LEVELS - 1 - LEVEL)) - base
        agrees = (digit >= 0) & (digit < RADIX)
        if tl.max(agrees.to(tl.int32), 0) > 0:  # seldom so at the last levels
            bins += tl.histogram(tl.where(agrees, digit, 0), RADIX, mask=agrees)
    digits = tl.arange(0, RADIX)
    tl.atomic_add(level + digits, bins, mask=bins > 0, sem="relaxed")
    if LEVEL == LEVELS - 1:
        tl.store(counts + digits * PROGRAMS + program, bins)


@triton.jit
def _mark(
    scores,
    levels,
    counts,
    mask,
    blocks,
    run,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the mask: all above the threshold, and the first of the ties."""
    RADIX: tl.constexpr = 2**BITS
    program = tl.program_id(0)
    level = levels + (LEVELS - 1) * (RADIX + 2)
    threshold, left = _narrow(level, RADIX)
    digit = threshold - tl.load(level + RADIX)
    programs = tl.arange(0, PROGRAMS)
    left -= tl.sum(tl.load(counts + digit * PROGRAMS + programs, mask=programs < program, other=0), 0)
    for block in range(program * run, min(program * run + run, blocks)):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        key = _key(tl.load(scores + offsets))
        tie = (key == threshold).to(tl.int32)
        tl.store(mask + offsets, (key > threshold) | ((tie > 0) & (tl.cumsum(tie, 0) <= left)))
        left -= tl.sum(tie, 0)


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
    """Find each row's threshold bit by bit, then keep what is above it and the first ties."""
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
    left = keep - tl.sum(above, 1)
    kept = (above > 0) | ((tie > 0) & (tl.cumsum(tie, 1) <= left[:, None]))
    tl.store(mask + offsets, kept, mask=inside)
