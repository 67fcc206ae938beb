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


def share_out(total: int, weights: Mapping[str, float], room: Mapping[str, int]) -> dict[str, int]:
    """Divide `total` in proportion to `weights`, nobody above their `room`, to the last unit.

    What one cannot take is offered to the others in the same proportion; whole numbers are made by
    largest remainder, the earlier name first where two are alike.
    """
    if total > sum(room.values()):
        raise PomonaError(
            f"{total} weights are to grow and there is room for {sum(room.values())}: lower the sparsity."
        )
    given = dict.fromkeys(weights, 0.0)
    open_ = [name for name in weights if room[name] > 0]
    left = float(total)
    while left > 1e-9 and open_:
        whole = sum(weights[name] for name in open_)
        offers = {name: left * (weights[name] / whole if whole > 0 else 1 / len(open_)) for name in open_}
        full = [name for name in open_ if given[name] + offers[name] >= room[name]]
        for name in full or open_:
            given[name] = float(room[name]) if full else given[name] + offers[name]
        left = total - sum(given.values())
        open_ = [name for name in open_ if name not in full] if full else []
    counts = {name: int(value + 1e-9) for name, value in given.items()}
    order = sorted(weights, key=lambda name: given[name] - counts[name], reverse=True)
    for name in order * (total + 1):
        if sum(counts.values()) == total:
            break
        counts[name] += counts[name] < room[name]
    return counts
