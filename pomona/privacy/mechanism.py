"""The noisy top-k of GIP (Yang et al., 2023): index sets drawn around the largest entries.

Of d coordinates m are kept. With I₀ the m largest, a set I that has i others in place of i of them has the
probability e^{−2θi} / ψ(θ), where ψ is the same for every I₀. So one draw is ε-differentially private with
ε = 2θ min(m, d − m), whatever an example does to the gradient; over groups the costs add. What is promised of
the draws is in `pomona.theory.gip`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..errors import require
from ..patterns.selection import select_largest, select_largest_per_row
from ..theory import gip
from .noise import Source

HIGH = 1 << 62  # what sets the keys of the entries outside the top apart


@dataclass(frozen=True)
class IndexMechanism:
    """Keep about the largest entries: `keep` is their share if it is a float, their count if it is an int.

    Given by θ, or by the ε that one draw may cost; θ = 0 draws at random and ∞ is the top-k itself, which is
    not private. With `group` each run of so many entries has a top-k of its own (the authors' 256), all with
    the same θ; the last group may be shorter, and `keep` is then the count of a full one.
    """

    keep: float | int
    theta: float | None = None
    epsilon: float | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        share = isinstance(self.keep, float)
        require(
            0 < self.keep <= 1 if share else self.keep >= 1,
            f"keep is a share in (0, 1] as a float, or a count from 1 as an int, got {self.keep!r}.",
        )
        require(
            (self.theta is None) != (self.epsilon is None),
            "an index mechanism is given by theta or by epsilon, one of the two.",
        )
        for name, value in (("theta", self.theta), ("epsilon", self.epsilon)):
            require(value is None or value >= 0, f"{name} must not be negative, got {value}.")
        require(self.group is None or self.group >= 1, f"a group has 1 entry or more, got {self.group}.")

    @torch.no_grad()
    def sample(self, gradient: Tensor, source: Source | None = None) -> Tensor:
        """A mask of the gradient's shape, true where an entry is kept."""
        source = source or Source(gradient.device)
        scores, masks, start = gradient.abs().flatten(), [], 0
        theta = self.theta_of(scores.numel())
        for rows, size, kept in self.parts(scores.numel()):
            part = scores[start : start + rows * size].view(rows, size)
            masks.append(draw(part, kept, theta, source).flatten())
            start += rows * size
        return (masks[0] if len(masks) == 1 else torch.cat(masks)).view(gradient.shape)

    def parts(self, d: int) -> Iterator[tuple[int, int, int]]:
        """(groups, entries of each, kept of each) for a vector of d: the full groups, and the rest."""
        size = min(self.group or d, d)
        require(d > 0, "there is nothing to choose from: the gradient is empty.")
        share = self.keep if isinstance(self.keep, float) else self.keep / size
        require(share <= 1, f"keep={self.keep} is more than the {size} entries there are: give at most {size}.")
        for rows, entries in ((d // size, size), (1, d % size)):
            if rows and entries:
                yield rows, entries, round(share * entries)

    def groups(self, d: int) -> tuple[list[int], list[int]]:
        """The size of every group and what it keeps, as `theory.gip` takes them."""
        found = [(size, kept) for rows, size, kept in self.parts(d) for _ in range(rows)]
        return [size for size, _ in found], [kept for _, kept in found]

    def reach(self, d: int) -> int:
        """The largest ‖I − I′‖₁: 2 Σ min(m, n − m) over the groups."""
        return sum(rows * gip.sensitivity(size, kept) for rows, size, kept in self.parts(d))

    def theta_of(self, d: int) -> float:
        """θ for a vector of d entries; ∞ where there is only one set, which costs nothing."""
        if self.epsilon is None:
            return self.theta or 0.0
        reach = self.reach(d)
        return self.epsilon / reach if reach else math.inf

    def cost(self, d: int) -> float:
        """The pure ε of one draw from d entries: 2θ Σ min(m, n − m) over the groups."""
        reach = self.reach(d)
        return self.theta_of(d) * reach if reach else 0.0

    def lost(self, d: int) -> float:
        """E[i] / m, the share of the true top-k that a draw loses; 1 − m/d is what random sets lose."""
        theta, parts = self.theta_of(d), list(self.parts(d))
        swapped = sum(rows * gip.expected_swaps(theta, size, kept) for rows, size, kept in parts)
        return swapped / max(sum(rows * kept for rows, _, kept in parts), 1)


def draw(scores: Tensor, kept: int, theta: float, source: Source) -> Tensor:
    """One set for each row of scores."""
    rows, size = scores.shape
    top = select_largest([scores], kept)[0] if rows == 1 else select_largest_per_row(scores, kept)
    if kept in (0, size) or math.isinf(theta):
        return top
    return swap(top, kept, count(theta, size, kept, rows, source), source)


def count(theta: float, size: int, kept: int, rows: int, source: Source) -> Tensor:
    """How many entries each row exchanges: i with the probability P(i), by inversion."""
    start, levels = cumulative(theta, size, kept)
    edges = torch.from_numpy(levels).to(source.device)
    return start + torch.searchsorted(edges, source.uniform(rows), right=True)


@lru_cache(maxsize=8)
def cumulative(theta: float, size: int, kept: int) -> tuple[int, np.ndarray]:
    """Where the distribution of i begins, and P(i ≤ start + k); the last, which is 1, is left out."""
    swaps = gip.swaps(theta, size, kept)
    return swaps.start, np.cumsum(swaps.p)[:-1]


def swap(top: Tensor, kept: int, swapped: Tensor, source: Source) -> Tensor:
    """Exchange `swapped` entries of each row of the mask, drawn at random.

    In the order of random keys, those of the top before the others, what stays are the places from `swapped` to
    `kept + swapped`. Keys of 62 bits do not tie.
    """
    keys = source.bits(*top.shape).bitwise_right_shift_(1).add_(~top, alpha=HIGH)
    first, last = ordered(keys, torch.stack([swapped, kept + swapped - 1], 1)).unbind(1)
    return (keys >= first[:, None]) & (keys <= last[:, None])


def ordered(keys: Tensor, places: Tensor) -> Tensor:
    """The keys at the given places of each row, were it sorted; numpy's sort is far quicker than torch's on a CPU."""
    if keys.is_cuda:
        return keys.sort(dim=1).values.gather(1, places)
    rows, wanted = keys.numpy(), places.numpy()
    found = np.partition(rows, wanted[0], axis=1) if len(rows) == 1 else np.sort(rows, axis=1)
    return torch.from_numpy(np.take_along_axis(found, wanted, 1))
