"""The knowledge about one value in the graph of two networks, and how it changes under simple operations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 1e-12  # relative, for an operation other than a layer: above the error of summing 4000 float64 numbers


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
        most = float(torch.linalg.vector_norm(self.pruned - self.dense)) * (1 + ROUNDING)
        gap = min(self.gap, most + self.dense_spread + self.pruned_spread)
        return PairedValue(self.dense, self.pruned, self.dense_spread, self.pruned_spread, gap)


def apply_lipschitz(value: PairedValue, results: list[Tensor], constant: float) -> PairedValue:
    """Return the value after an operation with this Lipschitz constant; `results` are its outputs at the centre."""
    slack = [ROUNDING * euclidean_norm(r) for r in results]
    spreads = constant * value.dense_spread + slack[0], constant * value.pruned_spread + slack[1]
    return PairedValue(results[0], results[1], *spreads, constant * value.gap)


def add_values(values: list[PairedValue], results: list[Tensor]) -> PairedValue:
    """Return the sum of values, which may broadcast; `results` are the sums at the centre."""
    # A value that broadcasting repeats n times has √n times its norm.
    repeats = [math.sqrt(results[0].numel() / v.dense.numel()) for v in values]
    return combine_values(values, results, repeats, power=1)


def concatenate_values(values: list[PairedValue], results: list[Tensor]) -> PairedValue:
    """Return the concatenation of values; `results` are the concatenations at the centre."""
    return combine_values(values, results, [1.0] * len(values), power=2)


def combine_values(values: list[PairedValue], results: list[Tensor], repeats: list[float], power: int) -> PairedValue:
    """Return several values as one, with spreads and gaps combined in the `power`-norm."""
    parts = [(c * v.dense_spread, c * v.pruned_spread, c * v.gap) for c, v in zip(repeats, values, strict=True)]
    total = [math.fsum(p**power for p in part) ** (1 / power) for part in zip(*parts, strict=True)]
    slack = [ROUNDING * euclidean_norm(r) for r in results]
    return PairedValue(results[0], results[1], total[0] + slack[0], total[1] + slack[1], total[2])


def euclidean_norm(x: Tensor) -> float:
    """Return the norm of all entries of a tensor."""
    return float(torch.linalg.vector_norm(x))
