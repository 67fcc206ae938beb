"""Rules for affine operations with the same coefficients in both networks: moves, sums, average pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..intervals import EPS, Interval, PairBounds
from ..linear_form import Form, Substitution, contract
from ..steps import DENSE, PRUNED, Step, Value, Weight, is_reference
from .calls import call, side_weights, transpose, weight_differences
from .registry import Rule, register

# Each entry of the result is an entry of an input, or a constant.
MOVES = (
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "permute", "transpose", "t", "squeeze", "unsqueeze",
    "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "index", "index_select", "gather", "expand",
    "repeat", "flip", "roll", "cat", "stack", "clone", "alias", "contiguous", "detach", "lift_fresh_copy", "narrow",
    "pad", "constant_pad_nd", "slice_scatter", "select_scatter", "copy", "where", "pixel_shuffle", "pixel_unshuffle",
    "channel_shuffle", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "diagonal", "movedim",
    "_to_copy",
)  # fmt: skip
# Each entry of the result is a sum of entries with coefficients that are not negative.
SUMS = (
    "add", "sum", "mean", "cumsum", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
    "upsample_linear1d", "upsample_bilinear2d",
)  # fmt: skip
# The signs of the arguments of differences.
SIGNS = {"add": (1, 1), "sub": (1, -1), "rsub": (-1, 1), "neg": (-1,)}


def shared_bounds(step: Step, inputs: list[PairBounds]) -> PairBounds:
    """Return the bounds of an operation from the ends of its inputs' intervals."""
    removed = weight_differences(step)
    constant = call(step, [torch.zeros_like(x.gap.low) for x in inputs], no_weights(removed))
    gap = image(step, [x.gap for x in inputs], removed)
    # The gap of a constant is zero, of an infinite one too.
    gap = gap.map(lambda end: torch.where(constant.isinf(), torch.zeros_like(end), end - constant))
    if step.op not in MOVES:
        gap = gap.widen_by(EPS * constant.abs())
    elif any(weight.is_floating_point() for weight in removed):  # whose difference is rounded
        gap = gap.widen_by(EPS * gap.magnitude)
    dense = image(step, [x.dense for x in inputs], side_weights(step, DENSE))
    return PairBounds(dense, image(step, [x.pruned for x in inputs], side_weights(step, PRUNED)), gap).tighten()


def image(step: Step, inputs: Sequence[Interval], weights: Sequence[Tensor]) -> Interval:
    """Return the interval of the operation on intervals."""
    signs = value_signs(step)
    low = call(step, [x.low if s > 0 else x.high for x, s in zip(inputs, signs, strict=True)], weights)
    high = call(step, [x.high if s > 0 else x.low for x, s in zip(inputs, signs, strict=True)], weights)
    result = Interval(low, high)
    if step.op in MOVES:
        return result
    return result.widen_by(2 * terms(step, inputs) * EPS * reach(step, [x.magnitude for x in inputs], weights))


def reach(step: Step, magnitudes: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return the sum of the absolute values of all terms of each entry."""
    constant = call(step, [torch.zeros_like(x) for x in magnitudes], no_weights(weights))
    shift = call(step, [torch.zeros_like(x) for x in magnitudes], weights) - constant
    values = call(step, [x * s for x, s in zip(magnitudes, value_signs(step), strict=True)], no_weights(weights))
    return values - constant + shift.abs() + constant.abs()


def value_signs(step: Step) -> list[int]:
    """Return the sign with which each input enters the result."""
    if step.op not in SIGNS:
        return [1] * len(step.inputs)
    scaled = 0 if step.op == "rsub" else 1  # rsub is other − alpha · self
    turned = -1 if factor_of(step) < 0 else 1
    signs = [sign * turned if place == scaled else sign for place, sign in enumerate(SIGNS[step.op])]
    return [sign for sign, arg in zip(signs, step.args, strict=False) if isinstance(arg, Value)]


def terms(step: Step, inputs: Sequence[Interval]) -> int:
    """Return a number above the count of roundings in one entry of the operation, and of its transpose."""
    return 8 + math.prod(step.shape) + sum(x.low.numel() for x in inputs)


def no_weights(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros for real weights; integers and truth values stay."""
    return [torch.zeros_like(w) if w.is_floating_point() else w for w in weights]


def shared_substitute(step: Step, form: Form, inputs: list[PairBounds]) -> Substitution | None:
    """Return forms on the result as forms on the inputs."""
    like = [x.gap.low for x in inputs]
    zeros = [torch.zeros_like(x) for x in like]
    dense, pruned = (call(step, zeros, side_weights(step, side)) for side in (DENSE, PRUNED))
    if not has_finite_constant(step):
        return None

    def function(*values: Tensor) -> Tensor:
        return call(step, values, side_weights(step, PRUNED))

    gaps, sides = transpose(function, like, form.gap), transpose(function, like, form.pruned)
    sizes = [torch.maximum(x.hull.magnitude, x.gap.magnitude) for x in inputs]
    weights = [largest_weight(weight) for weight in step.weights]
    margin = 4 * terms(step, [x.gap for x in inputs]) * EPS * reach(step, sizes, weights)
    slack = contract(form.gap.abs() + form.pruned.abs(), margin)
    constant = contract(form.gap, dense - pruned) + contract(form.pruned, pruned)
    forms = [Form(gap, side) for gap, side in zip(gaps, sides, strict=True)]
    return Substitution(forms, constant + slack)


def largest_weight(weight: Weight) -> Tensor:
    """Return the larger absolute value of both networks; integers and truth values stay."""
    return torch.maximum(weight.dense.abs(), weight.pruned.abs()) if weight.dense.is_floating_point() else weight.dense


def has_finite_constant(step: Step) -> bool:
    """Return whether no number among the arguments is infinite, as in the padding before max pooling."""
    return all(math.isfinite(leaf) for leaf in step.leaves() if isinstance(leaf, float))


def keeps_precision(step: Step) -> bool:
    """Return whether an operation adds with a finite factor and stays in float64, on inputs that are not indices."""
    same_type = step.kwargs.get("dtype") in (None, torch.float64)
    return same_type and math.isfinite(factor_of(step)) and not is_selected_by_value(step)


def is_selected_by_value(step: Step) -> bool:
    """Return whether a step selects entries by a value instead of by a constant."""
    if step.op == "where":
        return isinstance(step.args[0], Value)
    positions = {"index": "indices", "index_select": "index", "gather": "index"}
    chosen = tree_leaves(step.settings[positions[step.op]], is_leaf=is_reference) if step.op in positions else []
    return any(isinstance(leaf, Value) for leaf in chosen)


def factor_of(step: Step) -> float:
    """Return alpha, the factor of the second term of a sum or a difference."""
    return float(step.settings.get("alpha", 1)) if step.op in ("add", "sub", "rsub") else 1.0


SHARED = Rule(shared_bounds, shared_substitute, affine=True)
register(SHARED, *MOVES, *SUMS, *SIGNS, when=keeps_precision)
