"""Random pairs of values for the rules of the certificate engine, and a check that no rule cuts any of them off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pomona.theory.certificate.intervals import Interval, PairBounds
from pomona.theory.certificate.linear_form import Form
from pomona.theory.certificate.rules import rule_of
from pomona.theory.certificate.steps import DENSE, PRUNED, Step, Value

SAMPLES = 64


def make_step(
    op: str, function: Callable[..., Tensor], args: Sequence[Any], shape: Sequence[int], **kwargs: Any
) -> Step:
    """Return a step of one operation; values are numbered from 0 in the order of the arguments."""
    return Step(op, op, function, tuple(args), kwargs, None, torch.Size(shape))


def value(index: int) -> Value:
    """Return a reference to the result of an earlier step."""
    return Value(index)


def sample_pairs(
    generator: torch.Generator, shape: Sequence[int], *, centre: float = 1.0, radius: float = 0.3, gap: float = 0.1
) -> tuple[Tensor, Tensor]:
    """Return many values of a dense and a pruned network around one point, also corners of the box around it."""
    random = lambda *size: 2 * torch.rand(*size, generator=generator, dtype=torch.float64) - 1  # noqa: E731
    middle, shift = centre * random(1, *shape) * 2, gap * random(1, *shape)
    spread, shift_spread = radius * random(1, *shape).abs(), gap * random(1, *shape).abs()
    moves, gaps = random(SAMPLES, *shape), random(SAMPLES, *shape)
    moves[::2], gaps[::3] = moves[::2].sign(), gaps[::3].sign()
    pruned = middle + spread * moves
    return pruned + shift + shift_spread * gaps, pruned


def hull_of_samples(dense: Tensor, pruned: Tensor) -> PairBounds:
    """Return the smallest bounds that contain all samples."""
    return PairBounds(*(Interval(x.amin(0), x.amax(0)) for x in (dense, pruned, dense - pruned)))


def check_rule(step: Step, samples: Sequence[tuple[Tensor, Tensor]], generator: torch.Generator) -> PairBounds:
    """Assert that the step's bounds and substituted forms hold for all samples, and return its bounds."""
    rule, inputs = rule_of(step), [hull_of_samples(*pair) for pair in samples]
    dense, pruned = (
        torch.stack([step.evaluate(side, [pair[side][i] for pair in samples]) for i in range(SAMPLES)])
        for side in (DENSE, PRUNED)
    )
    bounds = rule.bounds(step, inputs)
    for x, interval, name in ((dense, bounds.dense, "dense"), (pruned, bounds.pruned, "pruned")):
        assert_inside(x, interval, name, 1e-14)
    assert_inside(dense - pruned, bounds.gap, "gap", 1e-14 * float(torch.maximum(dense.abs(), pruned.abs()).max()))
    check_forms(step, samples, inputs, dense, pruned, generator)
    return bounds


def assert_inside(x: Tensor, interval: Interval, name: str, tolerance: float) -> None:
    """Assert that samples lie in an interval, up to the rounding of the samples themselves."""
    excess = max(float((interval.low - x).max()), float((x - interval.high).max()))
    assert excess <= tolerance, f"{name} is outside its interval by {excess:g}"


def check_forms(
    step: Step,
    samples: Sequence[tuple[Tensor, Tensor]],
    inputs: list[PairBounds],
    dense: Tensor,
    pruned: Tensor,
    generator: torch.Generator,
    rows: int = 6,
) -> None:
    """Assert that forms substituted through a step are above the forms on its result for all samples."""
    coefficients = torch.randn(2, rows, *step.shape, generator=generator, dtype=torch.float64)
    coefficients[0, 0], coefficients[1, 1] = 0, 0
    form = Form(*coefficients)
    substitution = rule_of(step).substitution(step, form, inputs)
    if substitution is None:
        return
    truth = contract(form.gap, dense - pruned) + contract(form.pruned, pruned)
    above = substitution.constant.expand(SAMPLES, rows).clone()
    for below, (a, b) in zip(substitution.forms, samples, strict=True):
        above += contract(below.gap, a - b) + contract(below.pruned, b)
    excess = float((truth - above).max())
    assert excess <= 1e-12 * (1 + float(truth.abs().max())), f"a form is above its bound by {excess:g}"
    assert not above.isnan().any()


def contract(rows: Tensor, samples: Tensor) -> Tensor:
    """Return the sum of products of each row with each sample."""
    return samples.flatten(1) @ rows.flatten(1).T
