"""Lemmas and weight distributions of Qian & Klabjan (2021): exact tails, simulations, and wrong printed forms.

Monte-Carlo tests have a fixed seed; "within 4 standard errors" is the error bar unless a test says another.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import spectral_norm
from scipy import stats
from slow_cases import slow_after

from pomona.theory import bounds
from pomona.theory.bounds import Gaussian, Moments, Uniform
from pomona.theory.bounds.lemmas import bin_count_bound, order_statistic_bound

SHAPES = [(1, 2000), (4, 1000), (200, 50), (10, 4096), (120, 120)]


@pytest.mark.parametrize("shape", slow_after(2, SHAPES, one_argument=True))
@pytest.mark.parametrize("signs", [False, True])
def test_lemma_4_holds_for_every_shape(shape: tuple[int, int], signs: bool) -> None:
    """E‖A‖ of 20 matrices of seed 0, of uniform entries or of signs, is at most C times the three terms, within 10 %.

    Table 3's C = 0.63, measured on square matrices, fails for matrices of few rows.
    """
    draw = np.random.default_rng(0)
    law = Moments(1.0, 1.0 if signs else 1.8)
    scale = (1.0 if signs else math.sqrt(3)) / math.sqrt(max(shape))
    draws = (draw.uniform(-1, 1, shape) for _ in range(20))
    found = np.mean([spectral_norm(scale * (np.sign(A) if signs else A)) for A in draws])
    assert found <= law.expected(*shape) <= 1.1 * found
    y = min(shape) / max(shape)
    if y < 0.01:
        assert found > bounds.LATALA * (1 + math.sqrt(y) + (law.K2 * y) ** 0.25)


@pytest.mark.parametrize("a", [0.5, math.sqrt(3)])
def test_uniform_variable_is_below_a_gaussian_in_the_convex_order(a: float) -> None:
    """E(U − t)₊ ≤ E(G − t)₊ for σ = a√(2π)/4, equal at t = 0; a smaller σ fails there."""
    sigma = a * math.sqrt(2 * math.pi) / 4
    t = np.linspace(-2 * a, 2 * a, 401)

    def gaussian(s: float) -> np.ndarray:
        return s * stats.norm.pdf(t / s) - t * stats.norm.sf(t / s)

    uniform = np.where(np.abs(t) < a, (a - t) ** 2 / (4 * a), np.maximum(-t, 0))
    assert (gaussian(sigma) - uniform >= -1e-15).all()
    assert (gaussian(sigma) - uniform)[200] == pytest.approx(0, abs=1e-15)
    assert (gaussian(0.99 * sigma) < uniform).any()


@pytest.mark.parametrize("shape", [(40, 40), (20, 80), (5, 5)])
@pytest.mark.parametrize("law", [Uniform(1.0), Gaussian(2.0), Moments(1 / 3, 1 / 5)])
def test_norms_respect_the_bounds_of_their_law(law: bounds.Law, shape: tuple[int, int]) -> None:
    """300 matrices of seed 1: the mean is below `expected`, and at most a share 0.2 exceeds `exceeded(…, 0.2)`."""
    draw, n = np.random.default_rng(1), max(shape)
    if isinstance(law, Gaussian):
        found = [spectral_norm(draw.normal(0, math.sqrt(law.K / n), shape)) for _ in range(300)]
    else:
        found = [spectral_norm(draw.uniform(-1, 1, shape) / math.sqrt(n)) for _ in range(300)]
    mean = law.expected(*shape)
    assert np.mean(found) <= mean <= 1.6 * np.mean(found)
    assert np.mean(np.array(found) > law.exceeded(mean, n, 0.2)) <= 0.2


def test_norm_tails_match_a_hand_computation() -> None:
    """exp(−s²n/8K²) for uniform entries, exp(−s²n/2K) for Gaussian ones, E/s for any."""
    once = math.exp(-1)
    assert Uniform(3.0).exceeded(1.0, 200, once) == pytest.approx(1 + 3 * math.sqrt(8 / 200))
    assert Gaussian(2.0).exceeded(1.0, 200, once) == pytest.approx(1 + math.sqrt(4 / 200))
    assert Moments().exceeded(1.0, 200, 0.1) == pytest.approx(10)


def test_lemma_1_matches_simulated_moments() -> None:
    """20 000 draws of seed 0, r = 3 of n = 7 squares of U[−2, 2]."""
    draws = np.sort(np.random.default_rng(0).uniform(-2, 2, (20_000, 7)) ** 2, axis=1)[:, 2]
    for power in (1, 2):
        found = draws**power
        error = found.std() / math.sqrt(len(found))
        assert abs(bounds.lemma1(3, 7, power, 2.0) - found.mean()) < 4 * error
    assert bounds.lemma1(3, 7, 1, 2.0) == pytest.approx(4 * 4 * 3 / (9 * 8))


@pytest.mark.parametrize("mu", [5, 20, 100])
def test_lemma_5_holds_only_in_its_corrected_form(mu: int) -> None:
    """P(X ≥ 3μ) exactly, for the sum of 10⁵ indicators."""
    exact = stats.binom.logsf(3 * mu - 1, 100_000, mu / 100_000)
    assert exact <= bounds.lemma5(mu, 2.0)
    if mu == 100:
        assert exact > bounds.lemma5(mu, 2.0, printed=True)


@pytest.mark.parametrize("bins", [64, 256, 1024])
def test_lemma_6_holds_for_exact_tails(bins: int) -> None:
    balls = math.ceil(bins * math.log(bins))
    exact = bins * stats.binom.sf(math.floor(3 * balls / bins), balls, 1 / bins)
    assert exact <= bounds.lemma6(bins) < 1
    assert bounds.lemma6(bins, printed=True) < bounds.lemma6(bins) == pytest.approx(bins**-0.29584, rel=1e-4)


def test_theorem_4_matches_a_simulation() -> None:
    """P(X_(m) < x) for m = 400 of n = 20 000 uniforms: 2 000 draws of seed 0, error bar 4 × 0.0112, limit to 0.01."""
    m, n = 400, 20_000
    draws = np.random.default_rng(0).beta(m, n - m + 1, 2000)
    for z in (-2, 0, 2):
        x = (m + z * math.sqrt(m)) / n
        found = float(np.mean(draws < x))
        assert abs(bounds.theorem4(x, m, n, float) - found) < 4 * 0.0112 + 0.01
        if z < 2:
            assert abs(bounds.theorem4(x, m, n, float, printed=True) - found) > 0.4


def test_draws_with_replacement_hit_fewer_entries_than_draws() -> None:
    """200 × 989 draws of 1024 entries, seed 0; the printed share 0.966 is 30 percentage points too high."""
    draw, N, D = np.random.default_rng(0), math.floor(32**1.99), 1024
    found = np.array([len(np.unique(draw.integers(D, size=N))) / D for _ in range(200)])
    assert abs(bounds.distinct(N, D) - found.mean()) < 4 * found.std() / math.sqrt(200)
    assert N / D - found.mean() > 0.3


def test_log_probability_of_draws_without_repetition() -> None:
    assert bounds.no_repeat(3, 4) == pytest.approx(math.log(4 * 3 * 2 / 4**3))
    assert bounds.no_repeat(5, 4) == -math.inf
    assert bounds.no_repeat(989, 1024) < -800


@given(st.integers(0, 400), st.floats(1e-6, 0.5))
@settings(max_examples=60, deadline=None)
def test_order_statistic_bound_is_above_the_exact_quantile(rank: int, failure: float) -> None:
    """The bound is above the exact quantile of the Beta distribution, and close to it."""
    exact = stats.beta.isf(failure, rank + 1, 500 - rank)
    found = order_statistic_bound(rank, 500, failure)
    assert exact <= found <= min(1, exact + 0.1 + 4 * math.log(1 / failure) / 500)


@given(st.integers(1, 10**5), st.integers(2, 500), st.floats(1e-6, 0.5))
@settings(max_examples=60, deadline=None)
def test_bin_count_bound_holds_for_exact_tails(balls: int, bins: int, failure: float) -> None:
    assert bins * stats.binom.sf(math.ceil(bin_count_bound(balls, bins, failure)) - 1, balls, 1 / bins) <= failure
