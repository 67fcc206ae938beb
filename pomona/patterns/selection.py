"""Exact selection: the `keep` largest scores, no more and no fewer, the same on every device.

A NaN counts as the largest score, -0.0 equals 0.0, and of equal scores the earlier is kept. So a mask
never depends on the machine that made it, and the count of zeros is the one asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pomona.errors import PomonaError, require

Array = NDArray[Any]

CHUNK = 1 << 18  # entries worked on at a time on CPU: a chunk and its masks stay in the cache
RANKED = 8  # columns up to which comparing all pairs of a row beats a partition on CPU

# The integers as wide as a float, and the bits of its infinity: all above are NaNs.
_BITS = {torch.float32: (torch.int32, 0x7F80_0000), torch.float64: (torch.int64, 0x7FF0_0000_0000_0000)}


@torch.no_grad()
def select_largest(scores: Sequence[Tensor], keep: int) -> list[Tensor]:
    """Boolean masks, one a score tensor and of its shape, true for the `keep` largest entries of all.

    Ties are broken by position: tensor order, then row-major order. On CUDA nothing waits for the
    device, and the masks are views of one buffer.
    """
    total = sum(score.numel() for score in scores)
    _check(keep, total, "entries", *scores)
    if keep in (0, total):
        return [torch.full_like(score, keep > 0, dtype=torch.bool) for score in scores]
    if scores[0].device.type == "cpu":
        return _keep_on_cpu(scores, keep)
    flat = [score.reshape(-1) for score in scores]
    if kernels := _kernels(*scores):
        mask = kernels.select_largest(flat, keep)
    else:
        mask = _keep_by_topk(_keys(torch.cat(flat)).unsqueeze(0), keep).squeeze(0)
    parts = mask.split([score.numel() for score in scores])
    return [part.view(score.shape) for part, score in zip(parts, scores, strict=True)]


@torch.no_grad()
def select_largest_per_row(scores: Tensor, keep: int | Tensor) -> Tensor:
    """The mask of a (rows × columns) score, true for the `keep` largest entries of each row.

    A count that lies on the device, as a tensor of one whole number from 1 to the columns, stays there.
    """
    require(
        scores.ndim == 2,
        f"scores have {scores.ndim} dimensions where 2 are needed: reshape to rows × columns.",
    )
    rows, columns = scores.shape
    if isinstance(keep, Tensor):
        if scores.is_cuda:
            return _keep_by_sort(_keys(scores), keep)
        keep = int(keep)
    _check(keep, columns, "columns", scores)
    if keep in (0, columns) or rows == 0:
        return torch.full(scores.shape, keep > 0, device=scores.device)
    if scores.device.type == "cpu":
        mask = torch.empty(scores.shape, dtype=torch.bool)
        size = max(1, CHUNK // columns)
        rank = _keep_by_rank if columns <= RANKED else _keep_by_partition
        for part, out in zip(scores.split(size), mask.split(size), strict=True):
            rank(_keys(part).numpy(), keep, out.numpy())
        return mask
    kernels = _kernels(scores)
    if kernels and columns <= kernels.LONGEST_ROW:
        return kernels.select_largest_per_row(scores, keep)
    return _keep_by_topk(_keys(scores), keep)


def _check(keep: int, limit: int, what: str, *scores: Tensor) -> None:
    """Refuse a count out of range, scores that are not floats, and scores on several devices."""
    require(0 <= keep <= limit, f"cannot keep {keep} of {limit} {what}: ask for 0 to {limit}.")
    for score in scores:
        require(
            score.is_floating_point(),
            f"scores are {score.dtype}, which has no order here: convert to a float.",
        )
        if score.device != scores[0].device:
            places = f"{scores[0].device} and {score.device}"
            raise PomonaError(f"scores lie on {places}: move them to one device before selecting.")


@cache
def _triton() -> ModuleType | None:
    try:
        from pomona.patterns import selection_triton
    except ImportError:
        return None
    return selection_triton


def _kernels(*scores: Tensor) -> ModuleType | None:
    """The Triton kernels, where there are any for these scores."""
    fits = all(score.is_cuda and score.dtype != torch.float64 for score in scores)
    return _triton() if fits and sum(score.numel() for score in scores) < 2**30 else None


def _keys(scores: Tensor) -> Tensor:
    """Integers in the order of the scores, made from their bits without a comparison."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    kind, infinity = _BITS[wide.dtype]
    bits, top = wide.view(kind), torch.iinfo(kind).max
    sign = bits >> (torch.iinfo(kind).bits - 1)
    keys = (bits ^ (sign & top)).sub_(sign)  # minus the magnitude where the sign is set: both zeros are 0
    gap = top + 1 - infinity
    return keys.sub_(gap).clamp_(max=infinity - gap + 1)  # negative NaNs wrap round to the other NaNs


def _keep_by_topk(keys: Tensor, keep: int) -> Tensor:
    """The mask of the `keep` largest keys of each row in plain torch, without waiting for the device."""
    return _from_least(keys, keys.topk(keep, dim=1, sorted=False).values.amin(dim=1, keepdim=True), keep)


def _keep_by_sort(keys: Tensor, keep: Tensor) -> Tensor:
    """The same where the count is known to the device alone."""
    return _from_least(keys, keys.sort(dim=1, descending=True).values.index_select(1, keep.reshape(1) - 1), keep)


def _from_least(keys: Tensor, least: Tensor, keep: int | Tensor) -> Tensor:
    """All keys above each row's `least`, and the first ties with it, `keep` altogether."""
    above, ties = keys > least, keys == least
    return above | (ties & (ties.cumsum(1) <= keep - above.sum(1, keepdim=True)))


def _keep_on_cpu(scores: Sequence[Tensor], keep: int) -> list[Tensor]:
    wide = torch.float64 if any(score.dtype == torch.float64 for score in scores) else torch.float32
    parts = [score.detach().to(wide).reshape(-1).numpy() for score in scores]
    masks = [torch.empty(score.shape, dtype=torch.bool) for score in scores]
    chunks = list(_chunks(parts))
    outs = list(_chunks([mask.view(-1).numpy() for mask in masks]))
    with np.errstate(invalid="ignore"):
        if not _mark(chunks, outs, _likely_threshold(parts, chunks, keep), keep):
            _mark(chunks, outs, _kth_largest(np.concatenate(parts), keep), keep)
    return masks


def _chunks(parts: list[Array]) -> Iterator[Array]:
    for part in parts:
        for start in range(0, part.size, CHUNK):
            yield part[start : start + CHUNK]


def _kth_largest(values: Array, k: int) -> Any:
    return np.partition(values, values.size - k)[values.size - k]


def _likely_threshold(parts: list[Array], chunks: list[Array], keep: int) -> Any:
    """The `keep`-th largest value, wrong only where an unlucky sample misses it.

    A random sample brackets the value to four standard deviations (Floyd and Rivest, 1975); one pass
    counts what lies above the bracket and gathers the few values inside, among which it is found.
    """
    total = sum(part.size for part in parts)
    share, draw = keep / total, total ** (-1 / 3)
    generator = np.random.default_rng(0)
    sample = np.concatenate(
        [part[generator.integers(part.size, size=int(part.size * draw) + 1)] for part in parts if part.size]
    )
    sample.sort()
    rank = sample.size * (1 - share)
    slack = 4 * (sample.size * share * (1 - share)) ** 0.5 + 1
    low = sample[int(rank - slack)] if rank > slack else -np.inf
    high = sample[int(rank + slack)] if rank + slack < sample.size else np.inf

    below, inside = 0, []
    for chunk in chunks:
        under = chunk < high  # a NaN is not under anything, so it counts as above
        below += int(np.count_nonzero(under))
        inside.append(chunk[under > (chunk <= low)])
    middle = np.concatenate(inside)
    k = keep - (total - below)
    if 0 < k <= middle.size:
        return _kth_largest(middle, k)
    return high if k <= 0 else low


def _mark(chunks: list[Array], masks: list[Array], threshold: Any, keep: int) -> bool:
    """Mark all above the threshold and the first ties; false where that cannot make `keep` entries."""
    lost = np.isnan(threshold)  # then nothing is above it, and the NaNs are the ties
    left = keep
    for chunk, mask in zip(chunks, masks, strict=True):
        np.logical_not(np.less_equal(chunk, threshold, out=mask), out=mask)
        if lost:
            mask[:] = False
        left -= int(np.count_nonzero(mask))
    for chunk, mask in zip(chunks, masks, strict=True):
        if left <= 0:
            break
        ties = np.flatnonzero(np.isnan(chunk) if lost else chunk == threshold)[:left]
        mask[ties] = True
        left -= ties.size
    return left == 0


def _keep_by_rank(keys: Array, keep: int, mask: Array) -> None:
    """Rank each entry of short rows by counting those that come before it."""
    columns = np.ascontiguousarray(keys.T)
    rank = np.empty(columns.shape, np.uint8)
    rank[:] = np.arange(len(columns), dtype=np.uint8)[:, None]  # at first every earlier entry wins
    for i in range(len(columns) - 1):
        wins = (columns[i + 1 :] > columns[i]).view(np.uint8)
        rank[i + 1 :] -= wins
        rank[i] += np.add.reduce(wins, axis=0, dtype=np.uint8)
    np.less(rank.T, keep, out=mask)


def _keep_by_partition(keys: Array, keep: int, mask: Array) -> None:
    """Find the threshold of each row, then keep what is above it and the first ties."""
    kth = keys.shape[1] - keep
    least = np.partition(keys, kth, axis=1)[:, kth, None]
    if np.count_nonzero(np.greater_equal(keys, least, out=mask)) == keep * len(keys):
        return
    over = np.flatnonzero(mask.sum(axis=1) > keep)
    above, ties = keys[over] > least[over], keys[over] == least[over]
    left = keep - above.sum(axis=1, keepdims=True)
    mask[over] = above | (ties & (ties.cumsum(axis=1) <= left))
