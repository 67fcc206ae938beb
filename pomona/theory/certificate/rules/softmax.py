"""Rules for softmax, log-softmax and softmax with masked entries."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..intervals import EPS, Interval, PairBounds
from ..linear_form import Form, Substitution, row_sums
from ..steps import Step
from .distribution import (
    apply_derivative,
    distribution_bounds,
    gap_part,
    growth,
    known_gap,
    log_sum_of_others,
    probabilities,
    side_part,
)
from .linearised import LinearParts, finite_substitution, moved, substitute_linear
from .registry import Rule, register
from .scalar_function import finite_or_infinite

MASKED = "masked_softmax"


def softmax_bounds(step: Step, inputs: list[PairBounds]) -> PairBounds:
    """Return the bounds of softmax over one dimension."""
    to_last = swap_last(step)
    return moved(distribution_bounds(visible(step, moved(inputs[0], to_last))), to_last)


def softmax_relax(step: Step, inputs: list[PairBounds]) -> LinearParts:
    """Return softmax as its derivative in the middle and a remainder."""
    x = visible(step, moved(inputs[0], swap_last(step)))
    return LinearParts(side_part(x.dense), side_part(x.pruned), gap_part(x, distribution_bounds(x).gap))


def softmax_substitute(step: Step, form: Form, inputs: list[PairBounds], parts: LinearParts) -> Substitution:
    """Return forms on softmax as forms on its input."""
    to_last = swap_last(step)
    rows = Form(to_last(form.gap), to_last(form.pruned))
    below, constant = substitute_linear(rows, parts, apply_derivative)
    return finite_substitution(Substitution([Form(to_last(below.gap), to_last(below.pruned))], constant))


def swap_last(step: Step) -> Callable[[Tensor], Tensor]:
    """Return the swap of softmax's dimension with the last one, of the result and of rows on it."""
    axis = step.args[1] if len(step.args) > 1 else step.kwargs["dim"]
    axis = axis - len(step.shape) if axis >= 0 else axis
    return lambda x: x.transpose(axis, -1)


def visible(step: Step, x: PairBounds) -> PairBounds:
    """Return the bounds of softmax's input, minus infinity where a mask hides it."""
    if step.op != MASKED:
        return x
    keep = swap_last(step)(step.args[2].dense)
    hidden = lambda interval: interval.map(lambda end: torch.where(keep, end, -torch.inf))  # noqa: E731
    return PairBounds(hidden(x.dense), hidden(x.pruned), x.gap.map(lambda end: torch.where(keep, end, 0.0)))


def keeps_type(step: Step) -> bool:
    """Return whether the result has the type of the input."""
    dtype = step.args[2] if step.op == "softmax" and len(step.args) > 2 else step.kwargs.get("dtype")
    return dtype in (None, torch.float64)


def log_softmax_bounds(step: Step, inputs: list[PairBounds]) -> PairBounds:
    """Return the bounds of log-softmax: log p_i, and −log(1 + s_i) for the gap."""
    to_last = swap_last(step)
    x = moved(inputs[0], to_last)
    dense, pruned = log_probabilities(x.dense), log_probabilities(x.pruned)
    from_pruned = log_change(growth(probabilities(x.pruned), x.gap, 1))
    from_dense = -log_change(growth(probabilities(x.dense), x.gap, -1))
    gap = known_gap(x, from_pruned.intersect(from_dense), dense - pruned)
    return moved(PairBounds(dense, pruned, gap).tighten(), to_last)


def log_probabilities(x: Interval) -> Interval:
    """Return the range of log-softmax on a box of inputs."""
    low, high = x.low - log_sum_of_others(x.high), x.high - log_sum_of_others(x.low)
    logs = Interval(torch.nn.functional.logsigmoid(low), torch.nn.functional.logsigmoid(high))
    size = 1 + x.magnitude.amax(-1, keepdim=True) + logs.magnitude
    return finite_or_infinite(logs.widen_by(8 * (x.low.shape[-1] + 8) * EPS * size))


def log_change(growth_range: Interval) -> Interval:
    """Return the range of −log(1 + s)."""
    ends = Interval(-torch.log1p(growth_range.high), -torch.log1p(growth_range.low.clamp(min=-1)))
    return finite_or_infinite(ends.widen_by(8 * EPS * ends.magnitude))


def log_softmax_substitute(step: Step, form: Form, inputs: list[PairBounds]) -> Substitution:
    """Return forms on log-softmax as forms on its input.

    x_i − log Σ exp x_j is x_i less a convex function, which the derivative in the middle bounds up to a remainder.
    """
    to_last = swap_last(step)
    x = moved(inputs[0], to_last)
    rows = Form(to_last(form.gap), to_last(form.pruned))
    below, constant = log_sum_forms(Form(rows.gap.sum(-1, keepdim=True), rows.pruned.sum(-1, keepdim=True)), x)
    forms = Form(to_last(rows.gap - below.gap), to_last(rows.pruned - below.pruned))
    size = x.hull.magnitude + x.gap.magnitude
    slack = 16 * EPS * (size + size.amax(-1, keepdim=True)) * (rows.gap.abs() + rows.pruned.abs())
    slack = (1 + rows.gap[0].numel()) * row_sums(slack)
    return finite_substitution(Substitution([forms], constant + slack))


def log_sum_forms(form: Form, x: PairBounds) -> tuple[Form, Tensor]:
    """Return −forms on log Σ exp x as −forms on x and a constant above."""
    parts = []
    for rows, around, change in ((form.gap, x.hull, x.gap), (form.pruned, x.pruned, None)):
        p, middle = probabilities(around), torch.softmax(around.centre, -1)
        off = torch.maximum(p.high - middle, middle - p.low)
        size = around.radius if change is None else change.magnitude
        error = (off * size).sum(-1, keepdim=True)
        at_middle = torch.logsumexp(around.centre, -1, keepdim=True) - (middle * around.centre).sum(-1, keepdim=True)
        constant = at_middle if change is None else torch.zeros_like(at_middle)
        error = error * (1 + 64 * EPS) + 32 * middle.shape[-1] * EPS * around.magnitude.sum(-1, keepdim=True)
        parts.append((rows * middle, row_sums(rows.abs() * error - rows * constant)))
    (gap, above_gap), (pruned, above_pruned) = parts
    return Form(gap, pruned), above_gap + above_pruned


SOFTMAX = Rule(softmax_bounds, relax=softmax_relax, substitute_relaxed=softmax_substitute)
register(SOFTMAX, "softmax", "_softmax", MASKED, when=keeps_type)
register(Rule(log_softmax_bounds, log_softmax_substitute), "_log_softmax", "log_softmax", when=keeps_type)
