"""Exact accounting of private training: the privacy loss of one step and its composition over all steps.

A step takes one Poisson sample, which holds each row with probability q. From it the step releases an index set (pure
ε-DP) and a noisy gradient (Gaussian noise of σ times the clipping norm). Both are computed from the same sample.
They are therefore composed first, and the pair is amplified by the sampling once. Neighbouring datasets differ in
one row that is added or removed.

Any ε-DP mechanism is a function of randomised response, so a step is dominated by the pair randomised response ×
Gaussian: P against Q. Sampling turns it into (1 − q) Q + q P against Q where the row is removed, and into P against
(1 − q) P + q Q where it is added (Zhu, Dong and Wang, AISTATS 2022). The hockey-stick divergences of both have a closed
form. `dp-accounting` composes them over the steps and rounds up.

The noise that a step adds is the discrete Gaussian on a grid of integers (`clipping`), and it is accounted for as the
continuous one. That is exact: let σ² be the variance of the discrete noise in units of the grid, and s = 3. Add
continuous noise of variance σ² − s² to an integer vector, and replace each coordinate y of the result by an integer z
with probability ∝ exp(−(z − y)² / (2s²)). By the convolution theorem for lattices (Peikert, CRYPTO 2010, theorem 3.1)
the outcome is discrete Gaussian noise of variance σ², up to a factor of 1 ± 2e−77 in the probability of each
coordinate, as Σ_z exp(−(z − y)² / (2s²)) is the same for all y up to 2 exp(−2π²s²) (Poisson summation). So discrete
noise of variance σ² is post-processed continuous noise of variance σ² − s², in any number of dimensions, sampled or
not, and adds less than 1e−60 to ε. The grid therefore adds s² = 9 to the variance that the accountant asks for, which
is 1e−11 of it. The 1e−38 of the tails that the sampler leaves out, for each coordinate and step, are far below
`ROUNDING_DELTA`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

from ..errors import PomonaError, require

Array = NDArray[np.float64]

GRID_INTERVAL = 5e-4  # between privacy losses; a finer grid lowers ε by less than 1e−4 of its value
MIN_GRID_POINTS = 1_000  # from 0 to the end of the grid
MAX_GRID_POINTS = 20_000
MIN_GRID_END = 1e-4  # below it the differences of neighbouring grid points are rounding errors
GRID_DEVIATIONS = 10.0  # standard deviations of the Gaussian loss on the grid: the mass beyond them is 1e−23
ROUNDING_DELTA = 1e-12  # of δ for the rounding errors of the composition in float64, which reach 1e−13
MIN_DELTA = 1e-10  # below it these errors are no small part of δ
MAX_LOSS = 700.0  # the largest loss whose exponential a float64 can hold, rounded down


@dataclass(frozen=True)
class Pair:
    """The releases of one step from one Poisson sample: pure ε-DP mechanisms, and Gaussian noise unless σ is None."""

    rate: float  # q, the probability of each row
    sigma: float | None = None
    pure: tuple[float, ...] = ()  # the ε of each pure mechanism

    def __post_init__(self) -> None:
        require(0 < self.rate <= 1, f"a row is drawn with a probability in (0, 1], got {self.rate:g}.")
        require(self.sigma is None or self.sigma > 0, f"σ must be above 0, got {self.sigma}.")
        require(min(self.pure, default=0.0) >= 0, f"the ε of a draw must not be negative, got {self.pure}.")

    def divergence(self, log: Array) -> Array:
        """Return the hockey-stick divergence H(P ‖ Q) at e^log without sampling."""
        return hockey_stick_divergence(log, self.sigma, self.pure)

    def delta_if_removed(self, epsilon: Array) -> Array:
        """Return δ at each ε of a neighbour with a row removed: ∫ max(0, (1 − q) Q + q P − e^ε Q)."""
        excess = np.expm1(epsilon) + self.rate
        is_positive = excess > 0
        log = np.log(np.where(is_positive, excess, 1.0) / self.rate)
        return np.where(is_positive, self.rate * self.divergence(log), -np.expm1(epsilon))

    def delta_if_added(self, epsilon: Array) -> Array:
        """Return δ at each ε of a neighbour with a row added: ∫ max(0, P − e^ε ((1 − q) P + q Q))."""
        excess = 1 - (1 - self.rate) * np.exp(epsilon)
        is_positive = excess > 0
        log = epsilon + np.log(self.rate / np.where(is_positive, excess, 1.0))
        return np.where(is_positive, excess * self.divergence(log), 0.0)

    @property
    def largest_loss(self) -> float:
        """Return the end of the grid of privacy losses; larger ones have a probability of about 1e−23."""
        spread = 0.0 if self.sigma is None else 1 / (2 * self.sigma**2) + GRID_DEVIATIONS / self.sigma
        return math.log1p(self.rate * math.expm1(min(sum(self.pure) + spread, MAX_LOSS)))

    @property
    def grid_interval(self) -> float:
        """Return the interval of a grid of losses that suits these releases."""
        end = self.largest_loss
        count = min(max(math.ceil(end / GRID_INTERVAL), MIN_GRID_POINTS), MAX_GRID_POINTS)
        return max(end, MIN_GRID_END) / count

    def loss_distribution(self, interval: float | None = None) -> Any:
        """Return the privacy-loss distribution of one step as dp-accounting's object, rounded up to a grid."""
        pmf, pld = import_dp_accounting()
        interval = self.grid_interval if interval is None else interval
        count = math.ceil(max(self.largest_loss, MIN_GRID_END) / interval * (1 - 1e-12))
        places = np.arange(-count, count + 1)
        losses = np.asarray(places * interval, dtype=np.float64)
        parts = [
            pmf.create_pmf_pessimistic_connect_dots(interval, places, np.clip(delta(losses), 0, 1))
            for delta in (self.delta_if_removed, self.delta_if_added)
        ]
        return pld.PrivacyLossDistribution(*parts)

    def compose(self, *step_counts: int) -> Iterator[Any]:
        """Yield the privacy-loss distribution of each number of steps."""
        one_step = self.loss_distribution()
        for count in step_counts:
            with np.errstate(all="ignore"):  # some of its bounds on the tails overflow, and are discarded
                yield one_step.self_compose(count)

    def epsilon(self, steps: int, delta: float) -> float:
        """Return the ε of so many steps at a given δ, which must be `MIN_DELTA` or more.

        Without Gaussian noise the loss of a step is bounded, and ε is at most the sum of these bounds.
        """
        validate_delta(delta)
        pure = sum(self.pure)
        is_bounded = self.sigma is None and pure < MAX_LOSS
        bound = steps * math.log1p(self.rate * math.expm1(pure)) if is_bounded else math.inf
        with np.errstate(all="ignore"):  # the exponential of a loss above 709 overflows to infinity
            return min(float(next(self.compose(steps)).get_epsilon_for_delta(delta - ROUNDING_DELTA)), bound)

    def delta(self, steps: int, epsilon: float) -> float:
        """Return the δ of so many steps at a given ε, `ROUNDING_DELTA` included."""
        return total_delta({self: steps}, epsilon)


def compose_steps(*stages: Mapping[Pair, int]) -> Iterator[Any]:
    """Yield the privacy-loss distribution of all steps so far after each stage, which has numbers of steps by kind."""
    kinds = {pair for stage in stages for pair in stage}
    if len(kinds) == 1:
        (pair,) = kinds
        yield from pair.compose(*itertools.accumulate(stage.get(pair, 0) for stage in stages))
        return
    interval = max(
        min(pair.grid_interval for pair in kinds), max(pair.largest_loss for pair in kinds) / MAX_GRID_POINTS
    )
    one_step, total = {pair: pair.loss_distribution(interval) for pair in kinds}, None
    for stage in stages:
        with np.errstate(all="ignore"):
            for pair, count in stage.items():
                part = one_step[pair].self_compose(count)
                total = part if total is None else total.compose(part)
        yield total


def total_delta(steps: Mapping[Pair, int], epsilon: float) -> float:
    """Return the δ of numbers of steps by kind at a given ε, `ROUNDING_DELTA` included."""
    return min(float(next(compose_steps(steps)).get_delta_for_epsilon(epsilon)) + ROUNDING_DELTA, 1.0)


def validate_delta(delta: float) -> None:
    """Raise PomonaError for a δ of 1 or more, or one that is too small to be accounted for in float64."""
    require(
        delta >= MIN_DELTA,
        f"δ must be {MIN_DELTA:g} or more, got {delta:g}: below it rounding errors of the accountant could matter.",
    )
    require(delta < 1, f"δ must be below 1, got {delta:g}: at 1 everything may be revealed; below 1 / rows is usual.")


def hockey_stick_divergence(log: Array, sigma: float | None, pure: Sequence[float]) -> Array:
    """Return H at e^log of Gaussian noise × randomised responses, each of which shifts the loss by +ε or −ε."""
    if pure:
        first, *rest = pure
        p = 1 / (1 + math.exp(-first))  # of the true answer
        return p * hockey_stick_divergence(log - first, sigma, rest) + (1 - p) * hockey_stick_divergence(
            log + first, sigma, rest
        )
    if sigma is None:
        return np.maximum(-np.expm1(np.minimum(log, 0.0)), 0.0)
    half = 1 / (2 * sigma)
    return ndtr(half - log * sigma) - np.exp(np.minimum(log + log_ndtr(-half - log * sigma), 0.0))


def import_dp_accounting() -> tuple[Any, Any]:
    """Return dp-accounting's modules `pld_pmf` and `privacy_loss_distribution`, or raise PomonaError without them."""
    try:
        from dp_accounting.pld import pld_pmf, privacy_loss_distribution
    except ImportError as error:
        raise PomonaError(
            "accounting needs the package dp-accounting: pip install 'pomona[privacy]', "
            "or use a budget that was solved on another machine."
        ) from error
    return pld_pmf, privacy_loss_distribution
