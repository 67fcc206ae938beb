"""Rules for norms whose statistics are those of the example itself: layer, group, instance, root mean square."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..intervals import PairBounds
from ..linear_form import Form, Substitution
from ..steps import DENSE, PRUNED, Step, Value, Weight
from .activations import setting
from .affine import AffineLayer
from .linearised import LinearParts, finite_substitution, moved, substitute_linear
from .registry import Rule, register
from .standardised import Statistics, standardised_bounds, standardised_parts, transpose

INSTANCE_NORM, ROOT_MEAN_SQUARE = "_native_batch_norm_legit", "root_mean_square_norm"


@dataclass(frozen=True)
class Norm:
    """A norm; `group` puts the entries that share their statistics along the last dimension, `restore` undoes it."""

    group: Callable[[Tensor], Tensor]
    restore: Callable[[Tensor], Tensor]
    affine: AffineLayer
    statistics: Statistics

    def standardise(self, x: PairBounds) -> PairBounds:
        """Return the bounds before the scale and the shift."""
        return moved(standardised_bounds(moved(x, self.group), self.statistics), self.restore)


def norm_of(step: Step) -> Norm:
    """Return the norm that a step computes."""
    if step.op == "layer_norm":
        shape, axes = tuple(step.args[1]), len(step.args[1])
        affine = scale_and_shift(setting(step, 2, "weight", None), setting(step, 3, "bias", None), 0)
        epsilon = setting(step, 4, "eps", 1e-5)
        return Norm(lambda x: x.flatten(-axes), lambda x: x.unflatten(-1, shape), affine, Statistics(epsilon))
    if step.op == ROOT_MEAN_SQUARE:
        return Norm(lambda x: x, lambda x: x, scale_and_shift(None, None, 0), Statistics(step.args[1], centred=False))
    shape, axes = tuple(step.shape[1:]), len(step.shape) - 1
    if step.op == "group_norm":
        groups, first, epsilon = step.args[1], 2, setting(step, 4, "eps", 1e-5)
    else:
        groups, first, epsilon = shape[0], 1, step.args[-1]
    weight, bias = setting(step, first, "weight", None), setting(step, first + 1, "bias", None)
    return Norm(
        lambda x: x.flatten(-axes).unflatten(-1, (groups, -1)),
        lambda x: x.flatten(-2).unflatten(-1, shape),
        scale_and_shift(weight, bias, axes - 1),
        Statistics(epsilon),
    )


def scale_and_shift(weight: Weight | None, bias: Weight | None, axes: int) -> AffineLayer:
    """Return the affine part of a norm, with dimensions for the axes after the channels."""

    def sides(tensor: Weight | None, default: float) -> tuple[Tensor, Tensor]:
        if tensor is None:
            number = torch.tensor(default, dtype=torch.float64)
            return number, number
        dense, pruned = (tensor.of(side).reshape(*tensor.of(side).shape, *[1] * axes) for side in (DENSE, PRUNED))
        return dense, pruned

    return AffineLayer(torch.mul, sides(weight, 1.0), sides(bias, 0.0), 4)


def norm_bounds(step: Step, inputs: list[PairBounds]) -> PairBounds:
    """Return the bounds of a norm."""
    norm = norm_of(step)
    return norm.affine.bounds(norm.standardise(inputs[0]))


def norm_relax(step: Step, inputs: list[PairBounds]) -> tuple[PairBounds, LinearParts]:
    """Return the bounds before the scale and the shift, and their linear parts."""
    norm = norm_of(step)
    x = moved(inputs[0], norm.group)
    result = standardised_bounds(x, norm.statistics)
    return moved(result, norm.restore), standardised_parts(x, result, norm.statistics)


def norm_substitute(
    step: Step, form: Form, inputs: list[PairBounds], relaxation: tuple[PairBounds, LinearParts]
) -> Substitution:
    """Return forms on a norm as forms on its input."""
    norm, (standardised, parts) = norm_of(step), relaxation
    scaled = norm.affine.substitute(form, standardised)
    rows = Form(norm.group(scaled.forms[0].gap), norm.group(scaled.forms[0].pruned))
    below, constant = substitute_linear(rows, parts, transpose(norm.statistics))
    result = Form(norm.restore(below.gap), norm.restore(below.pruned))
    return finite_substitution(Substitution([result], scaled.constant + constant))


def normalises_one_example(step: Step) -> bool:
    """Return whether a norm's weights do not depend on the input, and no statistics are shared between examples."""
    alone = step.op != INSTANCE_NORM or (step.item == 0 and step.shape[0] == 1 and step.args[-3] is True)
    return len(step.inputs) == 1 and isinstance(step.args[0], Value) and alone


NORM = Rule(norm_bounds, relax=norm_relax, substitute_relaxed=norm_substitute)
register(NORM, "layer_norm", "group_norm", INSTANCE_NORM, ROOT_MEAN_SQUARE, when=normalises_one_example)
