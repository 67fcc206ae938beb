"""The probability that no random unit fits a target weight: Lemmas A.4 and A.5 of Chijiwa et al. (2021)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binom

from ...errors import require

Array = NDArray[np.float64]


def log_miss_probability(target: ArrayLike, tau: float, R: int) -> Array:
    """Return the log-probability that none of R draws of U[−1, 1] is within τ of the target."""
    w = np.asarray(target, dtype=float)
    largest = float(np.abs(w).max())
    require(largest <= 1, f"a weight must lie in [−1, 1] to be drawn, got {largest:g}: scale the target.")
    return R * np.log1p(-(np.minimum(1, w + tau) - np.maximum(-1, w - tau)) / 2)


def failure(w: ArrayLike, tau: float, R: int, units: int) -> float:
    """Return the exact probability that for some of the weights w, which share their units' u, no unit fits.

    One weight is the event (11) of Lemma A.4, (1 − p_u p_v)^units. Several weights are that of Lemma A.5: given a units
    whose u fits, the weights are independent, and all find a unit with probability Π (1 − (1 − p_v)^a).
    """
    require_valid_parameters(R=R, units=units, tau=tau)
    a = np.arange(units + 1)
    with np.errstate(divide="ignore"):  # a = 0 fails with certainty: log 0
        found = np.log1p(-np.exp(np.multiply.outer(np.atleast_1d(log_miss_probability(w, tau, R)), a))).sum(0)
    return float(binom.pmf(a, units, -np.expm1(log_miss_probability(1.0, tau, R))) @ -np.expm1(found))


def failure_printed(tau: float, R: int, units: int) -> float:
    """Return the paper's bound of the failure probability, (1 − τ²/4)^{d′R²}, as if the d′R² pairs were independent."""
    require_valid_parameters(R=R, units=units, tau=tau)
    return math.exp(units * R**2 * math.log1p(-(tau**2) / 4))


def failure_simulated(
    w: ArrayLike, tau: float, R: int, units: int, draws: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Return the share of simulated sets of units without a fit for some of the weights, and its standard error."""
    require_valid_parameters(R=R, units=units, tau=tau, draws=draws)
    targets, generator = np.atleast_1d(np.asarray(w, dtype=float)), np.random.default_rng(seed)
    failed = 0
    for _ in range(draws):
        u = (np.abs(generator.uniform(-1, 1, (units, R)) - 1) <= tau).any(-1)
        v = (np.abs(generator.uniform(-1, 1, (len(targets), units, R)) - targets[:, None, None]) <= tau).any(-1)
        failed += not (u & v).any(-1).all()
    share = failed / draws
    return share, math.sqrt(max(share * (1 - share), 1 / draws) / draws)


def require_valid_parameters(**given: float) -> None:
    """Raise PomonaError for an epsilon, delta or tau outside (0, 1), and for any other value that is not a count."""
    for name, value in given.items():
        if name in ("epsilon", "delta", "tau"):
            require(0 < value < 1, f"{name} must lie between 0 and 1, got {value:g}.")
        else:
            require(value >= 1 and value == int(value), f"{name} is a whole number, at least 1, got {value:g}.")
