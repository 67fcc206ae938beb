"""Functions of one number as pieces with known turning points: exact ranges of value and slope, and lines around them.

Every range is that of the mathematical function, widened by a margin for the rounding of its evaluation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..intervals import EPS, Interval, PairBounds
from ..linear_form import Lines
from . import piecewise

ROUNDINGS = 64  # bound of the error of one evaluation, in EPS · (1 + |x| + |result|)
BISECTIONS = 22  # the offset of a line is then exact up to 2⁻⁴⁴ of the curvature


class RangedFunction(Protocol):
    """A function of one number with known ranges."""

    def range(self, x: Interval) -> Interval:
        """Return the smallest and the largest value on an interval."""

    def slopes(self, x: Interval) -> Interval:
        """Return the smallest and the largest slope on an interval."""

    def jumps(self, x: Interval) -> Tensor:
        """Return the sum of the sizes of the jumps on an interval."""

    def lines(self, x: Interval) -> Lines:
        """Return a line below and a line above the function on an interval."""


@dataclass(frozen=True)
class Piece:
    """A smooth function on start ≤ x ≤ end, with its slope.

    `turns` are the points where its slope changes sign, `bends` those where its second derivative does.
    """

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    turns: tuple[float, ...] = ()
    bends: tuple[float, ...] = ()
    start: float = -math.inf
    end: float = math.inf

    def segments(self) -> Iterator[tuple[float, float]]:
        """Yield the parts on which the slope is monotone."""
        points = (self.start, *self.bends, self.end)
        yield from itertools.pairwise(points)


@dataclass(frozen=True)
class ScalarFunction:
    """A function of one number in pieces from left to right; outside of them it is not defined.

    Neighbouring pieces may have different slopes where they meet, and values that differ by `jump`. At `poles` the
    function is infinite.
    """

    pieces: tuple[Piece, ...]
    poles: tuple[float, ...] = ()
    jump: float = 0.0

    def range(self, x: Interval) -> Interval:
        """Return the smallest and the largest value on an interval; infinite where it leaves the domain."""
        return self._hull(x, lambda piece: piece.value, lambda piece: piece.turns)

    def slopes(self, x: Interval) -> Interval:
        """Return the smallest and the largest slope on an interval; infinite where it leaves the domain."""
        return self._hull(x, lambda piece: piece.slope, lambda piece: piece.bends)

    def _hull(
        self,
        x: Interval,
        function: Callable[[Piece], Callable[[Tensor], Tensor]],
        extrema: Callable[[Piece], tuple[float, ...]],
    ) -> Interval:
        """Return the range of the pieces' functions, each of which is monotone between its extrema."""
        low, high = torch.full_like(x.low, math.inf), torch.full_like(x.low, -math.inf)
        for piece in self.pieces:
            part = restrict(x, piece.start, piece.end)
            points = [part.low, part.high, *(part.low.clamp(min=e).minimum(part.high) for e in extrema(piece))]
            values = torch.stack([function(piece)(point) for point in points])
            touched = touches(x, piece.start, piece.end)
            low = torch.where(touched, torch.minimum(low, values.amin(0)), low)
            high = torch.where(touched, torch.maximum(high, values.amax(0)), high)
        return self.unbounded_outside(x, widen(Interval(low, high), x))

    def unbounded_outside(self, x: Interval, result: Interval) -> Interval:
        """Return the result, or all numbers where x leaves the domain or contains a pole."""
        outside = (x.low < self.pieces[0].start) | (x.high > self.pieces[-1].end)
        for pole in self.poles:
            outside = outside | ((x.low <= pole) & (x.high >= pole))
        return Interval(torch.where(outside, -math.inf, result.low), torch.where(outside, math.inf, result.high))

    def jumps(self, x: Interval) -> Tensor:
        """Return the sum of the sizes of the jumps on an interval."""
        total = torch.zeros_like(x.low)
        for piece in self.pieces[1:] if self.jump else ():
            total = torch.where(touches(x, piece.start, piece.start), total + self.jump, total)
        return total

    def offsets(self, x: Interval, slope: Tensor) -> Interval:
        """Return the smallest and the largest value(x) − slope · x on an interval, for any slopes.

        On a segment the value is convex or concave, so that the extrema are at its ends or where the slopes are equal,
        which bisection encloses: there the value is less than width · |difference of slopes| away.
        """
        low, high = torch.full_like(slope, math.inf), torch.full_like(slope, -math.inf)
        for piece in self.pieces:
            for start, end in piece.segments():
                part = restrict(x, start, end)
                ends = torch.stack(
                    [piece.value(part.low) - slope * part.low, piece.value(part.high) - slope * part.high]
                )
                a, b = bisect(lambda z, piece=piece: piece.slope(z) - slope, part, slope)  # type: ignore[misc]
                slack = (b - a) * torch.maximum((piece.slope(a) - slope).abs(), (piece.slope(b) - slope).abs())
                middle = piece.value(a) - slope * a
                crosses = (piece.slope(part.low) - slope) * (piece.slope(part.high) - slope) < 0
                touched = touches(x, start, end)
                least = torch.where(crosses, torch.minimum(ends.amin(0), middle - slack), ends.amin(0))
                most = torch.where(crosses, torch.maximum(ends.amax(0), middle + slack), ends.amax(0))
                low = torch.where(touched, torch.minimum(low, least), low)
                high = torch.where(touched, torch.maximum(high, most), high)
        margin = ROUNDINGS * EPS * (1 + (1 + slope.abs()) * x.magnitude + low.abs() + high.abs())
        return self.unbounded_outside(x, finite_or_infinite(Interval(low - margin, high + margin)))

    def lines(self, x: Interval) -> Lines:
        """Return a line below and a line above the function on an interval, each tight in the middle.

        Among the chord and the tangents at both ends and in the middle, the line is the closest one in the middle.
        """
        width = x.high - x.low
        value, slope = pick_piece(self, lambda piece: piece.value), pick_piece(self, lambda piece: piece.slope)
        chord = (value(x.high) - value(x.low)) / torch.where(width > 0, width, 1)
        candidates = torch.stack([chord, slope(x.low), slope(x.high), slope(x.centre)])
        candidates = torch.where(candidates.isfinite(), candidates, 0)
        offsets = self.offsets(x, candidates)
        at_centre = candidates * x.centre
        lowest = (at_centre + offsets.low).argmax(0, keepdim=True)
        highest = (at_centre + offsets.high).argmin(0, keepdim=True)
        rows = (candidates, lowest), (offsets.low, lowest), (candidates, highest), (offsets.high, highest)
        return Lines(*(row.gather(0, choice).squeeze(0) for row, choice in rows))


def touches(x: Interval, start: float, end: float) -> Tensor:
    """Return where an interval meets start … end, or comes as close as the rounding of a comparison."""
    return (x.low <= end + 4 * EPS * abs(end)) & (x.high >= start - 4 * EPS * abs(start))


def restrict(x: Interval, start: float, end: float) -> Interval:
    """Return an interval moved into start … end."""
    return Interval(x.low.clamp(start, end), x.high.clamp(start, end))


def bisect(function: Callable[[Tensor], Tensor], x: Interval, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return a narrow interval around the zero of a monotone function that changes its sign on x."""
    a, b = torch.broadcast_to(x.low, like.shape), torch.broadcast_to(x.high, like.shape)
    rising = function(b) > function(a)
    for _ in range(BISECTIONS):
        middle = (a + b) / 2
        right = (function(middle) < 0) == rising
        a, b = torch.where(right, middle, a), torch.where(right, b, middle)
    return a, b


def widen(values: Interval, x: Interval) -> Interval:
    """Return the range of a function on x with a margin for rounding; infinite where it is not a number."""
    low, high = (ROUNDINGS * EPS * (1 + x.magnitude + end.abs()) for end in (values.low, values.high))
    return finite_or_infinite(Interval(values.low - low, values.high + high))


def finite_or_infinite(x: Interval) -> Interval:
    """Return the interval with ends that are not numbers replaced by infinity."""
    return Interval(
        torch.where(x.low.isnan(), -math.inf, x.low),
        torch.where(x.high.isnan(), math.inf, x.high),
    )


def pick_piece(
    function: ScalarFunction, evaluation: Callable[[Piece], Callable[[Tensor], Tensor]]
) -> Callable[[Tensor], Tensor]:
    """Return the function that evaluates each number by the first piece in which it lies."""

    def evaluate(x: Tensor) -> Tensor:
        result = torch.full_like(x, math.nan)
        for piece in reversed(function.pieces):
            inside = (piece.start <= x) & (x <= piece.end)
            result = torch.where(inside, evaluation(piece)(x.clamp(piece.start, piece.end)), result)
        return result

    return evaluate


def gap_range(function: RangedFunction, hull: Interval, gap: Interval) -> Interval:
    """Return the range of g(a) − g(b) for a and b in an interval, with a − b in `gap`: slope · gap, and jumps."""
    slopes, jump = function.slopes(hull), function.jumps(hull)
    products = torch.stack([exact_zero_product(s, d) for s in (slopes.low, slopes.high) for d in (gap.low, gap.high)])
    result = Interval(products.amin(0), products.amax(0))
    return finite_or_infinite(result.widen_by(4 * EPS * result.magnitude + jump))


def exact_zero_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a · b, with 0 · ∞ = 0."""
    return torch.where((a == 0) | (b == 0), 0, a * b)


def gap_lines(function: RangedFunction, hull: Interval, gap: Interval) -> Lines:
    """Return a line below and a line above g(a) − g(b) over a − b in `gap`, for a and b in an interval."""
    lines, jump = piecewise.gap_lines(gap, function.slopes(hull)), function.jumps(hull)
    return replace(lines, low_constant=lines.low_constant - jump, high_constant=lines.high_constant + jump)


def lines_around(function: RangedFunction, x: PairBounds) -> tuple[Lines, Lines, Lines]:
    """Return lines around a function in the dense and in the pruned network, and around its gap."""
    return function.lines(x.dense), function.lines(x.pruned), gap_lines(function, x.hull, x.gap)
