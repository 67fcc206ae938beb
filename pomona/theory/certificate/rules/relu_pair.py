"""Planes around the gap of a ReLU on two networks, over what is known of both inputs and of their gap.

The inputs a (dense) and b (pruned) lie in the polygon of a, b and a − b in their intervals. The gap relu(a) − relu(b)
is linear on each part of the polygon cut by the lines a = 0 and b = 0. For slopes of any choice, the smallest plane
above the gap therefore touches it in a corner of such a part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..intervals import EPS, Interval, PairBounds
from ..linear_form import Lines

CORNER_TOLERANCE = 1e-9  # relative; a corner that fails a constraint by less is kept, which is sound


@dataclass(frozen=True)
class Corners:
    """The corners of the parts of the polygon, for each entry: inputs, the gap after the function, and which exist."""

    gap: Tensor
    pruned: Tensor
    after: Tensor
    exist: Tensor
    scale: Tensor
    steepest: Tensor | float

    def constant(self, slope: Tensor, tilt: Tensor, sign: int) -> Tensor:
        """Return the constant of the plane with these slopes that touches the gap from above (1) or below (−1)."""
        rest = sign * (self.after - slope * self.gap - tilt * self.pruned)
        most = torch.where(self.exist, rest, torch.full_like(rest, -torch.inf)).amax(0)
        return sign * (most + 16 * EPS * (1 + self.steepest + slope.abs() + tilt.abs()) * self.scale)


def find_corners(x: PairBounds, function: Callable[[Tensor], Tensor], steepest: Tensor | float = 1.0) -> Corners:
    """Return the corners for a function with a kink at zero, whose slopes have at most this absolute value."""
    zero = torch.zeros_like(x.gap.low)
    dense, pruned = [x.dense.low, x.dense.high, zero], [x.pruned.low, x.pruned.high, zero]
    points = [(a, b) for a in dense for b in pruned]
    points += [(a, a - d) for a in dense for d in (x.gap.low, x.gap.high)]
    points += [(b + d, b) for b in pruned for d in (x.gap.low, x.gap.high)]
    a, b = torch.stack([point[0] for point in points]), torch.stack([point[1] for point in points])
    scale = x.hull.magnitude + x.gap.magnitude
    tolerance = CORNER_TOLERANCE * scale
    exist = inside(a, x.dense, tolerance) & inside(b, x.pruned, tolerance) & inside(a - b, x.gap, tolerance)
    return Corners(a - b, b, function(a) - function(b), exist, scale, steepest)


def inside(points: Tensor, interval: Interval, tolerance: Tensor) -> Tensor:
    """Return which points lie in an interval, up to a tolerance."""
    return (points >= interval.low - tolerance) & (points <= interval.high + tolerance)


def pair_lines(
    x: PairBounds, function: Callable[[Tensor], Tensor], steepest: Tensor, dense: Lines, pruned: Lines, gap: Lines
) -> Lines:
    """Return planes around the gap after a function with a kink at zero; for each entry the lowest in the middle.

    `steepest` is the function's largest absolute slope. `dense`, `pruned` and `gap` are lines around the function of
    each network and around the gap over the gap.
    """
    corners = find_corners(x, function, steepest)
    zero = torch.zeros_like(x.gap.low)
    width = x.pruned.high - x.pruned.low
    share = (x.pruned.high.clamp(min=0) - x.pruned.low.clamp(min=0)) / torch.where(width > 0, width, 1.0)
    rise = x.gap.centre / torch.where(width > 0, width, 1.0)
    rise = torch.where((x.pruned.low < 0) & (x.pruned.high > 0), rise, zero)
    # The gap follows δ where the pruned input is positive, and is zero where it is negative.
    blend = [(share, rise), (share, zero)]
    high = [(gap.high_slope, zero), (dense.high_slope, dense.high_slope - pruned.low_slope), *blend]
    low = [(gap.low_slope, zero), (dense.low_slope, dense.low_slope - pruned.high_slope), *blend]
    above, below = lowest_plane(corners, x, high, 1), lowest_plane(corners, x, low, -1)
    return Lines(below[0], below[2], above[0], above[2], below[1], above[1])


def lowest_plane(
    corners: Corners, x: PairBounds, slopes: list[tuple[Tensor, Tensor]], sign: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return slope, tilt and constant of the candidate that is nearest to the gap in the middle of the intervals."""
    planes = [(slope, tilt, corners.constant(slope, tilt, sign)) for slope, tilt in slopes]
    best = planes[0]
    for plane in planes[1:]:
        nearer = sign * (height(plane, x) - height(best, x)) < 0
        best = tuple(torch.where(nearer, new, old) for new, old in zip(plane, best, strict=True))  # type: ignore[assignment]
    return best


def height(plane: tuple[Tensor, Tensor, Tensor], x: PairBounds) -> Tensor:
    """Return the value of a plane in the middle of the intervals."""
    return plane[0] * x.gap.centre + plane[1] * x.pruned.centre + plane[2]
