"""Exact top-k selection by counts, in a few megabytes beside the scores and across the ranks of a distributed training.

A score becomes an integer key of the same order (`score_reader.keys_of`). The threshold, which is the key of the
smallest score that is kept, is found a few bits at a time, from the highest: each pass counts that digit in the keys
whose higher bits equal the threshold's. The counts of all ranks are added, so that ranks which hold parts of the same
tensors agree on one threshold and never exchange scores. Scores are read in chunks. On CUDA the host waits once, to
know whether some of the scores that equal the threshold are left out, of which each rank then needs its share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import require
from ..native import step
from .score_reader import ScoreReader, join_chunks, keys_of, read_scores

DIGITS = {32: (11, 11, 10), 64: (11, 11, 11, 11, 11, 9)}  # the bits of a key that each pass counts, by its width


@dataclass(frozen=True)
class Ranks:
    """How counts are added over the ranks of a distributed training.

    Each rank has the same tensors in the same order, of each a part, and the parts lie in the order of the ranks when
    the tensor is read row by row. A count is an int64 tensor on the device of the scores.
    """

    sum_all: Callable[[Tensor], Tensor]  # the sum of a count over all ranks
    sum_lower: Callable[[Tensor], Tensor]  # its sum over the ranks before this one


Groups = Sequence[Sequence[ScoreReader]]  # tensors, by those that have a threshold in common
ONE_RANK = Ranks(sum_all=lambda count: count, sum_lower=torch.zeros_like)


@dataclass(frozen=True)
class Thresholds:
    """Of each group of tensors, the key of the smallest score that is kept, and how many with it are kept and not."""

    keys: Tensor
    ties: Tensor
    dropped: Tensor


@torch.no_grad()
def select_by_counting(
    scores: Sequence[Tensor],
    keep: int | Sequence[int],
    floors: Sequence[int] | None = None,
    *,
    magnitudes: bool = False,
    within: Sequence[Tensor] | None = None,
    ranks: Ranks = ONE_RANK,
    out: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Return the masks of `selection.select_largest` by counting, bit for bit; over all ranks, those of their parts.

    Arguments:
        scores: floats of one dtype on one device.
        keep: how many entries are kept over all tensors, or a number for each of them; of all ranks together.
        floors: how many entries of each tensor are kept at least, except those of −inf; of all ranks together.
        magnitudes: whether |score| is ranked in place of the score, without a copy of it.
        within: masks; entries off them rank as −inf.
        ranks: how counts are added over the ranks that hold parts of these tensors.
        out: masks to write, in place of new ones.
    """
    masks = [torch.empty(s.shape, dtype=torch.bool, device=s.device) for s in scores] if out is None else list(out)
    require(all(mask.is_contiguous() for mask in masks), "masks with gaps cannot be written: give contiguous ones.")
    readers = read_scores(scores, magnitudes, within)
    alone = [[reader] for reader in readers]
    if not isinstance(keep, int):
        mark_by_counting(alone, keep, masks, ranks)
        return masks
    mark_by_counting([readers], [keep], masks, ranks)
    if floors is None or not any(floors) or not scores:
        return masks
    kept = ranks.sum_all(torch.stack([mask.count_nonzero() for mask in masks]))
    if (kept >= kept.new_tensor(floors)).all():  # as almost always: they change nothing
        return masks
    mark_by_counting(alone, floors, masks, ranks)
    raised = [[replace(reader, raised=mask.clone()) for reader, mask in zip(readers, masks, strict=True)]]
    mark_by_counting(raised, [keep], masks, ranks)
    return masks


def mark_by_counting(groups: Groups, keep: Sequence[int], masks: Sequence[Tensor], ranks: Ranks = ONE_RANK) -> None:
    """Write the masks of the `keep[i]` largest scores of each group i of tensors."""
    _mark(groups, find_thresholds(groups, keep, ranks), masks, ranks)


def find_thresholds(groups: Groups, keep: Sequence[int], ranks: Ranks = ONE_RANK) -> Thresholds:
    """Return the thresholds above which `keep[i]` scores of group i lie, together with the first ties."""
    kinds = {(reader.dtype or reader.score.dtype, reader.score.device) for group in groups for reader in group}
    first, width = groups[0][0].score, 64 if any(dtype == torch.float64 for dtype, _ in kinds) else 32
    require(
        len(kinds) == 1,
        "scores of several dtypes or devices have no common threshold here: convert them to one.",
    )
    wanted = torch.tensor(list(keep)).to(first.device, non_blocking=True)
    remaining, base, shift = wanted, torch.zeros_like(wanted), width
    for number, bits in enumerate(DIGITS[width]):
        shift -= bits
        base = (base << bits) if number else base - (1 << (bits - 1))  # keys are signed
        counts = torch.zeros(len(groups), 1 << bits, dtype=torch.int64, device=first.device)
        for group, own_base, own_counts in zip(groups, base.unbind(), counts.unbind(), strict=True):
            _count(group, shift, own_base, own_counts)
        counts = ranks.sum_all(counts)
        up_to = counts.flip(1).cumsum(1).flip(1)  # how many have this digit or a higher one
        found = (up_to >= remaining[:, None]) & (up_to - counts < remaining[:, None])
        digit = (found * torch.arange(1 << bits, device=first.device)).sum(1)
        remaining = remaining - (found * (up_to - counts)).sum(1)
        dropped = (found * counts).sum(1) - remaining
        base = base + digit
    largest = torch.iinfo(torch.int64 if width == 64 else torch.int32).max  # above all keys: nothing is kept
    some = wanted > 0
    return Thresholds(torch.where(some, base, largest), torch.where(some, remaining, 0), torch.where(some, dropped, 0))


def _count(readers: Sequence[ScoreReader], shift: int, base: Tensor, counts: Tensor) -> None:
    """Add to `counts` how many keys have each value of the digit (key >> shift) − base."""
    rest = []
    for reader in readers:
        values = None if counts.is_cuda else reader.whole()
        if values is None or not step.count_digits(values, reader.magnitudes, shift, int(base), counts):
            rest.append(reader)
    for part, _ in join_chunks(rest):
        if not counts.is_cuda and step.count_digits(part, False, shift, int(base), counts):
            continue
        digit = (keys_of(part) >> shift) - base
        inside = (digit >= 0) & (digit < len(counts))
        if counts.is_cuda:  # bincount would wait for the device; −1 is in no bin
            counted = torch.where(inside, digit, -1).int()
            counts += torch.histc(counted, len(counts), 0, len(counts) - 1).long()
        else:
            counts += torch.bincount(digit[inside], minlength=len(counts))


def _mark(groups: Groups, thresholds: Thresholds, masks: Sequence[Tensor], ranks: Ranks) -> None:
    """Write the masks of all scores above the threshold of their group and of its first ties."""
    readers, sizes = [reader for group in groups for reader in group], [len(group) for group in groups]
    if not bool(thresholds.dropped.any()):  # as almost always where scores are not of a few values
        first = 0
        for group, key in zip(groups, thresholds.keys, strict=True):
            _mark_from(group, key, masks[first : first + len(group)])
            first += len(group)
        return
    of_readers = torch.arange(len(groups)).repeat_interleave(torch.tensor(sizes)).to(thresholds.keys.device)
    keys = thresholds.keys[of_readers]
    own = torch.stack([_mark_above(*each) for each in zip(readers, keys, masks, strict=True)])
    totals = ranks.sum_all(own.clone())
    before = ranks.sum_lower(own.clone())  # ties of the same tensor, and then of those before it in its group
    before = before + torch.cat([part.cumsum(0) - part for part in totals.split(sizes)])
    quotas = (thresholds.ties[of_readers] - before).clamp(min=0)
    for reader, key, quota, mask in zip(readers, keys, quotas, masks, strict=True):
        _mark_ties(reader, key, quota, mask)


def _mark_from(readers: Sequence[ScoreReader], key: Tensor, masks: Sequence[Tensor]) -> None:
    """Mark all scores of a threshold or above it."""
    rest = []
    for reader, mask in zip(readers, masks, strict=True):
        values = None if key.is_cuda else reader.whole()
        ties = None if values is None else step.mark_keys(values, reader.magnitudes, int(key), mask)
        if ties is None:
            rest.append((reader, mask))
        elif ties and values is not None:
            step.mark_ties(values, reader.magnitudes, int(key), ties, mask)
    for part, views in join_chunks([reader for reader, _ in rest], [mask for _, mask in rest]):
        kept = keys_of(part) >= key
        torch._foreach_copy_(views, kept.split([len(view) for view in views]))


def _mark_above(reader: ScoreReader, key: Tensor, mask: Tensor) -> Tensor:
    """Mark all scores above a threshold; return how many equal it."""
    values = None if key.is_cuda else reader.whole()
    found = None if values is None else step.mark_keys(values, reader.magnitudes, int(key), mask)
    if found is not None:
        return key.new_tensor(found)
    ties = torch.zeros_like(key)
    for part, own in reader.chunks(mask):
        assert own is not None
        keys = keys_of(part)
        torch.gt(keys, key, out=own)
        ties += (keys == key).sum()
    return ties


def _mark_ties(reader: ScoreReader, key: Tensor, quota: Tensor, mask: Tensor) -> None:
    """Mark the first `quota` scores that equal a threshold."""
    if not key.is_cuda:
        values = reader.whole()
        if values is not None and step.mark_ties(values, reader.magnitudes, int(key), int(quota), mask):
            return
    for part, own in reader.chunks(mask):
        assert own is not None
        if not key.is_cuda and not quota:
            return
        equal = keys_of(part) == key
        first = equal & (equal.cumsum(0) <= quota)
        own.logical_or_(first)
        quota = quota - first.sum()
