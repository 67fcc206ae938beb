"""The base of methods that drop some weights of a layer and grow as many elsewhere, with exact counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..core.method import Masks, Method, Targets
from ..errors import PomonaError, require
from ..masking import fill_pruned
from ..patterns import Pattern, Unstructured
from ..patterns.sharded_selection import select_masks
from ..schedules import Constant, Schedule
from ..scores import random_scores


@dataclass(frozen=True, kw_only=True)
class Regrowing(Method):
    """A hard method whose updates may bring pruned weights back, starting at zero."""

    regrows: ClassVar[bool] = True

    schedule: Schedule = field(default=Constant(), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.pattern.removes_outputs,
            f"{self.name} grows weights from zero, and a filter of zeros behind a ReLU never learns: use snip, "
            "incremental, sfp or dpf with filters, or another pattern.",
        )


@dataclass(frozen=True, kw_only=True)
class DropGrow(Regrowing):
    """A method that begins with a random mask of the final sparsity, and moves its entries."""

    seed: int = 0  # of the first masks and of everything else that is drawn

    def initial_masks(self, targets: Targets, sparsity: float) -> Masks:
        return self.select(targets, random_scores(targets.latent, self.seed), sparsity)

    def require_free_layers(self) -> None:
        """Raise PomonaError for a pattern that fixes every layer's sparsity, where weights move between layers."""
        require(
            self.pattern.sparsity is None,
            f"{self.pattern} fixes every layer's sparsity, and {self.name} moves weights between layers: use another "
            "pattern, or set or rigl.",
        )


def drop_lowest(pattern: Pattern, score: Tensor, mask: Tensor, count: int) -> Tensor:
    """Return the mask without its `count` entries of the lowest score, or as near to that as the pattern allows.

    Where a pattern has the same count in every block any entries may be dropped: `grow_highest` fills the blocks again.
    """
    selector = pattern if pattern.ranks_units else Unstructured()
    pruned = mask.numel() - int(mask.count_nonzero()) + count
    return select_masks(selector, [fill_pruned(score, mask, -torch.inf)], pruned / mask.numel())[0] & mask


def grow_highest(pattern: Pattern, score: Tensor, mask: Tensor, active: int) -> Tensor:
    """Return the mask with the highest-scored entries added until `active` are kept; −inf never grows."""
    # With a padded last block, a full row counts more entries than the layer has weights.
    return select_masks(pattern, [fill_pruned(score, ~mask, torch.inf)], max(1 - active / mask.numel(), 0.0))[0]


def floor_share(share: float, count: int) -> int:
    """Return ⌊share · count⌋, with 0.29 of 100 as 29 and not 28 (of 28.999…)."""
    return int(share * count + 1e-9)


def divide_growth(
    total: int,
    weights: Mapping[str, float],
    room: Mapping[str, int],
    unit_sizes: Mapping[str, int] | None = None,
    active: Mapping[str, int] | None = None,
    evenly: bool = False,
) -> dict[str, int]:
    """Divide `total` new weights between layers in proportion to `weights`, with no layer above its `room`.

    What a full layer cannot take goes to the others, in proportion or `evenly`. Together with its `active` weights
    every layer ends at a multiple of its unit size, by largest remainder; of equal remainders the earlier layer wins.
    """
    if total > sum(room.values()):
        raise PomonaError(f"{total} weights must grow and there is room for {sum(room.values())}: raise the sparsity.")
    have = {name: 0 if active is None else active[name] for name in weights}
    step = {name: 1 if unit_sizes is None else unit_sizes[name] for name in weights}
    ideal = {name: have[name] + value for name, value in divide_fractionally(total, weights, room, evenly).items()}
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


def divide_fractionally(
    total: int, weights: Mapping[str, float], room: Mapping[str, int], evenly: bool
) -> dict[str, float]:
    """Divide `total` in proportion to `weights`, where full layers pass their surplus on."""
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
            whole = sum(share[name] for name in rest)
            offers = {name: left * (share[name] / whole if whole > 0 else 1 / len(rest)) for name in rest}
        over = {name for name in rest if offers[name] > room[name]}
        if not over:
            return {name: float(room[name]) if name in full else offers[name] for name in weights}
        full |= over


def unit_sizes(pattern: Pattern, masks: Mapping[str, Tensor]) -> dict[str, int]:
    """Return how many weights of each layer are kept or pruned together."""
    return {name: pattern.unit_size(mask.shape) for name, mask in masks.items()}
