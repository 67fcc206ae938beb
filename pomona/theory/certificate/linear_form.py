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
    """Two lines around a function z ↦ g(z) of one number on an interval, for each entry of a tensor."""

    low_slope: Tensor
    low_constant: Tensor
    high_slope: Tensor
    high_constant: Tensor

    def error(self, interval: Interval) -> Tensor:
        """Return the distance of the lines in the middle of an interval."""
        slope, constant = self.high_slope - self.low_slope, self.high_constant - self.low_constant
        return slope * interval.centre + constant

    def above(self, coefficient: Tensor) -> tuple[Tensor, Tensor]:
        """Return slope and constant of a line above coefficient · g."""
        positive, negative = coefficient.clamp(min=0), coefficient.clamp(max=0)
        slope = positive * self.high_slope + negative * self.low_slope
        return slope, positive * self.high_constant + negative * self.low_constant


for data in (Form, Substitution, Lines):
    register_dataclass(data)


def row_sums(x: Tensor) -> Tensor:
    """Return the sum of each row."""
    return x.flatten(1).sum(1)


def rounding(form: Form, bounds: PairBounds, terms: int) -> Tensor:
    """Return a margin for forms whose coefficients have a relative error of `terms` roundings, on values in bounds."""
    reach = form.gap.abs() * bounds.gap.magnitude + form.pruned.abs() * bounds.pruned.magnitude
    return 2 * (terms + reach[0].numel()) * EPS * row_sums(reach)


def largest_value(form: Form, bounds: PairBounds) -> Tensor:
    """Return an upper bound of forms from the intervals of the value."""
    dense_basis = form.gap, form.pruned - form.gap  # coefficients of dense and pruned
    mixed_basis = form.pruned, form.gap - form.pruned  # coefficients of dense and gap
    above = largest(form.gap, bounds.gap) + largest(form.pruned, bounds.pruned)
    above = torch.minimum(above, largest(dense_basis[0], bounds.dense) + largest(dense_basis[1], bounds.pruned))
    above = torch.minimum(above, largest(mixed_basis[0], bounds.dense) + largest(mixed_basis[1], bounds.gap))
    return row_sums(above) + rounding(form, bounds, 4)


def largest(coefficient: Tensor, interval: Interval) -> Tensor:
    """Return the largest coefficient · value for each entry."""
    return coefficient.clamp(min=0) * interval.high + coefficient.clamp(max=0) * interval.low


def substitute_elementwise(form: Form, bounds: PairBounds, dense: Lines, pruned: Lines, gap: Lines) -> Substitution:
    """Return an upper bound of forms on an elementwise function from lines in its input, whose bounds are given.

    A form c·gap + d·pruned of the function's result is also c·dense + (d − c)·pruned and d·dense + (c − d)·gap. For
    each entry the pair with the smallest error is bounded, each of the two by its line: `dense` and `pruned` are the
    lines of the function, `gap` are lines of the gap after it over the gap before it.
    """
    c, d = form.gap, form.pruned
    errors = dense.error(bounds.dense), pruned.error(bounds.pruned), gap.error(bounds.gap)
    costs = torch.stack([
        c.abs() * errors[2] + d.abs() * errors[1],
        c.abs() * errors[0] + (d - c).abs() * errors[1],
        d.abs() * errors[0] + (c - d).abs() * errors[2],
    ])  # fmt: skip
    choice = costs.argmin(0)
    zero = torch.zeros_like(c)
    on_dense = torch.where(choice == 1, c, torch.where(choice == 2, d, zero))
    on_pruned = torch.where(choice == 0, d, torch.where(choice == 1, d - c, zero))
    on_gap = torch.where(choice == 0, c, torch.where(choice == 2, c - d, zero))
    above = [dense.above(on_dense), pruned.above(on_pruned), gap.above(on_gap)]
    slopes, constants = [slope for slope, _ in above], [constant for _, constant in above]
    # dense = pruned + gap in the input, too
    result = Form(slopes[2] + slopes[0], slopes[1] + slopes[0])
    total = constants[0] + constants[1] + constants[2]
    reach = constants[0].abs() + constants[1].abs() + constants[2].abs()
    absolute = [slope.abs() for slope in slopes]
    slack = rounding(Form(absolute[2] + absolute[0], absolute[1] + absolute[0]), bounds, 8)
    return Substitution([result], row_sums(total) + slack + 2 * reach[0].numel() * EPS * row_sums(reach))
