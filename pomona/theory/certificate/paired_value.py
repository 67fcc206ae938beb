"""What is known in the Euclidean norm about one value of two networks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

ROUNDING = 1e-12  # relative, for an operation other than a layer: above the error of summing 4000 float64 numbers

SMALL = 0.01  # times ROUNDING, the absolute error of an activation whose result is near zero


@dataclass(frozen=True)
class PairedValue:
    """A value of the dense and of the pruned network: both at the region's centre, their spreads, and their gap.

    A spread bounds the distance of a network's value from the one at the centre, over the whole region. The gap bounds
    the distance between the values of the two networks.
    """

    dense: Tensor
    pruned: Tensor
    dense_spread: float
    pruned_spread: float
    gap: float

    def with_capped_gap(self) -> PairedValue:
        """Return the value with its gap at most the distance of the centres plus both spreads."""
        most = euclidean_norm(self.pruned - self.dense) * (1 + ROUNDING)
        return replace(self, gap=min(self.gap, most + self.dense_spread + self.pruned_spread))


def apply_lipschitz(value: PairedValue, results: Sequence[Tensor], constant: float, jump: float = 0.0) -> PairedValue:
    """Return the value after an operation with this Lipschitz constant and jumps of this size in each entry.

    `results` are its outputs at the centre.
    """
    root = math.sqrt(results[0].numel())
    jumps = jump * root
    spreads = constant * value.dense_spread + jumps, constant * value.pruned_spread + jumps
    # The result may be small and a difference of larger numbers, as that of GELU for negative inputs.
    terms = constant * max(euclidean_norm(value.dense), euclidean_norm(value.pruned)) + SMALL * root
    return with_rounding(PairedValue(results[0], results[1], *spreads, constant * value.gap + jumps), terms)


def combine_values(
    values: Sequence[PairedValue], results: Sequence[Tensor], singles: Sequence[float], together: float, removed: float
) -> PairedValue:
    """Return the sum of linear maps of several values, and of constants whose distance is `removed`.

    The maps have these Lipschitz constants: one for each value, and one for all of them as one vector. The better of
    the two bounds is taken. `results` are the outputs at the centre.
    """
    spreads = []
    for numbers in zip(*[(v.dense_spread, v.pruned_spread, v.gap) for v in values], strict=True):
        apart = math.fsum(c * number for c, number in zip(singles, numbers, strict=True))
        spreads.append(min(apart, together * math.hypot(*numbers)))
    # The terms of a sum may cancel, so its error is relative to them.
    terms = together * math.hypot(*[max(euclidean_norm(v.dense), euclidean_norm(v.pruned)) for v in values])
    return with_rounding(PairedValue(results[0], results[1], spreads[0], spreads[1], spreads[2] + removed), terms)


def with_rounding(value: PairedValue, terms: float = 0.0) -> PairedValue:
    """Return the value with a margin for the rounding of its centre, whose summands have at most the norm `terms`."""
    slack = [ROUNDING * (euclidean_norm(side) + terms) for side in (value.dense, value.pruned)]
    spreads = value.dense_spread * (1 + ROUNDING) + slack[0], value.pruned_spread * (1 + ROUNDING) + slack[1]
    return PairedValue(value.dense, value.pruned, *spreads, value.gap * (1 + ROUNDING))


def euclidean_norm(x: Tensor) -> float:
    """Return the norm of all entries of a tensor."""
    return float(torch.linalg.vector_norm(x))
