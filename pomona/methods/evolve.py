"""What the growing methods share: drop some weights of a layer, grow as many elsewhere, to the count."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..core.errors import PomonaError
from ..core.method import Targets
from ..patterns import Pattern


def drop(pattern: Pattern, score: Tensor, mask: Tensor, count: int) -> Tensor:
    """The mask without the `count` active entries of the lowest score, or as near to it as the pattern can."""
    pruned = mask.numel() - int(mask.sum()) + count
    return pattern.masks([score.masked_fill(~mask, -torch.inf)], pruned / mask.numel())[0]


def grow(pattern: Pattern, score: Tensor, mask: Tensor, active: int) -> Tensor:
    """The mask with the highest-scored entries added until `active` are on; −inf is not eligible."""
    return pattern.masks([score.masked_fill(mask, torch.inf)], 1 - active / mask.numel())[0]


def forget(targets: Targets, name: str, entries: Tensor) -> None:
    """Start these weights anew: zero, with no momentum."""
    targets.latent[name].masked_fill_(entries, 0)
    if name in targets.momentum:
        targets.momentum[name].masked_fill_(entries, 0)


def share_out(
    total: int, weights: Mapping[str, float], room: Mapping[str, int], quantum: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Divide `total` in proportion to `weights`, nobody above their `room`, to the last unit.

    What one cannot take is offered to the others in the same proportion. Everyone takes whole multiples
    of their `quantum`, by largest remainder, the earlier name first where two are alike.
    """
    if total > sum(room.values()):
        raise PomonaError(f"{total} weights are to grow and there is room for {sum(room.values())}: prune more.")
    ideal = water_fill(total, weights, room)
    step = {name: 1 if quantum is None else quantum[name] for name in weights}
    counts = {name: int((value + 1e-9) // step[name]) * step[name] for name, value in ideal.items()}
    while True:
        left = total - sum(counts.values())
        # One more step helps where it brings the sum nearer.
        helps = [n for n in counts if step[n] < 2 * left and counts[n] + step[n] <= room[n]]
        if not helps:
            return counts
        best = max(helps, key=lambda name: (ideal[name] - counts[name]) / step[name])
        counts[best] += step[best]


def water_fill(total: int, weights: Mapping[str, float], room: Mapping[str, int]) -> dict[str, float]:
    """`total` in proportion to `weights`, where those that are full pass their surplus on."""
    given = dict.fromkeys(weights, 0.0)
    open_ = [name for name in weights if room[name] > 0]
    while open_:
        left = total - sum(given[name] for name in weights if name not in open_)
        whole = sum(weights[name] for name in open_)
        offers = {name: left * (weights[name] / whole if whole > 0 else 1 / len(open_)) for name in open_}
        full = [name for name in open_ if offers[name] > room[name]]
        given |= {name: float(room[name]) for name in full} if full else offers
        open_ = [name for name in open_ if name not in full] if full else []
    return given


def quanta(pattern: Pattern, masks: Mapping[str, Tensor]) -> dict[str, int]:
    """How many weights of each layer come or go together."""
    return {name: pattern.quantum(mask.shape) for name, mask in masks.items()}
