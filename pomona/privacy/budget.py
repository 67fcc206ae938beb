"""Privacy budgets: the noise and the index draws that a run can afford, solved before it begins."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from numbers import Integral
from typing import Any

import numpy as np
from scipy.optimize import brentq

from ..errors import require
from .accounting import ROUNDING_DELTA, Pair, compose_steps, total_delta, validate_delta
from .ramp import CONSTANT, Ramp, RampLike
from .second_accountant import LossBound

CURVE_POINTS = 12  # steps at which the spent ε is computed in advance
RELATIVE_TOLERANCE = 1e-4  # between a solved σ and the smallest one that meets the target
MIN_COST_RATIO = 1e-3  # cost over target is clipped here: far below the target the logarithm is not linear
BOUND_TOLERANCE = 0.03  # of ε, that the second accountant may miss
MIN_BOUND_INTERVAL = 2e-5  # of its grid
MAX_STEPS = 10_000_000
RAMPS = frozenset({"noise_ramp", "index_ramp"})  # fields that are left out where they are constant

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
    noise_ramp: Ramp = CONSTANT  # the factor of σ in each step
    index_ramp: Ramp = CONSTANT  # the factor of `index` in each step

    @classmethod
    def solve(
        cls,
        *,
        epsilon: float,
        delta: float,
        rows: int,
        batch_size: int,
        steps: int,
        share: float = 0.0,
        noise_ramp: RampLike = None,
        index_ramp: RampLike = None,
    ) -> Budget:
        """Return the budget whose index draws alone would cost share·ε and whose steps together cost ε.

        The ramps are factors of σ and of the ε of an index draw: step t has σ_t = noise_ramp(t)·σ.
        """
        validate_target(epsilon, delta, rows, batch_size, steps, share)
        ramps = Ramp.of(noise_ramp), Ramp.of(index_ramp)
        require(share > 0 or ramps[1].is_constant, "an index ramp needs index draws: give a share above 0.")
        return _solve_budget(float(epsilon), delta, rows, batch_size, steps, float(share), *ramps)

    def verify(self) -> None:
        """Raise PomonaError if the steps cost more than the budget, or more than its curve says.

        Without dp-accounting it is refused where the second accountant shows that all steps cost more, by some
        hundredths of ε.
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
        require(self.share > 0 or self.index_ramp.is_constant, "an index ramp needs index draws: give a share above 0.")
        cost, epsilon = max(zip(costs_at(self, points), (epsilon for _, epsilon in points), strict=True))
        require(
            cost + ROUNDING_DELTA <= self.delta * (1 + RELATIVE_TOLERANCE),
            f"a budget with σ={self.sigma:g} and index draws of ε={self.index:g} gives δ={cost:.2g} at "
            f"ε={epsilon:g}, not {self.delta:g}: solve the budget again.",
        )

    @property
    def pair(self) -> Pair:
        """Return the releases of a step where no ramp changes them."""
        return make_pair(self.rate, self.sigma, self.index)

    def sigma_at(self, step: int) -> float:
        """Return σ of a step, numbered from 0."""
        return self.sigma * self.noise_ramp(step, self.steps)

    def index_at(self, step: int) -> float:
        """Return the pure ε of the index draw of a step, numbered from 0."""
        return self.index * self.index_ramp(step, self.steps)

    def pairs(self, steps: Iterable[int]) -> Counter[Pair]:
        """Return how many of some steps, numbered from 0, have the same releases."""
        kinds = Counter((self.sigma_at(step), self.index_at(step)) for step in steps)
        return Counter({make_pair(self.rate, *kind): count for kind, count in kinds.items()})

    @property
    def rate(self) -> float:
        """Return q, the probability with which a row is in a sample."""
        return self.batch_size / self.rows

    def spent(self, step: int) -> float:
        """Return an upper bound on the ε spent after so many steps: the curve's value at its next point."""
        return next((value for place, value in self.curve if place >= step), self.epsilon) if step else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the budget as values that JSON and TOML can hold."""
        values = dataclasses.asdict(self) | {"curve": [list(point) for point in self.curve]}
        return {key: value for key, value in values.items() if key not in RAMPS or getattr(self, key) != CONSTANT}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Budget:
        """Return the budget that `to_dict` gave these values; raise PomonaError if a field is missing or unknown."""
        names = {field.name for field in dataclasses.fields(cls)} - RAMPS
        wrong = (set(values) - RAMPS) ^ names
        require(
            not wrong,
            f"a budget has the fields {', '.join(sorted(names))}; missing or unknown: {', '.join(sorted(wrong))}.",
        )
        target = ("epsilon", "delta", "rows", "batch_size", "steps", "share")
        validate_target(*(values[key] for key in target))
        curve = tuple((int(step), float(value)) for step, value in values["curve"])
        ramps = {key: Ramp.of(values.get(key)) for key in RAMPS}
        return cls(**{**values, "curve": curve, **ramps})


def make_pair(rate: float, sigma: float, index: float) -> Pair:
    """Return the releases of a step with noise, and with an index draw unless its ε is 0."""
    return Pair(rate, sigma, (index,) if index else ())


@lru_cache(maxsize=64)
def costs_at(budget: Budget, points: tuple[tuple[int, float], ...]) -> list[float]:
    """Return the δ of so many steps of a budget at an ε, for each point; of a single step in closed form.

    Without dp-accounting it is a lower bound on δ, by the second accountant.
    """
    if budget.steps == 1:
        losses = np.array([epsilon for _, epsilon in points])
        (pair,) = budget.pairs([0])
        return [float(delta) for delta in np.maximum(pair.delta_if_removed(losses), pair.delta_if_added(losses))]
    if find_spec("dp_accounting") is None:
        return [bound_cost(budget, *point) for point in points]
    steps = sorted({steps for steps, _ in points})
    composed = dict(zip(steps, compose_budget(budget.pairs, steps), strict=True))
    return [float(composed[count].get_delta_for_epsilon(epsilon)) for count, epsilon in points]


def bound_cost(budget: Budget, steps: int, epsilon: float) -> float:
    """Return a lower bound on the δ of so many steps of a budget at an ε: of a single step, or of all steps."""
    kinds, at = budget.pairs(range(steps)), np.array(epsilon)
    single = max(float(delta(at)) for pair in kinds for delta in (pair.delta_if_removed, pair.delta_if_added))
    if steps < budget.steps:
        return single
    interval = max(BOUND_TOLERANCE * epsilon / steps, MIN_BOUND_INTERVAL)
    return max(single, LossBound.of(kinds, interval, round_up=False).delta(epsilon))


def compose_budget(pairs: Callable[[Iterable[int]], Counter[Pair]], counts: Sequence[int]) -> Iterator[Any]:
    """Yield the privacy-loss distribution of the first steps, for increasing numbers of them."""
    return compose_steps(*(pairs(range(start, stop)) for start, stop in itertools.pairwise([0, *counts])))


@lru_cache(maxsize=64)
def _solve_budget(
    epsilon: float,
    delta: float,
    rows: int,
    batch_size: int,
    steps: int,
    share: float,
    noise_ramp: Ramp,
    index_ramp: Ramp,
) -> Budget:
    """Solve a validated target, once for each set of arguments."""
    ramps, rate = (noise_ramp, index_ramp), batch_size / rows
    index = solve_index_epsilon(share * epsilon, delta, rate, steps, index_ramp)
    sigma = solve_noise_multiplier(epsilon, delta, rate, steps, index, *ramps)
    budget = Budget(epsilon, delta, rows, batch_size, steps, share, sigma, index, (), *ramps)
    places = sorted({math.ceil(steps * k / CURVE_POINTS) for k in range(1, CURVE_POINTS + 1)})
    composed = compose_budget(budget.pairs, places)
    costs = [min(float(loss.get_epsilon_for_delta(delta - ROUNDING_DELTA)), epsilon) for loss in composed]
    budget = dataclasses.replace(budget, curve=tuple(zip(places, costs, strict=True)))
    _solved.add(budget)
    return budget


def validate_target(epsilon: float, delta: float, rows: int, batch_size: int, steps: int, share: float) -> None:
    """Raise PomonaError for a target that gives no privacy or that no run can meet."""
    require(0 < epsilon < math.inf, f"ε must be above 0 and finite, got {epsilon:g}.")
    for name, count in (("rows", rows), ("steps", steps)):
        require(isinstance(count, Integral), f"{name} is a number of {name}, a whole one, got {count}: round it.")
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
def solve_index_epsilon(epsilon: float, delta: float, rate: float, steps: int, ramp: Ramp = CONSTANT) -> float:
    """Return the pure ε that each index draw may have, times its factor, so that all together cost `epsilon`."""
    if not epsilon:
        return 0.0
    start = epsilon / (rate * math.sqrt(2 * steps * math.log(1 / delta)))  # from advanced composition

    def cost(index: float) -> float:
        factors = Counter(ramp(step, steps) for step in range(steps))
        return total_delta({Pair(rate, pure=(index * factor,)): count for factor, count in factors.items()}, epsilon)

    return solve_monotone(cost, delta, start, rising=True)


@lru_cache(maxsize=64)
def solve_noise_multiplier(
    epsilon: float,
    delta: float,
    rate: float,
    steps: int,
    index: float = 0.0,
    noise_ramp: Ramp = CONSTANT,
    index_ramp: Ramp = CONSTANT,
) -> float:
    """Return the smallest σ with which so many steps, each with an index draw of ε = `index`, cost `epsilon`.

    The ramps are factors of σ and of `index` in each step.
    """
    factors = Counter((noise_ramp(step, steps), index_ramp(step, steps)) for step in range(steps))

    def cost(sigma: float) -> float:
        pairs = {make_pair(rate, sigma * noise, index * draw): count for (noise, draw), count in factors.items()}
        return total_delta(pairs, epsilon)

    return solve_monotone(cost, delta, 1 + rate * math.sqrt(steps) / epsilon, rising=False)


def solve_steps(*, epsilon: float, delta: float, rows: int, batch_size: int, sigma: float) -> int:
    """Return T, the largest number of steps with noise of σ that costs at most ε.

    So do the authors of GIP choose T; σ is then solved again for T steps, which pays for the index draws as well.
    """
    validate_target(epsilon, delta, rows, batch_size, 1, 0.0)
    pair = Pair(batch_size / rows, sigma)

    def is_paid(steps: int) -> bool:
        return pair.delta(steps, epsilon) <= delta

    require(
        is_paid(1), f"one step with σ={sigma:g} costs more than ε={epsilon:g} at δ={delta:g}: give a larger σ or ε."
    )
    low, high = 1, 2
    while is_paid(high):
        low, high = high, 2 * high
        require(high < MAX_STEPS, f"σ={sigma:g} allows more than {MAX_STEPS:,} steps: give a smaller σ or ε.")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_paid(middle) else (low, middle)
    return low


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
