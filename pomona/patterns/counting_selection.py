"""Exact top-k selection by counts, in a few megabytes beside the scores and across the ranks of a distributed training.

A score becomes an integer key of the same order (`selection.keys_of`). The threshold, which is the key of the smallest
score that is kept, is found a few bits at a time, from the highest: each pass counts that digit in the keys whose
higher bits equal the threshold's. The counts of all ranks are added, so that ranks which hold parts of the same tensors
agree on one threshold and never exchange scores. Scores are read in chunks; on CUDA the host does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import require
from ..native import step
from .selection import keys_of

DIGITS = {32: (11, 11, 10), 64: (11, 11, 11, 11, 11, 9)}  # the bits of a key that each pass counts, by its width
CHUNK = {"cpu": 1 << 18, "cuda": 1 << 23}  # scores whose keys are held at a time


@dataclass(frozen=True)
class Ranks:
    """How counts are added over the ranks of a distributed training.

    Each rank has the same tensors in the same order, of each a part, and the parts lie in the order of the ranks when
    the tensor is read row by row. A count is an int64 tensor on the device of the scores.
    """

    sum_all: Callable[[Tensor], Tensor]  # the sum of a count over all ranks
    sum_lower: Callable[[Tensor], Tensor]  # its sum over the ranks before this one


ONE_RANK = Ranks(sum_all=lambda count: count, sum_lower=torch.zeros_like)


@dataclass(frozen=True)
class Thresholds:
    """Of each group of tensors, the key of the smallest score that is kept, and how many scores with it are kept."""

    keys: Tensor
    ties: Tensor


@torch.no_grad()
def select_by_counting(
    scores: Sequence[Tensor],
    keep: int | Sequence[int],
    floors: Sequence[int] | None = None,
    *,
    magnitudes: bool = False,
    ranks: Ranks = ONE_RANK,
    out: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Return the masks of `selection.select_largest` by counting, bit for bit; over all ranks, those of their parts.

    Arguments:
        scores: floats of one dtype on one device.
        keep: how many entries are kept over all tensors, or a number for each of them; of all ranks together.
        floors: how many entries of each tensor are kept at least, except those of −inf; of all ranks together.
        magnitudes: whether |score| is ranked in place of the score, without a copy of it.
        ranks: how counts are added over the ranks that hold parts of these tensors.
        out: masks to write, in place of new ones.
    """
    masks = [torch.empty(s.shape, dtype=torch.bool, device=s.device) for s in scores] if out is None else list(out)
    require(all(mask.is_contiguous() for mask in masks), "masks with gaps cannot be written: give contiguous ones.")
    readers = [Reader(score, magnitudes) for score in scores]
    alone = [[reader] for reader in readers]
    if not isinstance(keep, int):
        _mark(alone, find_thresholds(alone, keep, ranks), masks, ranks)
        return masks
    together = [readers]
    _mark(together, find_thresholds(together, [keep], ranks), masks, ranks)
    if floors is None or not any(floors) or not scores:
        return masks
    kept = ranks.sum_all(torch.stack([mask.count_nonzero() for mask in masks]))
    if (kept >= kept.new_tensor(floors)).all():  # as almost always: they change nothing
        return masks
    _mark(alone, find_thresholds(alone, floors, ranks), masks, ranks)
    raised = [[Reader(s, magnitudes, m.clone()) for s, m in zip(scores, masks, strict=True)]]
    _mark(raised, find_thresholds(raised, [keep], ranks), masks, ranks)
    return masks


@dataclass(frozen=True)
class Reader:
    """A score tensor that is read in chunks, row by row."""

    score: Tensor
    magnitudes: bool = False
    raised: Tensor | None = None  # entries that rank as +inf, except those of −inf

    def chunks(self, mask: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield flat runs of the scores, each with a view of its part of a contiguous mask where one is given."""
        score = self.score.detach()
        size = CHUNK["cuda" if score.is_cuda else "cpu"]
        whole = self.raised is None and step.is_float(score)  # the C kernels take any number at once
        if score.is_contiguous():
            score, rows = score.view(-1), max(1, score.numel()) if whole else size
        else:
            rows = max(1, size // max(1, score[0].numel()))
        flat_masks = [None if m is None else m.view(score.shape) for m in (mask, self.raised)]
        for at in range(0, len(score), rows):
            part = score[at : at + rows].reshape(-1)
            own, raised = (None if m is None else m[at : at + rows].reshape(-1) for m in flat_masks)
            if raised is not None:
                part = part.masked_fill(raised & (part != -torch.inf), torch.inf)
            yield part, own

    def keys(self, part: Tensor) -> Tensor:
        """Return the keys of a run of scores."""
        return keys_of(part.abs() if self.magnitudes else part)


def find_thresholds(groups: Sequence[Sequence[Reader]], keep: Sequence[int], ranks: Ranks = ONE_RANK) -> Thresholds:
    """Return the thresholds above which `keep[i]` scores of group i lie, together with the first ties."""
    first = groups[0][0].score
    width = 64 if first.dtype == torch.float64 else 32
    require(
        all(r.score.dtype == first.dtype and r.score.device == first.device for group in groups for r in group),
        "scores of several dtypes or devices have no common threshold here: convert them to one.",
    )
    wanted = torch.tensor(list(keep)).to(first.device, non_blocking=True)
    remaining, base, shift = wanted, torch.zeros_like(wanted), width
    for number, bits in enumerate(DIGITS[width]):
        shift -= bits
        base = (base << bits) if number else base - (1 << (bits - 1))  # keys are signed
        counts = torch.zeros(len(groups), 1 << bits, dtype=torch.int64, device=first.device)
        for group, own_base, own_counts in zip(groups, base.unbind(), counts.unbind(), strict=True):
            for reader in group:
                _count(reader, shift, own_base, own_counts)
        counts = ranks.sum_all(counts)
        up_to = counts.flip(1).cumsum(1).flip(1)  # how many have this digit or a higher one
        found = (up_to >= remaining[:, None]) & (up_to - counts < remaining[:, None])
        digit = (found * torch.arange(1 << bits, device=first.device)).sum(1)
        remaining = remaining - (found * (up_to - counts)).sum(1)
        base = base + digit
    largest = torch.iinfo(torch.int64 if width == 64 else torch.int32).max  # above all keys: nothing is kept
    return Thresholds(torch.where(wanted > 0, base, largest), torch.where(wanted > 0, remaining, 0))


def _count(reader: Reader, shift: int, base: Tensor, counts: Tensor) -> None:
    """Add to `counts` how many keys have each value of the digit (key >> shift) − base."""
    host_base = int(base) if base.device.type == "cpu" else None
    for part, _ in reader.chunks():
        if host_base is not None and step.count_digits(part, reader.magnitudes, shift, host_base, counts):
            continue
        digit = (reader.keys(part) >> shift) - base
        inside = (digit >= 0) & (digit < len(counts))
        if counts.is_cuda:  # one more place for those outside; bincount would wait for the device
            counted = torch.where(inside, digit, -1).int()
            counts += torch.histc(counted, len(counts), 0, len(counts) - 1).long()
        else:
            counts += torch.bincount(digit[inside], minlength=len(counts))


def _mark(groups: Sequence[Sequence[Reader]], thresholds: Thresholds, masks: Sequence[Tensor], ranks: Ranks) -> None:
    """Write the masks of all scores above the threshold of their group and of its first ties."""
    readers, sizes = [reader for group in groups for reader in group], [len(group) for group in groups]
    of_readers = torch.arange(len(groups)).repeat_interleave(torch.tensor(sizes)).to(thresholds.keys.device)
    keys = thresholds.keys[of_readers]
    own = torch.stack([_mark_above(*each) for each in zip(readers, keys, masks, strict=True)])
    totals = ranks.sum_all(own.clone())
    before = ranks.sum_lower(own.clone())  # ties of the same tensor, and then of those before it in its group
    before = before + torch.cat([part.cumsum(0) - part for part in totals.split(sizes)])
    quotas = (thresholds.ties[of_readers] - before).clamp(min=0)
    for reader, key, quota, mask in zip(readers, keys, quotas, masks, strict=True):
        _mark_ties(reader, key, quota, mask)


def _mark_above(reader: Reader, key: Tensor, mask: Tensor) -> Tensor:
    """Mark all scores above a threshold; return how many equal it."""
    ties = torch.zeros_like(key)
    for part, own in reader.chunks(mask):
        assert own is not None
        found = None if key.is_cuda else step.mark_keys(part, reader.magnitudes, int(key), own)
        if found is None:
            keys = reader.keys(part)
            torch.gt(keys, key, out=own)
            ties += (keys == key).sum()
        else:
            ties += found
    return ties


def _mark_ties(reader: Reader, key: Tensor, quota: Tensor, mask: Tensor) -> None:
    """Mark the first `quota` scores that equal a threshold."""
    for part, own in reader.chunks(mask):
        assert own is not None
        if not key.is_cuda:
            if not quota:
                return
            if len(part) == mask.numel() and step.mark_ties(part, reader.magnitudes, int(key), int(quota), own):
                return
        equal = reader.keys(part) == key
        first = equal & (equal.cumsum(0) <= quota)
        own.logical_or_(first)
        quota = quota - first.sum()
