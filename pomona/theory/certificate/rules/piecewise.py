"""Rules for piecewise linear functions of one number: ReLU, leaky and parametric ReLU, clamp, absolute value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..intervals import EPS, Interval, PairBounds
from ..linear_form import Form, Lines, Substitution, substitute_elementwise
from ..steps import DENSE, PRUNED, Step, Value, Weight
from .calls import call, side_weights
from .registry import Rule, register, unsupported
from .relu_pair import pair_lines


@dataclass(frozen=True)
class Pieces:
    """A function of one number with these slopes between and outside of its knots, which increase."""

    knots: list[float]
    slopes: list[Tensor]
    function: Callable[[Tensor], Tensor]

    @property
    def is_exact(self) -> bool:
        """Whether the function is computed without rounding: its slopes are 0 or ±1."""
        return all(bool(is_trivial(slope).all()) for slope in self.slopes)

    @property
    def steepest(self) -> Tensor:
        """The largest absolute slope."""
        return torch.stack([slope.abs().amax() for slope in self.slopes]).amax()

    def slope_range(self, x: Interval) -> Interval:
        """Return the least and the largest slope on an interval."""
        ends = [-torch.inf, *self.knots, torch.inf]
        low, high = torch.full_like(x.low, torch.inf), torch.full_like(x.low, -torch.inf)
        for start, end, slope in zip(ends[:-1], ends[1:], self.slopes, strict=True):
            touched = (x.high > start) & (x.low < end)
            low = torch.where(touched, torch.minimum(low, slope), low)
            high = torch.where(touched, torch.maximum(high, slope), high)
        # An interval that is one of the knots has no slope, and a gap of zero: any slope is right.
        alone = low > high
        return Interval(torch.where(alone, self.slopes[0], low), torch.where(alone, self.slopes[0], high))

    def candidates(self, x: Interval) -> Tensor:
        """Return the points of each interval where the function less a line can be largest or smallest."""
        knots = [torch.minimum(torch.maximum(x.low, torch.full_like(x.low, knot)), x.high) for knot in self.knots]
        return torch.stack([x.low, x.high, *knots])

    def range(self, x: Interval) -> Interval:
        """Return the interval of the function's values."""
        values = self.function(self.candidates(x))
        result = Interval(values.amin(0), values.amax(0))
        return result if self.is_exact else result.widen_by(EPS * values.abs().amax(0))

    def lines(self, x: Interval) -> Lines:
        """Return the chord as one line, and a line that touches the function as the other."""
        points = self.candidates(x)
        values = self.function(points)
        width = x.high - x.low
        slopes = self.slope_range(x)
        chord = (values[1] - values[0]) / torch.where(width > 0, width, torch.ones_like(width))
        chord = torch.minimum(torch.maximum(torch.where(width > 0, chord, slopes.low), slopes.low), slopes.high)
        # Under a function of one convex kink, the line along the longer piece has the smallest area.
        convex = len(self.knots) == 1 and bool((self.slopes[0] <= self.slopes[1]).all())
        longer = torch.where(x.high > -x.low, slopes.high, slopes.low)
        exact = self.is_exact and len(self.knots) < 2
        return touching_lines(points, values, longer if convex else chord, chord, torch.tensor(exact))


def touching_lines(points: Tensor, values: Tensor, low_slope: Tensor, high_slope: Tensor, exact: Tensor) -> Lines:
    """Return lines of these slopes that touch a function from below and from above at some of the points.

    `exact` says where the values are not rounded, and are 0 or ± the points.
    """
    low = (values - low_slope * points).amin(0) - touching_margin(points, values, low_slope, exact)
    high = (values - high_slope * points).amax(0) + touching_margin(points, values, high_slope, exact)
    return Lines(low_slope, low, high_slope, high)


def touching_margin(points: Tensor, values: Tensor, slope: Tensor, exact: Tensor) -> Tensor:
    """Return a margin for the rounding of values − slope · points, which exact values need not for slopes 0 and 1."""
    margin = 4 * EPS * (values.abs() + slope.abs() * points.abs()).amax(0)
    return torch.where(exact & ((slope == 0) | (slope == 1)), torch.zeros_like(margin), margin)


def gap_range(gap: Interval, slopes: Interval) -> Interval:
    """Return the interval of slope · gap."""
    products = torch.stack([s * d for s in (slopes.low, slopes.high) for d in (gap.low, gap.high)])
    result = Interval(products.amin(0), products.amax(0))
    exact = is_trivial(slopes.low) & is_trivial(slopes.high)
    return result.widen_by(torch.where(exact, torch.zeros_like(result.low), EPS * result.magnitude))


def is_trivial(slope: Tensor) -> Tensor:
    """Return where a slope is 0 or ±1, so that products with it are exact."""
    return (slope == 0) | (slope.abs() == 1)


def gap_lines(gap: Interval, slopes: Interval) -> Lines:
    """Return lines around the gap after a function over the gap before it, from the range of the function's slopes."""
    points = torch.stack([gap.low, gap.high, torch.zeros_like(gap.low).clamp(min=gap.low, max=gap.high)])
    width = gap.high - gap.low
    inside = (gap.low < 0) & (gap.high > 0)
    width = torch.where(inside, width, torch.ones_like(width))
    high_chord = (slopes.high * gap.high - slopes.low * gap.low) / width
    low_chord = (slopes.low * gap.high - slopes.high * gap.low) / width
    high_slope = torch.where(inside, high_chord, torch.where(gap.low >= 0, slopes.high, slopes.low))
    low_slope = torch.where(inside, low_chord, torch.where(gap.low >= 0, slopes.low, slopes.high))
    products = torch.stack([slopes.low * points, slopes.high * points])
    exact = is_trivial(slopes.low) & is_trivial(slopes.high)
    below = touching_lines(points, products.amin(0), low_slope, low_slope, exact)
    above = touching_lines(points, products.amax(0), high_slope, high_slope, exact)
    return Lines(low_slope, below.low_constant, high_slope, above.high_constant)


def pieces_of(step: Step, like: Tensor, side: int) -> Pieces:
    """Return the function of a step in one network."""

    def function(x: Tensor) -> Tensor:
        return call(step, [x], side_weights(step, side))

    def pieces(knots: list[float], slopes: list[float]) -> Pieces:
        return Pieces(knots, [torch.tensor(s, dtype=torch.float64) for s in slopes], function)

    if step.op == "relu":
        return pieces([0.0], [0.0, 1.0])
    if step.op == "abs":
        return pieces([0.0], [-1.0, 1.0])
    if step.op == "relu6":
        return pieces([0.0, 6.0], [0.0, 1.0, 0.0])
    if step.op == "leaky_relu":
        return pieces([0.0], [float(argument(step, 1, "negative_slope", 0.01)), 1.0])
    if step.op == "prelu":
        return parametric_relu(step, like, side)
    return clamp_pieces(step, pieces)


def clamp_pieces(step: Step, pieces: Callable[[list[float], list[float]], Pieces]) -> Pieces:
    """Return hardtanh or clamp, with one bound or two."""
    low, high = (-1.0, 1.0) if step.op == "hardtanh" else (None, None)
    low = argument(step, 1, "min_val" if step.op == "hardtanh" else "min", low)
    high = argument(step, 2 if step.op != "clamp_max" else 1, "max_val" if step.op == "hardtanh" else "max", high)
    if step.op == "clamp_max":
        low = None
    if isinstance(low, (Weight, Value)) or isinstance(high, (Weight, Value)):
        raise unsupported(step, "its limits are tensors")
    if low is not None and high is not None and low >= high:
        return pieces([], [0.0])
    knots = [float(knot) for knot in (low, high) if knot is not None]
    return pieces(knots, [*([0.0] if low is not None else []), 1.0, *([0.0] if high is not None else [])])


def parametric_relu(step: Step, like: Tensor, side: int) -> Pieces:
    """Return a parametric ReLU, with a slope of each channel or one of all."""
    weight = step.args[1]
    if not isinstance(weight, Weight):
        raise unsupported(step, "the slope depends on the input")
    slope = weight.of(side)
    slope = slope.view(-1, *[1] * (like.ndim - 2)) if slope.numel() > 1 else slope.reshape(())
    return Pieces([0.0], [slope, torch.ones_like(slope)], lambda x: torch.where(x < 0, slope * x, x))


def argument(step: Step, position: int, name: str, default: Any) -> Any:
    """Return an argument of a step by its position or its name."""
    return step.args[position] if len(step.args) > position else step.kwargs.get(name, default)


def slopes_and_pieces(step: Step, x: PairBounds) -> tuple[Interval, Pieces, Pieces]:
    """Return the range of the dense function's slopes over both networks' values, and both functions."""
    dense, pruned = (pieces_of(step, x.gap.low, side) for side in (DENSE, PRUNED))
    return dense.slope_range(x.hull), dense, pruned


def same_function(step: Step) -> bool:
    """Return whether both networks have the same function."""
    return all(torch.equal(weight.dense, weight.pruned) for weight in step.weights)


def piecewise_bounds(step: Step, inputs: list[PairBounds]) -> PairBounds:
    """Return the bounds of a piecewise linear function."""
    (x,) = inputs
    slopes, dense, pruned = slopes_and_pieces(step, x)
    sides = dense.range(x.dense), pruned.range(x.pruned)
    gap = gap_range(x.gap, slopes) if same_function(step) else sides[0] - sides[1]
    return PairBounds(*sides, gap).tighten()


def piecewise_relax(step: Step, inputs: list[PairBounds]) -> tuple[Lines, Lines, Lines]:
    """Return lines around the function of each network and around the gap."""
    (x,) = inputs
    slopes, dense, pruned = slopes_and_pieces(step, x)
    if same_function(step):
        gap = gap_lines(x.gap, slopes)
    else:
        after = piecewise_bounds(step, inputs).gap
        gap = Lines(torch.zeros_like(after.low), after.low, torch.zeros_like(after.low), after.high)
    sides = dense.lines(x.dense), pruned.lines(x.pruned)
    if same_function(step) and dense.knots == [0.0]:
        gap = pair_lines(x, dense.function, dense.steepest, *sides, gap)
    return *sides, gap


def piecewise_substitute(
    step: Step, form: Form, inputs: list[PairBounds], around: tuple[Lines, Lines, Lines]
) -> Substitution:
    """Return an upper bound of forms on a piecewise linear function from lines around it."""
    return substitute_elementwise(form, inputs[0], *around)


def open_entries(step: Step, x: PairBounds) -> Tensor:
    """Return where the values of a network lie on more than one piece."""
    dense, pruned = (pieces_of(step, x.gap.low, side) for side in (DENSE, PRUNED))
    slopes = dense.slope_range(x.dense), pruned.slope_range(x.pruned)
    return (slopes[0].low < slopes[0].high) | (slopes[1].low < slopes[1].high)


PIECEWISE = Rule(
    piecewise_bounds, open_entries=open_entries, relax=piecewise_relax, substitute_relaxed=piecewise_substitute
)
register(PIECEWISE, "relu", "relu6", "leaky_relu", "prelu", "hardtanh", "clamp", "clamp_min", "clamp_max", "abs")
