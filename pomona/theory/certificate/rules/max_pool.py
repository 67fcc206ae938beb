"""Rules for max pooling and the maximum over axes."""

from __future__ import annotations

from ..intervals import Interval, PairBounds
from ..steps import Step
from .calls import call
from .registry import Rule, register

MAXIMA = (
    "max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "max_pool2d_with_indices", "max_pool3d_with_indices", "amax",
)  # fmt: skip


def maximum_bounds(step: Step, inputs: list[PairBounds]) -> PairBounds:
    """Return the bounds of a maximum, which changes by at most the largest and at least the smallest gap."""
    (x,) = inputs
    dense, pruned = (side.map(lambda end: call(step, [end], [])) for side in (x.dense, x.pruned))
    gap = Interval(-call(step, [-x.gap.low], []), call(step, [x.gap.high], []))
    return PairBounds(dense, pruned, gap).tighten()


def selects_values(step: Step) -> bool:
    """Return whether a step is the maximum itself, not where it is."""
    return step.item in (None, 0)


register(Rule(maximum_bounds), *MAXIMA, when=selects_values)
