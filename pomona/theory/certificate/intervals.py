"""Intervals of the values of two networks and of their difference, and the forward pass through a paired graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass

from ...errors import require

EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Interval:
    """The numbers between `low` and `high`, for each entry of a tensor."""

    low: Tensor
    high: Tensor

    @property
    def centre(self) -> Tensor:
        """The middle of each interval."""
        return (self.low + self.high) / 2

    @property
    def radius(self) -> Tensor:
        """Half the width of each interval, rounded up: no point is farther from the computed middle."""
        centre = self.centre
        farthest = torch.maximum(self.high - centre, centre - self.low) * (1 + 2 * EPS)
        return farthest.nan_to_num(nan=torch.inf, posinf=torch.inf)

    @property
    def magnitude(self) -> Tensor:
        """The largest absolute value in each interval."""
        return torch.maximum(self.high, -self.low)

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low)

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.low + other.low, self.high + other.high).widen_by(EPS * (self.magnitude + other.magnitude))

    def __sub__(self, other: Interval) -> Interval:
        return self + (-other)

    def intersect(self, other: Interval) -> Interval:
        """Return the numbers in both intervals."""
        return Interval(torch.maximum(self.low, other.low), torch.minimum(self.high, other.high))

    def hull(self, other: Interval) -> Interval:
        """Return the smallest interval that contains both."""
        return Interval(torch.minimum(self.low, other.low), torch.maximum(self.high, other.high))

    def widen_by(self, margin: Tensor | float) -> Interval:
        """Return the interval with a margin on each side."""
        return Interval(self.low - margin, self.high + margin)

    def map(self, function: Callable[[Tensor], Tensor]) -> Interval:
        """Return the interval with an increasing function applied to both ends."""
        return Interval(function(self.low), function(self.high))


@dataclass(frozen=True)
class PairBounds:
    """Intervals of one value in the dense network, in the pruned one, and of the gap dense − pruned.

    `relaxation` holds what the rule of the step that computes this value needs to substitute linear forms, if any.
    """

    dense: Interval
    pruned: Interval
    gap: Interval
    relaxation: Any = None

    def tighten(self) -> PairBounds:
        """Return the bounds with each interval cut to what the other two allow."""
        gap = self.gap.intersect(self.dense - self.pruned)
        dense = self.dense.intersect(self.pruned + gap)
        pruned = self.pruned.intersect(self.dense - gap)
        return PairBounds(dense, pruned, gap)

    def intersect(self, other: PairBounds) -> PairBounds:
        """Return what both bounds allow."""
        return PairBounds(
            self.dense.intersect(other.dense), self.pruned.intersect(other.pruned), self.gap.intersect(other.gap)
        )

    @property
    def hull(self) -> Interval:
        """The smallest interval that contains the values of both networks."""
        return self.dense.hull(self.pruned)


register_dataclass(Interval)
register_dataclass(PairBounds)


def require_numbers(bounds: PairBounds, name: str) -> None:
    """Raise PomonaError where a bound is not a number."""
    ends = (bounds.dense.low, bounds.dense.high, bounds.pruned.low, bounds.pruned.high, bounds.gap.low, bounds.gap.high)
    require(not any(bool(end.isnan().any()) for end in ends), f"the bounds of '{name}' overflow: use a smaller region.")
