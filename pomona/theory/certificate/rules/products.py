"""Rules for products of two values (mul, matmul, bmm) and for divisions by a value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..intervals import EPS, Interval, PairBounds
from ..linear_form import Form, Lines, Substitution, largest_value, substitute_elementwise
from ..steps import Step, Value, Weight
from .bilinear import NUMBERS, Bilinear, matrices
from .linearised import finite_substitution
from .registry import Rule, register, unsupported
from .scalar_function import gap_range, lines_around
from .smooth_functions import power

INVERSE = power(-1)


def is_product(step: Step) -> bool:
    """Return whether a step multiplies two values."""
    return len(step.args) == 2 and not step.kwargs and all(isinstance(arg, Value) for arg in step.args)


def product_of(step: Step, inputs: list[PairBounds]) -> Bilinear:
    """Return the product that a step computes."""
    if step.op == "mul":
        return NUMBERS
    if any(x.gap.low.ndim < 2 for x in inputs):
        raise unsupported(step, "a product of a matrix and a vector that both depend on the input")
    return matrices(inputs[0].gap.low.shape[-1])


def product_bounds(step: Step, inputs: list[PairBounds]) -> PairBounds:
    """Return the bounds of a product of two values."""
    return product_of(step, inputs).bounds(*inputs)


def product_substitute(step: Step, form: Form, inputs: list[PairBounds]) -> Substitution:
    """Return forms on a product as forms on its factors."""
    first, second, constant = product_of(step, inputs).substitute(form, *inputs)
    return finite_substitution(Substitution([first, second], constant))


def is_division(step: Step) -> bool:
    """Return whether a step divides a value or a constant by a value, without rounding to whole numbers."""
    whole = step.kwargs.get("rounding_mode") is not None
    return len(step.args) == 2 and isinstance(step.args[1], Value) and not whole


def division_bounds(step: Step, inputs: list[PairBounds]) -> PairBounds:
    """Return the bounds of a quotient: those of the product with the reciprocal; infinite where that is."""
    return NUMBERS.bounds(numerator(step, inputs), reciprocal(inputs[-1]))


def division_relax(step: Step, inputs: list[PairBounds]) -> tuple[PairBounds, tuple[Lines, Lines, Lines]]:
    """Return the bounds of the divisor's reciprocal, and lines around it."""
    return reciprocal(inputs[-1]), lines_around(INVERSE, inputs[-1])


def division_substitute(
    step: Step, form: Form, inputs: list[PairBounds], relaxation: tuple[PairBounds, tuple[Lines, Lines, Lines]]
) -> Substitution:
    """Return forms on a quotient as forms on its numerator and denominator."""
    inverse, around = relaxation
    above = numerator(step, inputs)
    first, on_inverse, constant = NUMBERS.substitute(form, above, inverse)
    below = substitute_elementwise(on_inverse, inputs[-1], *around)
    constant = constant + below.constant
    if isinstance(step.args[0], Value):
        return finite_substitution(Substitution([first, *below.forms], constant))
    return finite_substitution(Substitution(below.forms, constant + largest_value(first, above)))


def reciprocal(x: PairBounds) -> PairBounds:
    """Return the bounds of 1 / x."""
    return PairBounds(INVERSE.range(x.dense), INVERSE.range(x.pruned), gap_range(INVERSE, x.hull, x.gap)).tighten()


def numerator(step: Step, inputs: list[PairBounds]) -> PairBounds:
    """Return the bounds of a quotient's first argument, a value or a constant."""
    return inputs[0] if isinstance(step.args[0], Value) else constant_bounds(step.args[0], inputs[0].gap.low)


def constant_bounds(constant: Any, like: Tensor) -> PairBounds:
    """Return a weight or a number as bounds of zero width."""
    sides = [constant.dense, constant.pruned] if isinstance(constant, Weight) else [constant, constant]
    dense, pruned = (torch.as_tensor(side, dtype=like.dtype, device=like.device) for side in sides)
    gap = dense - pruned
    rounded = Interval(gap, gap).widen_by(EPS * gap.abs())
    return PairBounds(Interval(dense, dense), Interval(pruned, pruned), rounded)


register(Rule(product_bounds, product_substitute), "mul", "matmul", "bmm", "mm", when=is_product)
DIVISION = Rule(division_bounds, relax=division_relax, substitute_relaxed=division_substitute)
register(DIVISION, "div", when=is_division)
