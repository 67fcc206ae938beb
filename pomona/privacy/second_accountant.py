"""A second accountant, independent of the first: bounds on the cost of steps from below and from above, in NumPy.

The privacy loss of each kind of step, an increasing function of the Gaussian noise, is rounded down or up to a grid and
composed over the steps by a Fourier transform (Koskela, Jälkö and Honkela, AISTATS 2020). Rounding down gives a lower
bound on δ and ε: losses above the grid count as its end, and total losses that a transform of finite length wraps
around become smaller. Total losses below −35, which it would make larger, have a probability of at most e⁻³⁵.
Rounding up gives an upper bound, where losses above the grid count as infinite. It leaves out that sums above the end
of the grid are wrapped around, so the end should be far above ε.

The lower bound shows that a budget promises too much on machines that have no dp-accounting. Tests compare both bounds
with the first accountant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from ..errors import require
from .accounting import Array, Pair

END = 35.0  # of the grid of losses
MAX_SIZE = 1 << 23  # points of the grid
DIRECTIONS = ("removed", "added")


@dataclass(frozen=True)
class LossBound:
    """The composed privacy losses of steps, all rounded down or all rounded up, for both kinds of neighbours."""

    grid: Array
    masses: tuple[Array, ...]  # by direction
    infinite: tuple[float, ...]  # probability of an infinite loss, by direction

    @classmethod
    def of(cls, steps: Mapping[Pair, int], interval: float, round_up: bool, end: float = END) -> LossBound:
        """Return the bound for numbers of steps by kind, each of which has noise and at most one pure release."""
        half = 1 << math.ceil(math.log2(max(end / interval, 2)))
        require(2 * half <= MAX_SIZE, f"a grid of losses with intervals of {interval:g} is too fine: give larger ones.")
        grid: Array = np.arange(-half, half, dtype=np.float64) * interval
        masses, infinite = [], []
        for direction in DIRECTIONS:
            transform, finite = np.ones(half + 1, dtype=complex), 1.0
            for pair, count in steps.items():
                mass = loss_mass(pair, grid, interval, direction, round_up)
                transform *= np.fft.rfft(np.roll(mass, -half)) ** count
                finite *= min(float(mass.sum()), 1.0) ** count
            masses.append(np.roll(np.fft.irfft(transform, 2 * half), half))
            infinite.append(1 - finite if round_up else 0.0)
        return cls(grid, tuple(masses), tuple(infinite))

    def delta(self, epsilon: float) -> float:
        """Return δ at an ε, the larger one of both directions."""
        tail = self.grid > epsilon
        excess = -np.expm1(epsilon - self.grid[tail])
        return max(
            float((mass[tail] * excess).sum()) + lost for mass, lost in zip(self.masses, self.infinite, strict=True)
        )

    def epsilon(self, delta: float) -> float:
        """Return ε at a δ; the end of the grid where it is larger."""
        low, high = 0.0, float(self.grid[-1])
        if self.delta(low) <= delta:
            return low
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self.delta(middle) > delta else (low, middle)
        return high


def bracket_epsilon(steps: Mapping[Pair, int], delta: float, interval: float) -> tuple[float, float]:
    """Return a lower and an upper bound on ε, which differ by about `interval` for each step at most."""
    low, high = (LossBound.of(steps, interval, round_up).epsilon(delta) for round_up in (False, True))
    return low, high


def loss_mass(pair: Pair, grid: Array, interval: float, direction: str, round_up: bool) -> Array:
    """Return the probability of each loss of one step on a grid, rounded down or up."""
    require(
        pair.sigma is not None and len(pair.pure) <= 1, "the second accountant is for noise and one index draw at most."
    )
    assert pair.sigma is not None
    index, sigma, rate = sum(pair.pure), pair.sigma, pair.rate
    edges: Array = np.append(grid, grid[-1] + interval) - (interval if round_up else 0.0)
    yes, mass = 1 / (1 + math.exp(-index)), np.zeros(len(grid))
    for answer, shift in ((yes, index), (1 - yes, -index)):
        x = invert_loss(edges, shift, sigma, rate, direction)
        if round_up:
            x[0] = -np.inf  # losses below the grid count as its beginning
        else:
            x[-1] = np.inf  # losses above the grid count as its end
        with_row, without = answer * ndtr((x - 1) / sigma), (1 - answer) * ndtr(x / sigma)
        mass += np.diff(with_row if direction == "added" else (1 - rate) * without + rate * with_row)
    return mass


def invert_loss(losses: Array, shift: float, sigma: float, rate: float, direction: str) -> Array:
    """Return the noise at which the loss of a sampled step has given values; ±∞ where it has none.

    With u = shift + (x − ½) / σ², it is log(1 − q + q e^u) for a row that is removed and −log(1 − q + q e^−u) for one
    that is added.
    """
    sign = 1 if direction == "removed" else -1
    inside = np.expm1(np.minimum(sign * losses, 700.0)) + rate
    is_reached = inside > 0
    inner = sign * np.log(np.where(is_reached, inside, 1.0) / rate)
    return np.where(is_reached, (inner - shift) * sigma**2 + 0.5, -sign * np.inf)
