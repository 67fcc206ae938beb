"""Rules for the larger and the smaller of two tensors: max(a, b) = a + relu(b − a) and min(a, b) = a − relu(a − b)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..intervals import Interval, PairBounds
from ..linear_form import Form, Lines, Substitution, largest_value, rounding, substitute_elementwise
from ..steps import Step, Value, Weight
from .bilinear import sum_to_shape
from .linearised import finite_substitution
from .piecewise import piecewise_relax
from .products import constant_bounds
from .registry import Rule, register

SIGNS = {"maximum": 1, "minimum": -1}


def operands(step: Step, inputs: list[PairBounds]) -> tuple[PairBounds, PairBounds]:
    """Return the bounds of both arguments, of which one may be a constant."""
    remaining = iter(inputs)
    like = inputs[0].gap.low
    first, second = (next(remaining) if isinstance(a, Value) else constant_bounds(a, like) for a in step.args[:2])
    return first, second


def extremum_bounds(step: Step, inputs: list[PairBounds]) -> PairBounds:
    """Return the bounds of an extremum: its gap lies between those of the arguments, or is that of the one it takes."""
    a, b = operands(step, inputs)
    choose = torch.maximum if step.op == "maximum" else torch.minimum
    dense, pruned = (
        Interval(choose(one.low, other.low), choose(one.high, other.high))
        for one, other in ((a.dense, b.dense), (a.pruned, b.pruned))
    )
    either = a.gap.hull(b.gap)
    takes_a, takes_b = always_taken(step, a, b), always_taken(step, b, a)
    low, high = (
        torch.where(takes_a, of_a, torch.where(takes_b, of_b, of_either))
        for of_a, of_b, of_either in (
            (a.gap.low, b.gap.low, either.low),
            (a.gap.high, b.gap.high, either.high),
        )
    )
    return PairBounds(dense, pruned, Interval(low, high)).tighten()


def always_taken(step: Step, one: PairBounds, other: PairBounds) -> Tensor:
    """Return where both networks take the first of two arguments on all inputs."""
    sides = [(one.dense, other.dense), (one.pruned, other.pruned)]
    if step.op == "minimum":
        sides = [(-x, -y) for x, y in sides]
    return torch.stack([x.low >= y.high for x, y in sides]).all(0)


def excess(step: Step, inputs: list[PairBounds]) -> PairBounds:
    """Return the bounds of the number whose ReLU is the distance of the extremum from the first argument."""
    a, b = operands(step, inputs)
    first, second = (a, b) if step.op == "minimum" else (b, a)
    return PairBounds(first.dense - second.dense, first.pruned - second.pruned, first.gap - second.gap).tighten()


def relax(step: Step, inputs: list[PairBounds]) -> tuple[PairBounds, tuple[Lines, Lines, Lines]]:
    """Return the number under the ReLU, and lines around the ReLU."""
    x = excess(step, inputs)
    relu = Step(step.name, "relu", torch.ops.aten.relu.default, (Value(0),), {}, None, step.shape)
    return x, piecewise_relax(relu, [x])


def substitute(step: Step, form: Form, inputs: list[PairBounds], relaxation: Any) -> Substitution:
    """Return forms on an extremum as forms on its arguments."""
    x, around = relaxation
    sign = SIGNS[step.op]
    below = substitute_elementwise(Form(sign * form.gap, sign * form.pruned), x, *around)
    on_b = Form(sign * below.forms[0].gap, sign * below.forms[0].pruned)
    on_a = Form(form.gap - on_b.gap, form.pruned - on_b.pruned)
    constant, forms = below.constant, []
    for rows, bounds, argument in zip((on_a, on_b), operands(step, inputs), step.args[:2], strict=True):
        shape = bounds.gap.low.shape
        summed = Form(sum_to_shape(rows.gap, shape), sum_to_shape(rows.pruned, shape))
        sizes = Form(sum_to_shape(rows.gap.abs(), shape), sum_to_shape(rows.pruned.abs(), shape))
        constant = constant + rounding(sizes, bounds, 4 + form.gap[0].numel())
        if isinstance(argument, Value):
            forms.append(summed)
        else:
            constant = constant + largest_value(summed, bounds)
    return finite_substitution(Substitution(forms, constant))


def is_known(step: Step) -> bool:
    """Return whether each argument is a value or a weight."""
    return all(isinstance(argument, (Value, Weight)) for argument in step.args[:2])


register(Rule(extremum_bounds, relax=relax, substitute_relaxed=substitute), *SIGNS, when=is_known)
