"""Privacy budgets: the noise and the index draws that a run can afford, solved before it begins."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from scipy.optimize import brentq

from ..errors import require
from .accounting import ROUNDING_DELTA, Pair, validate_delta

CURVE_POINTS = 12  # steps at which the spent ε is computed in advance
RELATIVE_TOLERANCE = 1e-4  # between a solved σ and the smallest one that meets the target
MIN_COST_RATIO = 1e-3  # cost over target is clipped here: far below the target the logarithm is not linear

_solved: set[Budget] = set()  # by this process, and therefore right


@dataclass(frozen=True)
class Budget:
    """The privacy of a run, fixed before it begins. Use `solve`, or `from_dict` for a budget solved elsewhere."""

    epsilon: float
    delta: float
    rows: int  # of the training data
    batch_size: int  # expected rows of a Poisson sample
    steps: int
    share: float  # of ε that the index draws alone would cost
    sigma: float  # noise multiplier: standard deviation of the noise over the clipping norm
    index: float  # pure ε of one index draw on its sample
    curve: tuple[tuple[int, float], ...]  # (step, ε spent after it)

    @classmethod
    def solve(
        cls, *, epsilon: float, delta: float, rows: int, batch_size: int, steps: int, share: float = 0.0
    ) -> Budget:
        """Return the budget whose index draws alone would cost share·ε and whose steps together cost ε."""
        validate_target(epsilon, delta, rows, batch_size, steps, share)
        return _solve_budget(float(epsilon), delta, rows, batch_size, steps, float(share))

    def verify(self) -> None:
        """Raise PomonaError if the steps cost more than the budget, or more than its curve says.

        Without dp-accounting a single step is verified, by its closed form.
        """
        if self in _solved:
            return
        validate_target(self.epsilon, self.delta, self.rows, self.batch_size, self.steps, self.share)
        points = ((self.steps, self.epsilon), *self.curve)
        require(
            [step for step, _ in self.curve] == sorted({step for step, _ in self.curve})
            and all(1 <= step <= self.steps for step, _ in self.curve),
            f"the curve of a budget has increasing steps from 1 to {self.steps}, got {self.curve}.",
        )
        if find_spec("dp_accounting") is None:
            points = tuple((1, epsilon) for _, epsilon in points)
        cost, epsilon = max(zip(costs_at(self.pair, points), (epsilon for _, epsilon in points), strict=True))
        require(
            cost + ROUNDING_DELTA <= self.delta * (1 + RELATIVE_TOLERANCE),
            f"a budget with σ={self.sigma:g} and index draws of ε={self.index:g} gives δ={cost:.2g} at "
            f"ε={epsilon:g}, not {self.delta:g}: solve the budget again.",
        )

    @property
    def pair(self) -> Pair:
        """Return the releases of one step."""
        return Pair(self.rate, self.sigma, (self.index,) if self.index else ())

    @property
    def rate(self) -> float:
        """Return q, the probability with which a row is in a sample."""
        return self.batch_size / self.rows

    def spent(self, step: int) -> float:
        """Return an upper bound on the ε spent after so many steps: the curve's value at its next point."""
        return next((value for place, value in self.curve if place >= step), self.epsilon) if step else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the budget as values that JSON and TOML can hold."""
        return dataclasses.asdict(self) | {"curve": [list(point) for point in self.curve]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Budget:
        """Return the budget that `to_dict` gave these values; raise PomonaError if a field is missing or unknown."""
        names = {field.name for field in dataclasses.fields(cls)}
        require(
            set(values) == names,
            f"a budget has the fields {', '.join(sorted(names))}; missing or unknown: "
            f"{', '.join(sorted(set(values) ^ names))}.",
        )
        target = ("epsilon", "delta", "rows", "batch_size", "steps", "share")
        validate_target(*(values[key] for key in target))
        return cls(**{**values, "curve": tuple((int(step), float(value)) for step, value in values["curve"])})


@lru_cache(maxsize=64)
def costs_at(pair: Pair, points: tuple[tuple[int, float], ...]) -> list[float]:
    """Return the δ of so many steps at an ε, for each point; of a single step in closed form."""
    if {steps for steps, _ in points} == {1}:
        losses = np.array([epsilon for _, epsilon in points])
        return [float(delta) for delta in np.maximum(pair.delta_if_removed(losses), pair.delta_if_added(losses))]
    steps = sorted({steps for steps, _ in points})
    composed = dict(zip(steps, pair.compose(*steps), strict=True))
    return [float(composed[count].get_delta_for_epsilon(epsilon)) for count, epsilon in points]


@lru_cache(maxsize=64)
def _solve_budget(epsilon: float, delta: float, rows: int, batch_size: int, steps: int, share: float) -> Budget:
    """Solve a validated target, once for each set of arguments."""
    rate = batch_size / rows
    index = solve_index_epsilon(share * epsilon, delta, rate, steps)
    sigma = solve_noise_multiplier(epsilon, delta, rate, steps, index)
    pair = Pair(rate, sigma, (index,) if index else ())
    places = sorted({math.ceil(steps * k / CURVE_POINTS) for k in range(1, CURVE_POINTS + 1)})
    costs = [min(float(loss.get_epsilon_for_delta(delta - ROUNDING_DELTA)), epsilon) for loss in pair.compose(*places)]
    curve = tuple(zip(places, costs, strict=True))
    budget = Budget(epsilon, delta, rows, batch_size, steps, share, sigma, index, curve)
    _solved.add(budget)
    return budget


def validate_target(epsilon: float, delta: float, rows: int, batch_size: int, steps: int, share: float) -> None:
    """Raise PomonaError for a target that gives no privacy or that no run can meet."""
    require(0 < epsilon < math.inf, f"ε must be above 0 and finite, got {epsilon:g}.")
    require(rows >= 1 and steps >= 1, f"rows and steps must be 1 or more, got {rows} and {steps}.")
    require(
        0 < delta < 1 / rows,
        f"δ must lie between 0 and 1/N = {1 / rows:.2g} for {rows} rows, got {delta:g}: a δ of 1/N allows a mechanism "
        "that publishes a row unchanged.",
    )
    validate_delta(delta)
    require(1 <= batch_size <= rows, f"batch_size must lie in 1 … {rows}, the number of rows, got {batch_size}.")
    require(0 <= share < 1, f"share is the part of ε for the index draws, in [0, 1), got {share:g}.")


@lru_cache(maxsize=64)
def solve_index_epsilon(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Return the pure ε that each index draw may have so that all draws together cost `epsilon`."""
    if not epsilon:
        return 0.0
    start = epsilon / (rate * math.sqrt(2 * steps * math.log(1 / delta)))  # from advanced composition
    return solve_monotone(lambda cost: Pair(rate, pure=(cost,)).delta(steps, epsilon), delta, start, rising=True)


@lru_cache(maxsize=64)
def solve_noise_multiplier(epsilon: float, delta: float, rate: float, steps: int, index: float = 0.0) -> float:
    """Return the smallest σ with which so many steps, each with an index draw of ε = `index`, cost `epsilon`."""
    pure = (index,) if index else ()
    start = 1 + rate * math.sqrt(steps) / epsilon
    return solve_monotone(lambda sigma: Pair(rate, sigma, pure).delta(steps, epsilon), delta, start, rising=False)


def solve_monotone(cost: Callable[[float], float], target: float, start: float, rising: bool) -> float:
    """Return the argument at which a monotone cost meets its target, rounded to the side that costs no more."""

    @cache
    def excess(log: float) -> float:
        return math.log(max(cost(math.exp(log)) / target, MIN_COST_RATIO))

    cheaper = -math.log(2) if rising else math.log(2)
    high = math.log(start)
    while excess(high) > 0:
        high += cheaper
    while excess(high - cheaper) <= 0:
        high -= cheaper
    root = float(brentq(excess, high - cheaper, high, xtol=RELATIVE_TOLERANCE / 4))
    while excess(root) > 0:
        root += math.copysign(RELATIVE_TOLERANCE / 4, cheaper)
    return math.exp(root)
