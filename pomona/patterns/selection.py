"""Exact top-k selection: the `keep` largest scores, no more and no fewer, the same on every device.

A NaN counts as the largest score, -0.0 equals 0.0, and of equal scores the earlier is kept. So a mask does not depend
on the machine that made it, and the number of zeros is exactly the requested one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import PomonaError, require
from ..native import step
from .counting_selection import mark_by_counting
from .score_reader import CHUNK, ScoreReader, keys_of, rank_scores, read_scores

Array = NDArray[Any]

MAX_RANKED_COLUMNS = 8  # row length up to which comparing all pairs is faster than a partition on the CPU
MAX_KERNEL_ENTRIES = 2**30  # the kernels index entries with 32 bits


@torch.no_grad()
def select_largest(
    scores: Sequence[Tensor],
    keep: int,
    floors: Sequence[int] | None = None,
    *,
    magnitudes: bool = False,
    within: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Return one boolean mask per score tensor, true for the `keep` largest entries over all tensors.

    With `floors` at least `floors[i]` entries of tensor i are kept, its largest ones without −inf, and all other places
    go to the largest entries over all tensors. With `magnitudes`, |score| is ranked, and entries off the masks `within`
    rank as −inf, on a CPU without a copy of the scores.

    Ties are broken by position: tensor order, then row-major order. On CUDA the host does not wait for the device,
    and the masks are views of one buffer. Raises PomonaError for a count out of range, scores that are not floats,
    and scores on several devices.
    """
    total = sum(score.numel() for score in scores)
    _validate(keep, total, "entries", *scores)
    if keep in (0, total):
        return [torch.full_like(score, keep > 0, dtype=torch.bool) for score in scores]
    if scores[0].device.type == "cpu":
        return _select_with_floors(read_scores(scores, magnitudes, within), keep, floors)
    scores = rank_scores(scores, magnitudes, within)
    if floors is not None and any(floors):
        mask = select_largest([raise_floor_scores(scores, floors)], keep)[0]
        return _split_like(mask, scores)
    flat = [score.reshape(-1) for score in scores]
    if kernels := _kernels_for(*scores):
        mask = kernels.select_largest(flat, keep)
    else:
        mask = _select_by_topk(keys_of(torch.cat(flat)).unsqueeze(0), keep).squeeze(0)
    return _split_like(mask, scores)


@torch.no_grad()
def raise_floor_scores(scores: Sequence[Tensor], floors: Sequence[int] | None = None) -> Tensor:
    """Return all scores in one flat tensor, with +inf for the `floors[i]` largest of tensor i but NaN and −inf."""
    flat = torch.cat([score.reshape(-1) for score in scores])
    if floors is None or not any(floors):
        return flat
    chosen = _select_per_segment(flat, [score.numel() for score in scores], floors)
    return flat.masked_fill_(chosen & (flat > -torch.inf), torch.inf)


def _select_per_segment(flat: Tensor, sizes: Sequence[int], keep: Sequence[int]) -> Tensor:
    """Return the mask of the `keep[i]` largest entries of each segment of a flat tensor."""
    kernels = _kernels_for(flat)
    if kernels and not torch.cuda.is_current_stream_capturing():  # the kernels copy their counts from the host
        return kernels.select_largest_per_segment(flat, sizes, keep)
    return torch.cat([select_largest([part], k)[0] for part, k in zip(flat.split(list(sizes)), keep, strict=True)])


def _split_like(mask: Tensor, scores: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat mask in the shapes of the scores."""
    parts = mask.split([score.numel() for score in scores])
    return [part.view(score.shape) for part, score in zip(parts, scores, strict=True)]


@torch.no_grad()
def select_largest_per_row(scores: Tensor, keep: int | Tensor) -> Tensor:
    """Return the mask of a (rows × columns) score, true for the `keep` largest entries of each row.

    `keep` may be a tensor on the device with one integer from 1 to the number of columns; on CUDA the host does not
    wait for its value. Raises PomonaError for a count out of range and scores that are not two-dimensional floats.
    """
    require(
        scores.ndim == 2,
        f"scores have {scores.ndim} dimensions where 2 are needed: reshape to rows × columns.",
    )
    rows, columns = scores.shape
    if isinstance(keep, Tensor):
        if scores.is_cuda:
            return _select_by_sort(keys_of(scores), keep)
        keep = int(keep)
    _validate(keep, columns, "columns", scores)
    if keep in (0, columns) or rows == 0:
        return torch.full(scores.shape, keep > 0, device=scores.device)
    if scores.device.type == "cpu":
        mask = torch.empty(scores.shape, dtype=torch.bool)
        size = max(1, CHUNK["cpu"] // columns)
        select_rows = _select_by_rank if columns <= MAX_RANKED_COLUMNS else _select_by_partition
        for part, out in zip(scores.split(size), mask.split(size), strict=True):
            select_rows(keys_of(part).numpy(), keep, out.numpy())
        return mask
    kernels = _kernels_for(scores)
    if kernels and columns <= kernels.MAX_ROW_LENGTH:
        return kernels.select_largest_per_row(scores, keep)
    return _select_by_topk(keys_of(scores), keep)


def _validate(keep: int, limit: int, what: str, *scores: Tensor) -> None:
    """Raise PomonaError for a count out of range, scores that are not floats, and scores on several devices."""
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
def _import_kernels() -> ModuleType | None:
    """Return the module of the Triton kernels, or None where Triton is not installed."""
    try:
        from . import radix_select_triton
    except ImportError:
        return None
    return radix_select_triton


def _kernels_for(*scores: Tensor) -> ModuleType | None:
    """Return the module of the Triton kernels if they can select from these scores, else None."""
    fits = all(score.is_cuda and score.dtype != torch.float64 for score in scores)
    return _import_kernels() if fits and sum(score.numel() for score in scores) < MAX_KERNEL_ENTRIES else None


def _select_by_topk(keys: Tensor, keep: int) -> Tensor:
    """Return the mask of the `keep` largest keys of each row in plain torch, without waiting for the device."""
    return _mask_from_threshold(keys, keys.topk(keep, dim=1, sorted=False).values.amin(dim=1, keepdim=True), keep)


def _select_by_sort(keys: Tensor, keep: Tensor) -> Tensor:
    """Return the mask of the `keep` largest keys of each row where `keep` lies on the device."""
    thresholds = keys.sort(dim=1, descending=True).values.index_select(1, keep.reshape(1) - 1)
    return _mask_from_threshold(keys, thresholds, keep)


def _mask_from_threshold(keys: Tensor, threshold: Tensor, keep: int | Tensor) -> Tensor:
    """Return the mask of all keys above their row's threshold and of the first ties with it, `keep` in each row."""
    above, ties = keys > threshold, keys == threshold
    return above | (ties & (ties.cumsum(1) <= keep - above.sum(1, keepdim=True)))


def _select_with_floors(readers: Sequence[ScoreReader], keep: int, floors: Sequence[int] | None) -> list[Tensor]:
    """Return the masks of `select_largest` for scores on the CPU."""
    masks = _select_on_cpu(readers, keep)
    if floors is None or all(int(mask.count_nonzero()) >= count for mask, count in zip(masks, floors, strict=True)):
        return masks  # where all floors are reached without them, as almost always, they change nothing
    sizes = [reader.score.numel() for reader in readers]
    first = [
        _select_on_cpu([reader], count)[0] if 0 < count < size else torch.full_like(mask, count > 0)
        for reader, count, size, mask in zip(readers, floors, sizes, masks, strict=True)
    ]
    return _select_on_cpu([replace(reader, raised=mask) for reader, mask in zip(readers, first, strict=True)], keep)


def _select_on_cpu(readers: Sequence[ScoreReader], keep: int) -> list[Tensor]:
    """Return the masks of the `keep` largest scores on the CPU, computed with numpy."""
    wide = torch.float64 if any(reader.score.dtype == torch.float64 for reader in readers) else torch.float32
    masks = [torch.empty(reader.score.shape, dtype=torch.bool) for reader in readers]

    def read() -> Iterator[tuple[Array, Array]]:
        for reader, mask in zip(readers, masks, strict=True):
            for part, own in reader.chunks(mask):
                yield part.to(wide).numpy(), own.numpy()  # type: ignore[union-attr]

    with np.errstate(invalid="ignore"):
        if not _mark(read, _estimate_threshold(readers, read, keep, wide), keep):
            mark_by_counting([[replace(reader, dtype=wide) for reader in readers]], [keep], masks)
    return masks


Read = Callable[[], Iterator[tuple[Array, Array]]]  # all scores in chunks, each with its part of the mask


def _kth_largest(values: Array, k: int) -> Any:
    """Return the k-th largest value of an array, with NaN as the largest."""
    return np.partition(values, values.size - k)[values.size - k]


def _estimate_threshold(readers: Sequence[ScoreReader], read: Read, keep: int, wide: torch.dtype) -> Any:
    """Return the `keep`-th largest value; it is wrong only if the sample's bracket misses it, which `_mark` detects.

    A random sample brackets the value to four standard deviations (Floyd and Rivest, 1975). One pass over the values
    counts those above the bracket and collects the few inside, among which the value is found.
    """
    sizes = [reader.score.numel() for reader in readers]
    total = sum(sizes)
    share, draw = keep / total, total ** (-1 / 3)
    generator = np.random.default_rng(0)
    places = [torch.from_numpy(generator.integers(size, size=int(size * draw) + 1)) for size in sizes if size]
    drawn = [reader for reader, size in zip(readers, sizes, strict=True) if size]
    sample = np.concatenate([r.sample(at).to(wide).numpy() for r, at in zip(drawn, places, strict=True)])
    sample.sort()
    rank = sample.size * (1 - share)
    slack = 4 * (sample.size * share * (1 - share)) ** 0.5 + 1
    low = sample[int(rank - slack)] if rank > slack else -np.inf
    high = sample[int(rank + slack)] if rank + slack < sample.size else np.inf

    below, middle = _collect_between(read, low, high)
    k = keep - (total - below)
    if 0 < k <= middle.size:
        return _kth_largest(middle, k)
    return high if k <= 0 else low


def _collect_between(read: Read, low: Any, high: Any) -> tuple[int, Array]:
    """Return the number of values below `high`, and those of them above `low`; NaN counts as above."""
    below, inside = 0, []
    room = np.empty(0, np.float32)
    for chunk, _ in read():
        if room.size < chunk.size:
            room = np.empty(chunk.size, np.float32)
        found = step.collect_between(chunk, low, high, room)
        if found is not None:
            inside.append(room[: found[0]].copy())
            below += found[1]
            continue
        under = chunk < high  # false for NaN, which counts as above
        below += int(np.count_nonzero(under))
        inside.append(chunk[under > (chunk <= low)])
    return below, np.concatenate(inside)


def _mark(read: Read, threshold: Any, keep: int) -> bool:
    """Mark all entries above the threshold and the first ties; return whether these are `keep` entries."""
    is_nan = np.isnan(threshold)  # if so nothing is above the threshold, and the NaNs are the ties
    remaining = keep
    for chunk, mask in read():
        marked = None if is_nan else step.mark_above(chunk, threshold, mask)
        if marked is None:
            np.logical_not(np.less_equal(chunk, threshold, out=mask), out=mask)
            if is_nan:
                mask[:] = False
            marked = int(np.count_nonzero(mask))
        remaining -= marked
    if remaining <= 0:
        return remaining == 0
    for chunk, mask in read():
        ties = np.flatnonzero(np.isnan(chunk) if is_nan else chunk == threshold)[:remaining]
        mask[ties] = True
        remaining -= ties.size
        if remaining <= 0:
            break
    return remaining == 0


def _select_by_rank(keys: Array, keep: int, mask: Array) -> None:
    """Write the mask of short rows: the rank of an entry is the number of entries of its row that precede it."""
    columns = np.ascontiguousarray(keys.T)
    rank = np.empty(columns.shape, np.uint8)
    rank[:] = np.arange(len(columns), dtype=np.uint8)[:, None]  # first assume that each entry precedes all later ones
    for i in range(len(columns) - 1):
        wins = (columns[i + 1 :] > columns[i]).view(np.uint8)
        rank[i + 1 :] -= wins
        rank[i] += np.add.reduce(wins, axis=0, dtype=np.uint8)
    np.less(rank.T, keep, out=mask)


def _select_by_partition(keys: Array, keep: int, mask: Array) -> None:
    """Write the mask of long rows: the threshold of each row comes from a partition, and the first ties are kept."""
    kth = keys.shape[1] - keep
    threshold = np.partition(keys, kth, axis=1)[:, kth, None]
    if np.count_nonzero(np.greater_equal(keys, threshold, out=mask)) == keep * len(keys):
        return
    over = np.flatnonzero(mask.sum(axis=1) > keep)
    above, ties = keys[over] > threshold[over], keys[over] == threshold[over]
    remaining = keep - above.sum(axis=1, keepdims=True)
    mask[over] = above | (ties & (ties.cumsum(axis=1) <= remaining))
