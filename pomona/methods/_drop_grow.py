"""What the growing methods share: drop some weights of a layer, grow as many elsewhere, to the count."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import PomonaError, require
from ..patterns import Pattern, Unstructured


def drop(pattern: Pattern, score: Tensor, mask: Tensor, count: int) -> Tensor:
    """The mask without the `count` active entries of the lowest score, or as near to it as the pattern can.

    Where a pattern counts by blocks any entries may go: `grow` fills the blocks up again.
    """
    chooser = pattern if pattern.ranks_units else Unstructured()
    pruned = mask.numel() - int(mask.sum()) + count
    return chooser.select_masks([score.masked_fill(~mask, -torch.inf)], pruned / mask.numel())[0] & mask


def grow(pattern: Pattern, score: Tensor, mask: Tensor, active: int) -> Tensor:
    """The mask with the highest-scored entries added until `active` are on; −inf is not eligible."""
    # A row that was filled up counts more blocks than it has weights for.
    return pattern.select_masks([score.masked_fill(mask, torch.inf)], max(1 - active / mask.numel(), 0.0))[0]


def part(share: float, count: int) -> int:
    """⌊share · count⌋, where 0.29 of 100 is 29 and not 28.999…"""
    return int(share * count + 1e-9)


def refuse_filters(pattern: Pattern, name: str) -> None:
    """Refuse patterns of whole outputs, which cannot grow."""
    require(
        not pattern.removes_outputs,
        f"{name} grows weights from zero, and a filter of zeros behind a ReLU never learns: use snip, incremental, "
        "sfp or dpf with filters, or another pattern.",
    )


def share_out(
    total: int,
    weights: Mapping[str, float],
    room: Mapping[str, int],
    quantum: Mapping[str, int] | None = None,
    base: Mapping[str, int] | None = None,
    evenly: bool = False,
) -> dict[str, int]:
    """Divide `total` in proportion to `weights`, nobody above their `room`, to the last unit.

    What some cannot take goes to the others, in proportion or `evenly`. With what they have (`base`) everyone
    ends at a whole multiple of their `quantum`, by largest remainder, the earlier name first where two are alike.
    """
    if total > sum(room.values()):
        raise PomonaError(f"{total} weights are to grow and there is room for {sum(room.values())}: prune more.")
    have = {name: 0 if base is None else base[name] for name in weights}
    step = {name: 1 if quantum is None else quantum[name] for name in weights}
    ideal = {name: have[name] + value for name, value in fill(total, weights, room, evenly).items()}
    ends = {
        name: max(int((ideal[name] + 1e-9) // step[name]), -(-have[name] // step[name])) * step[name] for name in ideal
    }
    goal = total + sum(have.values())

    def surplus(name: str) -> float:
        return (ends[name] - ideal[name]) / step[name]

    while True:
        left = goal - sum(ends.values())
        up = [n for n in ends if ends[n] + step[n] <= have[n] + room[n] and step[n] < 2 * left]
        down = [n for n in ends if ends[n] - step[n] >= have[n] and step[n] < -2 * left]
        if up:
            best = min([n for n in up if step[n] <= left] or up, key=surplus)
            ends[best] += step[best]
        elif down:
            best = max([n for n in down if step[n] <= -left] or down, key=surplus)
            ends[best] -= step[best]
        else:
            return {name: ends[name] - have[name] for name in ends}


def fill(total: int, weights: Mapping[str, float], room: Mapping[str, int], evenly: bool) -> dict[str, float]:
    """`total` in proportion to `weights`, where those that are full pass their surplus on."""
    whole = sum(weights.values())
    share = {name: weight / whole if whole > 0 else 1 / len(weights) for name, weight in weights.items()}
    full: set[str] = set()
    while True:
        rest = [name for name in weights if name not in full]
        left = total - sum(room[name] for name in full)
        if evenly:
            extra = (left - sum(share[name] * total for name in rest)) / max(len(rest), 1)
            offers = {name: share[name] * total + extra for name in rest}
        else:
            part = sum(share[name] for name in rest)
            offers = {name: left * (share[name] / part if part > 0 else 1 / len(rest)) for name in rest}
        over = {name for name in rest if offers[name] > room[name]}
        if not over:
            return {name: float(room[name]) if name in full else offers[name] for name in weights}
        full |= over


def quanta(pattern: Pattern, masks: Mapping[str, Tensor]) -> dict[str, int]:
    """How many weights of each layer come or go together."""
    return {name: pattern.unit_size(mask.shape) for name, mask in masks.items()}
