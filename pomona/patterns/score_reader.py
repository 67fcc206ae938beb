"""Scores that are read in chunks, so that what is ranked never needs a second copy of all weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..masking import fill_pruned
from ..native import step

CHUNK = {"cpu": 1 << 18, "cuda": 1 << 23}  # scores that are read at a time; on a CPU they stay in the cache

# The integer type as wide as a float type, and the bits of the float's infinity: all larger bit patterns are NaNs.
_INTEGER_VIEWS = {torch.float32: (torch.int32, 0x7F80_0000), torch.float64: (torch.int64, 0x7FF0_0000_0000_0000)}


@dataclass(frozen=True)
class ScoreReader:
    """What is ranked of one tensor: its values or their magnitudes, with −inf off a mask and +inf on another."""

    score: Tensor
    magnitudes: bool = False  # whether |score| is ranked
    within: Tensor | None = None  # a mask; entries off it rank as −inf
    raised: Tensor | None = None  # a mask; entries on it rank as +inf, except NaN and −inf
    dtype: torch.dtype | None = None  # in which entries are ranked; None is their own

    def whole(self) -> Tensor | None:
        """Return all scores in one run where the C kernels can rank them as they lie in memory, else None."""
        score = self.score.detach()
        as_it_is = self.within is None and self.raised is None and self.dtype in (None, score.dtype)
        return score.view(-1) if as_it_is and step.is_float(score) else None

    def chunks(self, mask: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield flat runs of what is ranked, row by row, each with a view of its part of a contiguous mask, if any."""
        score = self.score.detach()
        size = CHUNK["cuda" if score.is_cuda else "cpu"]
        if score.is_contiguous():
            score, rows = score.view(-1), size
        else:
            rows = max(1, size // max(1, score[0].numel()))
        masks = [None if m is None else m.reshape(score.shape) for m in (mask, self.within, self.raised)]
        for at in range(0, len(score), rows):
            part = score[at : at + rows].reshape(-1)
            own, within, raised = (None if m is None else m[at : at + rows].reshape(-1) for m in masks)
            yield self._rank(part, within, raised), own

    def _rank(self, part: Tensor, within: Tensor | None, raised: Tensor | None) -> Tensor:
        """Return what is ranked of a run of scores."""
        part = part.to(self.dtype or part.dtype)
        if self.magnitudes:
            part = part.abs()
        if within is not None:
            part = fill_pruned(part, within, -torch.inf)
        if raised is not None:
            part = part.masked_fill(raised & (part > -torch.inf), torch.inf)
        return part

    def sample(self, places: Tensor) -> Tensor:
        """Return what is ranked at some places, counted row by row."""
        within, raised = (None if m is None else m.take(places) for m in (self.within, self.raised))
        return self._rank(self.score.detach().take(places), within, raised)


def join_chunks(
    readers: Sequence[ScoreReader], masks: Sequence[Tensor] | None = None
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield what is ranked of several tensors in flat runs, each with views of its parts of the tensors' masks, if any.

    Small tensors are joined, so that a GPU launches few kernels for many of them.
    """
    parts: list[Tensor] = []
    views: list[Tensor] = []
    for reader, mask in zip(readers, [None] * len(readers) if masks is None else masks, strict=True):
        size = CHUNK["cuda" if reader.score.is_cuda else "cpu"]
        for part, own in reader.chunks(mask):
            if parts and sum(map(len, parts)) + len(part) > size:
                yield torch.cat(parts), views
                parts, views = [], []
            parts.append(part)
            views += [] if own is None else [own]
    if parts:
        yield torch.cat(parts) if len(parts) > 1 else parts[0], views


def read_scores(scores: Sequence[Tensor], magnitudes: bool, within: Sequence[Tensor] | None) -> list[ScoreReader]:
    """Return readers of several tensors, or of their magnitudes, within masks where these are given."""
    masks = [None] * len(scores) if within is None else within
    return [ScoreReader(score, magnitudes, mask) for score, mask in zip(scores, masks, strict=True)]


def rank_scores(scores: Sequence[Tensor], magnitudes: bool, within: Sequence[Tensor] | None) -> list[Tensor]:
    """Return what is ranked of several tensors as tensors, where a copy of them does not matter."""
    if magnitudes:
        scores = torch._foreach_abs(list(scores))  # one kernel launch for all
    if within is not None:
        scores = [fill_pruned(score, mask, -torch.inf) for score, mask in zip(scores, within, strict=True)]
    return list(scores)


def keys_of(scores: Tensor) -> Tensor:
    """Return integers in the order of the scores, computed from their bits without a comparison."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    kind, infinity = _INTEGER_VIEWS[wide.dtype]
    bits, top = wide.view(kind), torch.iinfo(kind).max
    sign = bits >> (torch.iinfo(kind).bits - 1)
    keys = (bits ^ (sign & top)).sub_(sign)  # −magnitude where the sign bit is set, so both zeros become 0
    gap = top + 1 - infinity
    return keys.sub_(gap).clamp_(max=infinity - gap + 1)  # negative NaNs wrap around to the positive ones
