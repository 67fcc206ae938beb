"""Linear forms on a value of two networks, in rows: Σ gap · (dense − pruned) + Σ pruned · pruned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass

from .intervals import EPS, Interval, PairBounds


@dataclass(frozen=True)
class Form:
    """Rows of linear forms on one value: coefficients of its gap and of its pruned side, each rows × shape."""

    gap: Tensor
    pruned: Tensor

    def __add__(self, other: Form) -> Form:
        return Form(self.gap + other.gap, self.pruned + other.pruned)


@dataclass(frozen=True)
class Substitution:
    """An upper bound of forms on a step's result: forms on its inputs, in the order of `step.inputs`, + a constant."""

    forms: list[Form]
    constant: Tensor


@dataclass(frozen=True)
class Lines:
    """Two lines around a function z ↦ g(z) of one number on an interval, for each entry of a tensor.

    Lines around a gap may also have slopes in the pruned network's input, `low_tilt` and `high_tilt`.
    """

    low_slope: Tensor
    low_constant: Tensor
    high_slope: Tensor
    high_constant: Tensor
    low_tilt: Tensor | None = None
    high_tilt: Tensor | None = None

    def error(self, interval: Interval, pruned: Interval | None = None) -> Tensor:
        """Return the distance of the lines in the middle of an interval."""
        slope, constant = self.high_slope - self.low_slope, self.high_constant - self.low_constant
        distance = slope * interval.centre + constant
        if pruned is not None and self.low_tilt is not None and self.high_tilt is not None:
            distance = distance + (self.high_tilt - self.low_tilt) * pruned.centre
        return distance

    def above(self, coefficient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return slope, constant and tilt of a line above coefficient · g."""
        positive = coefficient > 0
        slope = coefficient * torch.where(positive, self.high_slope, self.low_slope)
        constant = row_sums(coefficient * torch.where(positive, self.high_constant, self.low_constant))
        if self.low_tilt is None or self.high_tilt is None:
            return slope, constant, None
        return slope, constant, coefficient * torch.where(positive, self.high_tilt, self.low_tilt)

    def reach(self, magnitude: Tensor) -> Tensor:
        """Return a number above all terms of the lines, on inputs and gaps of this magnitude."""
        slopes = torch.maximum(self.low_slope.abs(), self.high_slope.abs())
        if self.low_tilt is not None and self.high_tilt is not None:
            slopes = slopes + torch.maximum(self.low_tilt.abs(), self.high_tilt.abs())
        return slopes * magnitude + torch.maximum(self.low_constant.abs(), self.high_constant.abs())


for data in (Form, Substitution, Lines):
    register_dataclass(data)


def contract(rows: Tensor, vector: Tensor) -> Tensor:
    """Return Σ row · vector for each row; the vector may have to be broadcast."""
    return as_matrix(rows) @ vector.expand(rows.shape[1:]).flatten()


def row_sums(x: Tensor) -> Tensor:
    """Return the sum of each row."""
    return as_matrix(x).sum(1)


def as_matrix(rows: Tensor) -> Tensor:
    """Return rows of coefficients as a matrix; those on a single number, which has no axes, as one of one column."""
    return rows.reshape(len(rows), -1)


def rounding(form: Form, bounds: PairBounds, terms: int) -> Tensor:
    """Return a margin for forms whose coefficients have a relative error of `terms` roundings, on values in bounds."""
    reach = contract(form.gap.abs(), bounds.gap.magnitude) + contract(form.pruned.abs(), bounds.pruned.magnitude)
    return 2 * (terms + form.gap[0].numel()) * EPS * reach


def largest_value(form: Form, bounds: PairBounds) -> Tensor:
    """Return an upper bound of forms from the intervals of the value."""
    bases = (
        ((form.gap, bounds.gap), (form.pruned, bounds.pruned)),
        ((form.gap, bounds.dense), (form.pruned - form.gap, bounds.pruned)),
        ((form.pruned, bounds.dense), (form.gap - form.pruned, bounds.gap)),
    )
    above = torch.full_like(form.gap, torch.inf)
    for basis in bases:
        reach = sum((c.abs() * interval.magnitude for c, interval in basis), torch.zeros_like(above))
        total = sum((largest(c, interval) for c, interval in basis), torch.zeros_like(above))
        above = torch.minimum(above, total + 4 * EPS * reach)
    return row_sums(above) + 2 * (4 + above[0].numel()) * EPS * row_sums(above.abs())


def largest(coefficient: Tensor, interval: Interval) -> Tensor:
    """Return the largest coefficient · value for each entry."""
    return coefficient.clamp(min=0) * interval.high + coefficient.clamp(max=0) * interval.low


def substitute_elementwise(form: Form, bounds: PairBounds, dense: Lines, pruned: Lines, gap: Lines) -> Substitution:
    """Return an upper bound of forms on an elementwise function from lines in its input, whose bounds are given.

    A form c·gap + d·pruned of the function's result is also (c − d)·gap + d·dense. For each entry the pair with the
    smaller error is bounded, each of the two by its line: `dense` and `pruned` are the lines of the function, `gap` are
    lines of the gap after it over the gap before it.
    """
    c, d = form.gap, form.pruned
    errors = dense.error(bounds.dense), pruned.error(bounds.pruned), gap.error(bounds.gap, bounds.pruned)
    size = d.abs()
    use_dense = (c.abs() - (c - d).abs()) * errors[2] > size * (errors[0] - errors[1])
    on_dense = torch.where(use_dense, d, 0.0)
    on_pruned, on_gap = d - on_dense, c - on_dense
    slopes = [lines.above(x) for lines, x in ((dense, on_dense), (pruned, on_pruned), (gap, on_gap))]
    # dense = pruned + gap in the input, too
    on_input = slopes[1][0] + slopes[0][0]
    result = Form(slopes[2][0] + slopes[0][0], on_input if slopes[2][2] is None else on_input + slopes[2][2])
    magnitude = torch.maximum(bounds.hull.magnitude, bounds.gap.magnitude)
    reach = dense.reach(magnitude) + pruned.reach(magnitude) + gap.reach(magnitude)
    slack = 4 * (c[0].numel() + 8) * EPS * contract(size + c.abs(), reach)
    return Substitution([result], slopes[0][1] + slopes[1][1] + slopes[2][1] + slack)
