"""Rules for layers with weights: linear layers, convolutions, batch norm in evaluation, products with a constant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..affine_map import CONVOLUTIONS, TRANSPOSED, batch_norm_coefficients
from ..intervals import EPS, Interval, PairBounds
from ..linear_form import Form, Substitution, contract
from ..steps import DENSE, PRUNED, Step, Value, Weight
from .calls import transpose
from .registry import Rule, register, unsupported

BATCH_NORMS = ("batch_norm", "_native_batch_norm_legit_no_training")


@dataclass(frozen=True)
class AffineLayer:
    """A step x ↦ product(x, W) + b of both networks; (dense, pruned) in `weight` and `bias`.

    `terms` is at least the number of roundings in one entry of the result. Where the weight and the bias are rounded
    themselves, as those of a batch norm are, `sizes` bounds what their errors are relative to: the weight and the
    terms of the bias of both networks, and `same` says where the exact ones are equal in both.
    """

    product: Callable[[Tensor, Tensor], Tensor]
    weight: tuple[Tensor, Tensor]
    bias: tuple[Tensor, Tensor]
    terms: int
    sizes: tuple[Tensor, Tensor] | None = None
    same: Tensor | None = None

    @property
    def rounding(self) -> float:
        """The relative error of one entry, with respect to the sum of absolute values."""
        return 2 * (self.terms + 8) * EPS

    def difference_error(self, magnitude: Tensor) -> Tensor | float:
        """Return what rounded differences of the networks' weights and biases add, on inputs of this magnitude."""
        if self.sizes is None or self.same is None:
            return 0.0
        return torch.where(self.same, 0.0, self.rounding * (self.product(magnitude, self.sizes[0]) + self.sizes[1]))

    def image(self, weight: Tensor, x: Interval) -> Interval:
        """Return the interval of product(x, weight), with a margin for rounding."""
        reach = x.centre.abs() + x.radius
        radius = self.product(x.radius + self.rounding * reach, weight.abs()) * (1 + self.rounding)
        middle = self.product(x.centre, weight)
        return Interval(middle - radius, middle + radius)

    def bounds(self, x: PairBounds) -> PairBounds:
        """Return the bounds of the layer's result."""
        dense, pruned = self.image(self.weight[0], x.dense), self.image(self.weight[1], x.pruned)
        removed = self.weight[0] - self.weight[1]
        gap = self.image(self.weight[1], x.gap) + self.image(removed, x.dense)
        gap = gap.intersect(self.image(self.weight[0], x.gap) + self.image(removed, x.pruned))
        shift = self.bias[0] - self.bias[1]
        gap = self.shift(gap, shift).widen_by(self.difference_error(x.hull.magnitude))
        return PairBounds(self.shift(dense, self.bias[0]), self.shift(pruned, self.bias[1]), gap).tighten()

    def shift(self, x: Interval, constant: Tensor) -> Interval:
        """Return an interval moved by a constant."""
        terms = constant.abs() if self.sizes is None else torch.maximum(constant.abs(), self.sizes[1])
        margin = self.rounding * terms + 2 * EPS * x.magnitude
        return Interval(x.low + constant - margin, x.high + constant + margin)

    def substitute(self, form: Form, x: PairBounds) -> Substitution:
        """Return forms on the layer's result as forms on its input: gap = dense − pruned, each side by its weight."""
        shape = x.pruned.low
        on_pruned = form.pruned - form.gap
        (gap,) = transpose(lambda v: self.product(v, self.weight[0]), [shape], form.gap)
        (rest,) = transpose(lambda v: self.product(v, self.weight[1]), [shape], on_pruned)
        constant = contract(form.gap, self.bias[0]) + contract(on_pruned, self.bias[1])
        reach = torch.maximum(x.hull.magnitude, x.gap.magnitude)
        biases = [b.abs() for b in self.bias] if self.sizes is None else [self.sizes[1]] * 2
        margins = [self.product(reach, w.abs()) + b for w, b in zip(self.weight, biases, strict=True)]
        slack = contract(form.gap.abs(), margins[0]) + contract(on_pruned.abs(), margins[1])
        entries = form.gap[0].numel()
        return Substitution([Form(gap, gap + rest)], constant + (4 * self.rounding + 2 * entries * EPS) * slack)


def layer_of(step: Step) -> AffineLayer:
    """Return a step as an affine layer; raise PomonaError where a weight depends on the input."""
    if step.op == "linear" or step.op in CONVOLUTIONS or step.op in TRANSPOSED:
        return linear_or_convolution(step)
    if step.op in BATCH_NORMS:
        return batch_norm(step)
    if step.op in ("mul", "div"):
        return scaling(step)
    return matrix_product(step)


def linear_or_convolution(step: Step) -> AffineLayer:
    """Return a linear layer or a convolution."""
    x, weight = step.args[:2]
    bias, options = (step.args[2], step.args[3:]) if len(step.args) > 2 else (None, ())
    if not isinstance(x, Value) or not isinstance(weight, Weight):
        raise unsupported(step, "the weight depends on the input")
    bias = step.kwargs.get("bias", bias)
    keywords = {name: value for name, value in step.kwargs.items() if name not in ("bias",)}
    tail = 0 if step.op == "linear" else weight.dense.ndim - 2

    def product(v: Tensor, w: Tensor) -> Tensor:
        return step.function(v, w, None, *options, **keywords)

    zero = weight.dense.new_zeros(())
    biases = (zero, zero) if bias is None else [bias.of(side).view(-1, *[1] * tail) for side in (DENSE, PRUNED)]
    if step.op == "linear":
        terms = weight.dense.shape[-1]
    else:
        terms = weight.dense[0].numel() if step.op in CONVOLUTIONS else weight.dense[:, 0].numel()
    return AffineLayer(product, (weight.dense, weight.pruned), (biases[0], biases[1]), terms)


def batch_norm(step: Step) -> AffineLayer:
    """Return a batch norm in evaluation mode as a scale and a shift of each channel."""
    if step.op == "batch_norm" and step.args[5]:
        raise unsupported(step, "a batch norm that uses the statistics of the batch")
    settings = step.settings
    known = settings["running_mean"] is not None and settings["running_var"] is not None
    if not known or not isinstance(step.args[0], Value):
        raise unsupported(step, "a batch norm without running statistics depends on the batch")
    axes = [1] * (len(step.shape) - 2)
    scales, shifts, sizes = [], [], []
    for norm in (batch_norm_coefficients(step, side) for side in (DENSE, PRUNED)):
        scales.append(norm.scale.view(-1, *axes))
        shifts.append(norm.shift.view(-1, *axes))
        sizes.append(norm.size.view(-1, *axes))
        same = norm.same.view(-1, *axes)
    size = scales[0].abs() + scales[1].abs(), sizes[0] + sizes[1]
    return AffineLayer(torch.mul, (scales[0], scales[1]), (shifts[0], shifts[1]), 8, size, same)


def matrix_product(step: Step) -> AffineLayer:
    """Return the product of a value and a constant matrix (matmul, mm, addmm) as a layer."""
    args = list(step.args)
    bias = args.pop(0) if step.op == "addmm" else None
    kinds = [isinstance(a, Weight) for a in args[:2]]
    if sum(kinds) != 1 or (bias is not None and not isinstance(bias, Weight)) or step.kwargs:
        raise unsupported(step, "a product of two values")
    weight: Any = args[kinds.index(True)]

    def product(v: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(w, v) if kinds[0] else torch.matmul(v, w)

    zero = weight.dense.new_zeros(())
    biases = (zero, zero) if bias is None else (bias.dense, bias.pruned)
    terms = weight.dense.shape[-1 if kinds[0] else max(-2, -weight.dense.ndim)]
    return AffineLayer(product, (weight.dense, weight.pruned), biases, terms)


def scaling(step: Step) -> AffineLayer:
    """Return the product of a value with a constant, or its quotient by one, as a layer."""
    other = step.args[1 if isinstance(step.args[0], Value) else 0]
    if not isinstance(other, Weight):
        number = torch.tensor(float(other), dtype=torch.float64)
        other = Weight("", number, number)
    sides = other.dense.double(), other.pruned.double()  # whole numbers and truth values too
    zero = torch.zeros((), dtype=torch.float64)
    if step.op == "mul":
        return AffineLayer(torch.mul, sides, (zero, zero), 4)
    inverse = sides[0].reciprocal(), sides[1].reciprocal()
    sizes = inverse[0].abs() + inverse[1].abs(), zero
    return AffineLayer(torch.mul, inverse, (zero, zero), 4, sizes, sides[0] == sides[1])


def multiplies_by_constant(step: Step) -> bool:
    """Return whether one factor of a product does not depend on the input."""
    return len(step.inputs) == 1


def divides_by_constant(step: Step) -> bool:
    """Return whether a quotient's divisor does not depend on the input."""
    return len(step.inputs) == 1 and isinstance(step.args[0], Value) and not step.kwargs


def affine_bounds(step: Step, inputs: list[PairBounds]) -> PairBounds:
    """Return the bounds of an affine layer."""
    return layer_of(step).bounds(inputs[0])


def affine_substitute(step: Step, form: Form, inputs: list[PairBounds]) -> Substitution:
    """Return forms on an affine layer as forms on its input."""
    return layer_of(step).substitute(form, inputs[0])


AFFINE = Rule(affine_bounds, affine_substitute, affine=True)
register(AFFINE, "linear", *CONVOLUTIONS, *TRANSPOSED, *BATCH_NORMS)
register(AFFINE, "addmm", "mm", "matmul", "bmm", "mul", when=multiplies_by_constant)
register(AFFINE, "div", when=divides_by_constant)
