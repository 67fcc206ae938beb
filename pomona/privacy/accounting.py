"""What private training spends: exact accounting of index draws and noisy gradients, before the run.

A step takes one Poisson sample, in which each row is with probability q. Of it, it releases an index set (pure
ε-DP) and a noisy gradient (Gaussian, σ times the clipping norm). Both see the same sample, so they are composed
first and amplified by the sampling once, as a pair. Neighbours differ in one row, added or removed.

Any ε-DP mechanism is a function of randomised response, so the pair of a step is dominated by randomised
response × Gaussian: P against Q. Sampling turns it into (1 − q) Q + q P against Q where the row is removed,
and P against (1 − q) P + q Q where it is added (Zhu, Dong and Wang, AISTATS 2022). The hockey-stick divergences of
both have a closed form; `dp-accounting` composes them over the steps, rounding up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from ..errors import PomonaError, require
from ..theory import gip

Array = NDArray[np.float64]

FINEST = 5e-4  # of the grid of privacy losses; a finer one lowers ε by less than 1e−4 of itself
POINTS = 1_000, 20_000  # of the grid, at least and at most, from 0 to its end
SMALLEST = 1e-4  # end of the grid: below it the differences that it is made from are rounding
DEVIATIONS = 10.0  # of the Gaussian loss within the grid: what is beyond weighs 1e−23
LARGEST = 700.0  # loss of which the exponential is a float
PLACES = 12  # at which the spent ε is worked out in advance
CLOSE = 1e-4  # relative: how near a solved σ comes to the smallest that will do


@dataclass(frozen=True)
class Pair:
    """What one step releases of one Poisson sample: pure mechanisms, and Gaussian noise of σ (None is none)."""

    rate: float  # q
    sigma: float | None = None
    pure: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require(0 < self.rate <= 1, f"a row is drawn with a probability in (0, 1], got {self.rate:g}.")
        require(self.sigma is None or self.sigma > 0, f"σ must be above 0, got {self.sigma}.")
        require(min(self.pure, default=0.0) >= 0, f"the ε of a draw must not be negative, got {self.pure}.")

    def plain(self, log: Array) -> Array:
        """H(P ‖ Q) at e^log: P's mass beyond e^log times Q's, without sampling."""
        return product(log, self.sigma, self.pure)

    def removed(self, epsilon: Array) -> Array:
        """The δ at each ε where a row is removed: ∫ max(0, (1 − q) Q + q P − e^ε Q)."""
        over = np.expm1(epsilon) + self.rate
        some = over > 0
        log = np.log(np.where(some, over, 1.0) / self.rate)
        return np.where(some, self.rate * self.plain(log), -np.expm1(epsilon))

    def added(self, epsilon: Array) -> Array:
        """The δ at each ε where a row is added: ∫ max(0, P − e^ε ((1 − q) P + q Q))."""
        left = 1 - (1 - self.rate) * np.exp(epsilon)
        some = left > 0
        log = epsilon + np.log(self.rate / np.where(some, left, 1.0))
        return np.where(some, left * self.plain(log), 0.0)

    def distribution(self) -> Any:
        """The privacy-loss distribution of dp-accounting, rounded up."""
        pmf, pld = library()
        spread = 0.0 if self.sigma is None else 1 / (2 * self.sigma**2) + DEVIATIONS / self.sigma
        end = math.log1p(self.rate * math.expm1(min(sum(self.pure) + spread, LARGEST)))
        count = min(max(math.ceil(end / FINEST), POINTS[0]), POINTS[1])
        interval, places = max(end, SMALLEST) / count, np.arange(-count, count + 1)
        losses = np.asarray(places * interval, dtype=np.float64)
        parts = [
            pmf.create_pmf_pessimistic_connect_dots(interval, places, np.clip(delta(losses), 0, 1))
            for delta in (self.removed, self.added)
        ]
        return pld.PrivacyLossDistribution(*parts)

    def composed(self, *steps: int) -> Iterator[Any]:
        """The distribution of each so many steps together."""
        one = self.distribution()
        for count in steps:
            with np.errstate(all="ignore"):  # some of its bounds on the tails overflow, and are not taken
                yield one.self_compose(count)

    def epsilon(self, steps: int, delta: float) -> float:
        """What so many steps cost at this δ: no more than all their losses together, where each has a largest one."""
        pure = sum(self.pure)
        bounded = self.sigma is None and pure < LARGEST
        most = steps * math.log1p(self.rate * math.expm1(pure)) if bounded else math.inf
        with np.errstate(all="ignore"):  # a loss above 709 is beyond what floats can tell, and becomes infinite
            return min(float(next(self.composed(steps)).get_epsilon_for_delta(delta)), most)

    def delta(self, steps: int, epsilon: float) -> float:
        """What so many steps cost at this ε."""
        return float(next(self.composed(steps)).get_delta_for_epsilon(epsilon))


def product(log: Array, sigma: float | None, pure: Sequence[float]) -> Array:
    """H at e^log of Gaussian × randomised responses: each response shifts the loss by +ε or by −ε."""
    if pure:
        first, *rest = pure
        likely = 1 / (1 + math.exp(-first))
        return likely * product(log - first, sigma, rest) + (1 - likely) * product(log + first, sigma, rest)
    if sigma is None:
        return np.maximum(-np.expm1(np.minimum(log, 0.0)), 0.0)
    half = 1 / (2 * sigma)
    return ndtr(half - log * sigma) - np.exp(np.minimum(log + log_ndtr(-half - log * sigma), 0.0))


def library() -> tuple[Any, Any]:
    """dp-accounting's modules, which come with an extra."""
    try:
        from dp_accounting.pld import pld_pmf, privacy_loss_distribution
    except ImportError as error:
        raise PomonaError(
            "accounting needs the package dp-accounting: pip install 'pomona[privacy]', "
            "or take a budget that was solved elsewhere."
        ) from error
    return pld_pmf, privacy_loss_distribution


# ---- the other way round: from a target to θ and σ


@lru_cache(maxsize=64)
def index_epsilon(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """The ε of one index draw on its sample, of which so many together cost `epsilon`."""
    if not epsilon:
        return 0.0
    start = epsilon / (rate * math.sqrt(2 * steps * math.log(1 / delta)))  # advanced composition's
    return solve(lambda cost: Pair(rate, pure=(cost,)).delta(steps, epsilon), delta, start, rising=True)


@lru_cache(maxsize=64)
def noise_multiplier(epsilon: float, delta: float, rate: float, steps: int, index: float = 0.0) -> float:
    """The smallest σ with which so many steps, each with an index draw of ε = `index`, cost `epsilon`."""
    pure = (index,) if index else ()
    start = 1 + rate * math.sqrt(steps) / epsilon
    return solve(lambda sigma: Pair(rate, sigma, pure).delta(steps, epsilon), delta, start, rising=False)


def solve(cost: Callable[[float], float], target: float, start: float, rising: bool) -> float:
    """Where a monotone cost meets its target, on the side that costs no more."""

    @cache
    def excess(log: float) -> float:
        return math.log(max(cost(math.exp(log)) / target, 1e-3))  # far below it is no straight line

    better = -math.log(2) if rising else math.log(2)
    high = math.log(start)
    while excess(high) > 0:
        high += better
    while excess(high - better) <= 0:
        high -= better
    found = float(brentq(excess, high - better, high, xtol=CLOSE / 4))
    while excess(found) > 0:
        found += math.copysign(CLOSE / 4, better)
    return math.exp(found)


@dataclass(frozen=True)
class Budget:
    """A run's privacy, settled before it begins: `solve` one, or read one that was solved elsewhere."""

    epsilon: float
    delta: float
    rows: int  # of the training data
    batch_size: int  # expected rows of a Poisson sample
    steps: int
    share: float  # of ε that the index draws alone would cost
    sigma: float  # noise multiplier: the noise's deviation over the clipping norm
    index: float  # pure ε of one index draw, on its sample
    curve: tuple[tuple[int, float], ...]  # (step, ε spent after it)

    @classmethod
    def solve(
        cls, *, epsilon: float, delta: float, rows: int, batch_size: int, steps: int, share: float = 0.0
    ) -> Budget:
        """σ, and the ε of an index draw, for a target: the draws alone would cost share·ε, all together costs ε."""
        check(epsilon, delta, rows, batch_size, steps, share)
        return _solve(float(epsilon), delta, rows, batch_size, steps, float(share))

    def verify(self) -> None:
        """Refuse numbers that do not keep the promise, as far as there is an accountant to ask."""
        if find_spec("dp_accounting") is None:
            return
        pair = Pair(self.rate, self.sigma, (self.index,) if self.index else ())
        cost = pair.delta(self.steps, self.epsilon)
        require(
            cost <= self.delta * (1 + CLOSE),
            f"a budget with σ={self.sigma:g} and index draws of ε={self.index:g} gives δ={cost:.2g} at "
            f"ε={self.epsilon:g}, not {self.delta:g}: solve it anew.",
        )

    @property
    def rate(self) -> float:
        """q, with which a row is in a sample."""
        return self.batch_size / self.rows

    def spent(self, step: int) -> float:
        """The ε spent after so many steps, from above: the curve's value at its next place."""
        return next((value for place, value in self.curve if place >= step), self.epsilon) if step else 0.0

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"curve": [list(point) for point in self.curve]}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Budget:
        """A budget from `to_dict`."""
        names = {field.name for field in dataclasses.fields(cls)}
        require(
            set(values) == names,
            f"a budget has {', '.join(sorted(names))}; these are missing or too many: "
            f"{', '.join(sorted(set(values) ^ names))}.",
        )
        asked = ("epsilon", "delta", "rows", "batch_size", "steps", "share")
        check(*(values[key] for key in asked))
        return cls(**{**values, "curve": tuple((int(step), float(value)) for step, value in values["curve"])})


@lru_cache(maxsize=64)
def _solve(epsilon: float, delta: float, rows: int, batch_size: int, steps: int, share: float) -> Budget:
    rate = batch_size / rows
    index = index_epsilon(share * epsilon, delta, rate, steps)
    sigma = noise_multiplier(epsilon, delta, rate, steps, index)
    pair = Pair(rate, sigma, (index,) if index else ())
    places = sorted({math.ceil(steps * k / PLACES) for k in range(1, PLACES + 1)})
    costs = [min(float(loss.get_epsilon_for_delta(delta)), epsilon) for loss in pair.composed(*places)]
    curve = tuple(zip(places, costs, strict=True))
    return Budget(epsilon, delta, rows, batch_size, steps, share, sigma, index, curve)


def check(epsilon: float, delta: float, rows: int, batch_size: int, steps: int, share: float) -> None:
    """Refuse a target that promises nothing or cannot be kept."""
    require(0 < epsilon < math.inf, f"ε must be above 0 and finite, got {epsilon:g}.")
    require(rows >= 1 and steps >= 1, f"rows and steps must be 1 or more, got {rows} and {steps}.")
    require(
        0 < delta < 1 / rows,
        f"δ must lie between 0 and 1/N = {1 / rows:.2g} for {rows} rows, got {delta:g}: from 1/N on it allows to "
        "publish a row as it is.",
    )
    require(1 <= batch_size <= rows, f"batch_size must lie in 1 … {rows}, the rows there are, got {batch_size}.")
    require(0 <= share < 1, f"share is the part of ε for the index draws, in [0, 1), got {share:g}.")


# ---- which share is best


@dataclass(frozen=True)
class Split:
    """A share of ε for the indices, and the squared error it leads to in one step's mean gradient."""

    share: float
    theta: float
    sigma: float
    lost: float  # E[i] / m
    pruning: float
    noise: float

    @property
    def error(self) -> float:
        return self.pruning + self.noise


SHARES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def splits(
    sizes: Sequence[int],
    kept: Sequence[int],
    *,
    clip: float,
    epsilon: float,
    delta: float,
    rows: int,
    batch_size: int,
    steps: int,
    spread: float | None = None,
    shares: Sequence[float] = SHARES,
) -> list[Split]:
    """What each share leads to, for mean gradients of N(0, spread²): the corrected pruning error of Theorem 3, and

        m (σ C / B)²,

    the noise on the m kept coordinates. A share of 0 is random-k, and is always among them. Without a spread it is
    C / √d, the largest that clipping allows, where pruning costs most and good indices are worth most.
    """
    spread = clip / math.sqrt(sum(sizes)) if spread is None else spread
    check(epsilon, delta, rows, batch_size, steps, 0.0)
    found = []
    for share in dict.fromkeys((0.0, *shares)):
        index = index_epsilon(share * epsilon, delta, batch_size / rows, steps)
        sigma = noise_multiplier(epsilon, delta, batch_size / rows, steps, index)
        theta = gip.theta_for_epsilon(index, sizes, kept)
        pruning = gip.pruning_mse(theta, sizes, kept, spread)
        noise = sum(kept) * (sigma * clip / batch_size) ** 2
        found.append(Split(share, theta, sigma, gip.expected_swaps(theta, sizes, kept) / sum(kept), pruning, noise))
    return found


def best_split(sizes: Sequence[int], kept: Sequence[int], **setting: Any) -> Split:
    """The split of least predicted error; the authors' share is 0.01."""
    return min(splits(sizes, kept, **setting), key=lambda split: split.error)
