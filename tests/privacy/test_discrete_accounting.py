"""Discrete noise is accounted for as continuous noise of a slightly smaller variance, by computation; small δ."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import log_ndtr

from pomona.errors import PomonaError
from pomona.privacy import Budget, Pair
from pomona.privacy.accounting import MIN_DELTA
from pomona.privacy.clipping import SMOOTHING_VARIANCE, UNITS, GradientGrid

PLACES = np.arange(-200, 201)


def discrete(center: float, variance: float) -> np.ndarray:
    """Return the probabilities of the discrete Gaussian at PLACES."""
    weights = np.exp(-((PLACES - center) ** 2) / (2 * variance))
    return weights / weights.sum()


@pytest.mark.parametrize("s", [0.5, 0.8, 1.0])
def test_sum_of_gaussians_at_the_integers_hardly_depends_on_the_center(s):
    sums = [
        np.exp(-((PLACES - y) ** 2) / (2 * s * s)).sum() / (s * math.sqrt(2 * math.pi)) for y in np.linspace(0, 1, 101)
    ]
    bound = 2 * math.exp(-2 * math.pi**2 * s**2) * (1 + 1e-3)
    assert 0.9 * bound < np.abs(np.array(sums) - 1).max() < bound
    assert 2 * math.exp(-2 * math.pi**2 * SMOOTHING_VARIANCE) < 2e-77


@pytest.mark.parametrize(("variance", "s", "mean"), [(5.0, 0.8, 0), (5.0, 0.8, 2), (9.0, 1.0, 0)])
def test_discrete_noise_is_post_processed_continuous_noise(variance, s, mean):
    """Draw y ~ N(mean, σ² − s²), then z ∝ exp(−(z − y)² / (2s²)): z has the discrete distribution of variance σ²."""
    spread = math.sqrt(variance - s * s)

    def joint(y: float, z: int) -> float:
        row = np.exp(-((PLACES - y) ** 2) / (2 * s * s))
        return math.exp(-((y - mean) ** 2) / (2 * spread**2) - (z - y) ** 2 / (2 * s * s)) / row.sum()

    expected = discrete(mean, variance)
    for z in range(mean - 4, mean + 5):
        near = ((z - mean) * spread**2 / variance) + mean
        mass = quad(joint, near - 12, near + 12, args=(z,), epsabs=1e-14, epsrel=1e-12, points=[near])[0]
        found = mass / (spread * math.sqrt(2 * math.pi))
        assert found == pytest.approx(expected[200 + z], rel=6 * math.exp(-2 * math.pi**2 * s * s) + 1e-9)


def divergences(p: np.ndarray, q: np.ndarray, epsilons: np.ndarray) -> np.ndarray:
    """Return the hockey-stick divergence of two discrete distributions at each ε."""
    return np.array([np.maximum(p - math.exp(e) * q, 0).sum() for e in epsilons])


@pytest.mark.parametrize("shift", [(3,), (1,), (2, 1), (3, 4), (1, -5), (2, 2, 1)])
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_discrete_noise_costs_no_more_than_the_continuous_noise_it_is_accounted_as(shift, rate):
    """In one, two and three dimensions, for both neighbours, with and without sampling; here s² = 1 and σ² = 17."""
    variance, smoothing = 17.0, 1.0
    places = 60 if len(shift) < 3 else 24  # 14 and 6 standard deviations
    axes = [discrete(0, variance)[200 - places : 201 + places] for _ in shift]
    moved = [discrete(step, variance)[200 - places : 201 + places] for step in shift]
    q, p = (np.array(list(map(math.prod, itertools.product(*parts)))) for parts in (axes, moved))
    sigma = math.sqrt((variance - smoothing) / sum(step**2 for step in shift))
    slack = 8 * len(shift) * math.exp(-2 * math.pi**2 * smoothing)
    epsilons = np.linspace(0, 2.5, 41)
    pair = Pair(rate, sigma)
    sampled = (1 - rate) * q + rate * p
    assert (divergences(sampled, q, epsilons) <= pair.delta_if_removed(epsilons - slack) + 1e-12).all()
    reverse = (1 - rate) * p + rate * q
    assert (divergences(p, reverse, epsilons) <= pair.delta_if_added(epsilons - slack) + 1e-12).all()
    # The bound is tight: noise accounted for as 5 % larger than it is would be refuted.
    larger = Pair(rate, 1.05 * sigma)
    assert (divergences(sampled, q, epsilons) > larger.delta_if_removed(epsilons)).any()


def test_coarse_discrete_noise_can_cost_more_than_continuous_noise_of_its_own_variance():
    """That is why the variance is increased by s² = 9: at σ² = 0.25 the lattice shows."""
    epsilons = np.linspace(0, 6, 601)
    found = divergences(discrete(1, 0.25), discrete(0, 0.25), epsilons)
    assert (found > Pair(1.0, 0.5).delta_if_removed(epsilons) + 1e-3).any()


@settings(max_examples=50, deadline=None)
@given(sigma=st.floats(0.1, 1000.0), clip=st.floats(1e-5, 1e5))
def test_noise_of_the_grid_is_what_the_accountant_asks_for(sigma, clip):
    variance = GradientGrid(clip, 1000).noise_variance(sigma)
    assert variance - SMOOTHING_VARIANCE >= (sigma * UNITS) ** 2
    assert math.sqrt(variance) / UNITS == pytest.approx(sigma, rel=1e-9)


# ---- small δ


def exact_epsilon(sigma: float, steps: int, delta: float) -> float:
    """Return ε of Gaussian noise without sampling: so many steps are one of σ / √steps (Balle and Wang, 2018)."""
    mu = math.sqrt(steps) / sigma

    def excess(epsilon: float) -> float:
        one, other = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
        return one + math.log(-math.expm1(other - one)) - math.log(delta)

    return float(brentq(excess, 1e-6, 500))


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (4.0, 1), (5.0, 100), (20.0, 1000)])
def test_epsilon_is_never_too_small_down_to_the_smallest_delta(sigma, steps):
    pytest.importorskip("dp_accounting")
    for delta in (1e-5, 1e-8, MIN_DELTA):
        exact = exact_epsilon(sigma, steps, delta)
        assert exact <= Pair(1.0, sigma).epsilon(steps, delta) <= exact * 1.001


@pytest.mark.parametrize("delta", [9.9e-11, 1e-12, 1e-16, 0.0])
def test_delta_below_the_floor_is_refused(delta):
    with pytest.raises(PomonaError, match="δ must (be 1e-10 or more|lie between 0)"):
        Budget.solve(epsilon=1, delta=delta, rows=1000, batch_size=100, steps=10)
    with pytest.raises(PomonaError, match="δ must be 1e-10 or more, got .*: below it rounding errors"):
        Pair(0.1, 1.0).epsilon(10, delta)
