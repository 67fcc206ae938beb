"""The randomized top-k mask of Yang et al. (2023): by brute force, by exact rational sums, and by Monte Carlo."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import ndtri
from scipy.stats import hypergeom

from pomona import PomonaError
from pomona.theory import gip

SIZES = st.integers(1, 300).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d)))
THETAS = st.floats(0, 30)


def exact_terms(theta: float, d: int, m: int) -> list[Fraction]:
    """Return the a_i from whole binomials and one rounded factor e^{−2θ}."""
    q = Fraction(math.exp(-2 * theta))
    return [math.comb(m, i) * math.comb(d - m, i) * q**i for i in range(min(m, d - m) + 1)]


def log_fraction(x: Fraction) -> float:
    """Return log x, also where x is next to 1 or out of a float's range."""
    return math.log1p(float(x - 1)) if x < 10**300 else math.log(x.numerator) - math.log(x.denominator)


# ---- ψ and the distribution of i


def test_distribution_matches_a_hand_computation():
    # d = 4, m = 2, e^{−2θ} = 1/2: a = 1, 4/2, 1/4.
    theta = math.log(2) / 2
    assert gip.swaps(theta, 4, 2).p == pytest.approx(np.array([4, 8, 1]) / 13)
    assert gip.log_psi(theta, 4, 2) == pytest.approx(math.log(13 / 4))
    assert gip.expected_swaps(theta, 4, 2) == pytest.approx(10 / 13)
    assert gip.expected_swaps_derivative(theta, 4, 2) == pytest.approx(-2 * (12 / 13 - (10 / 13) ** 2))


def test_psi_sums_over_every_mask():
    # By the definition: e^{−θ‖I − I₀‖₁} over all masks with two ones of six.
    masks = [set(ones) for ones in itertools.combinations(range(6), 2)]
    psi = sum(math.exp(-0.4 * len(mask ^ masks[0])) for mask in masks)
    assert gip.log_psi(0.4, 6, 2) == pytest.approx(math.log(psi), rel=1e-14)


@given(SIZES, THETAS)
@settings(max_examples=100, deadline=None)
def test_moments_match_exact_sums(size, theta):
    d, m = size
    a = exact_terms(theta, d, m)
    psi = sum(a)
    mean = sum(i * x for i, x in enumerate(a)) / psi
    variance = sum((i - mean) ** 2 * x for i, x in enumerate(a)) / psi
    assert gip.log_psi(theta, d, m) == pytest.approx(log_fraction(psi), rel=1e-11, abs=1e-15)
    assert gip.expected_swaps(theta, d, m) == pytest.approx(float(mean), rel=1e-11)
    assert gip.expected_swaps_derivative(theta, d, m) == pytest.approx(-2 * float(variance), rel=1e-10)


@given(SIZES, THETAS)
@settings(max_examples=100, deadline=None)
def test_window_holds_the_whole_distribution(size, theta):
    d, m = size
    found = gip.swaps(theta, d, m)
    assert found.p.sum() == pytest.approx(1, rel=1e-12)
    assert found.start >= 0
    assert found.start + len(found.log_p) - 1 <= min(m, d - m)
    a = exact_terms(theta, d, m)
    inside = sum(a[found.start : found.start + len(found.log_p)])
    assert 1 - inside / sum(a) < Fraction(1, 10**15)


@pytest.mark.parametrize("m", [1, 1000, 10**7, 5 * 10**7, 10**8 - 3])
def test_swaps_of_a_random_mask_are_hypergeometric(m):
    # At θ = 0 every mask is as likely: ψ = C(d, m), and i is a hypergeometric count.
    d = 10**8
    found, reference = gip.swaps(0.0, d, m), hypergeom(d, m, d - m)
    assert found.mean == pytest.approx(reference.mean(), rel=1e-13)
    assert found.variance == pytest.approx(reference.var(), rel=1e-9)
    assert len(found.log_p) < 50_000
    if (k := min(m, d - m)) <= 1000:  # C(d, k) = Π (d − j) / (j + 1), where that is short
        assert found.log_psi == pytest.approx(math.fsum(math.log((d - j) / (j + 1)) for j in range(k)), rel=1e-14)


def test_log_psi_is_accurate_to_all_digits():
    # log C(10⁸, 10⁷) to 40 digits is 32508288.413838714…
    assert gip.log_psi(0.0, 10**8, 10**7) == pytest.approx(32508288.413838714, rel=1e-15)


def test_expected_swaps_at_large_theta_match_the_first_order():
    # P(1) = m (d − m) e^{−2θ} to first order.
    assert gip.expected_swaps(40.0, 10**8, 10**7) == pytest.approx(9e14 * math.exp(-80), rel=1e-9)


@given(SIZES, THETAS, st.floats(0.01, 5))
@settings(max_examples=50, deadline=None)
def test_expected_swaps_decrease_with_theta(size, theta, more):
    assert gip.expected_swaps(theta + more, *size) <= gip.expected_swaps(theta, *size) * (1 + 1e-12)


def test_derivative_matches_finite_differences():
    for theta in (0.0, 0.7, 2.0):
        ends = [gip.expected_swaps(theta + h, 1000, 100) for h in (0, 1e-6)]
        slope = gip.expected_swaps_derivative(theta, 1000, 100)
        assert (ends[1] - ends[0]) / 1e-6 == pytest.approx(slope, rel=1e-4)


def test_no_swaps_without_noise_or_without_choice():
    assert gip.swaps(math.inf, 1000, 100).p.tolist() == [1]
    for m in (0, 50):
        assert gip.log_psi(0.3, 50, m) == gip.expected_swaps(0.3, 50, m) == 0


def test_results_add_over_groups():
    d, m = [256, 256, 40], [25, 25, 4]
    for function in (gip.log_psi, gip.expected_swaps, gip.expected_swaps_derivative, gip.epsilon_for_theta):
        assert function(0.8, d, m) == pytest.approx(2 * function(0.8, 256, 25) + function(0.8, 40, 4))
    assert gip.pruning_mse(0.8, d, m) == pytest.approx(2 * gip.pruning_mse(0.8, 256, 25) + gip.pruning_mse(0.8, 40, 4))
    assert gip.expected_swaps(0.8, [256] * 3, 25) == pytest.approx(3 * gip.expected_swaps(0.8, 256, 25))


# ---- privacy cost


@pytest.mark.parametrize(("d", "m"), [(6, 2), (6, 3), (5, 4)])
def test_epsilon_is_the_largest_log_ratio_of_probabilities(d, m):
    theta, masks = 0.4, [set(ones) for ones in itertools.combinations(range(d), m)]
    worst = max(theta * (len(out ^ b) - len(out ^ a)) for out in masks for a in masks for b in masks)
    assert gip.epsilon_for_theta(theta, d, m) == pytest.approx(worst)


@given(SIZES.filter(lambda s: 0 < s[1] < s[0]), st.floats(0, 100))
@settings(deadline=None)
def test_epsilon_and_theta_are_inverse_functions(size, epsilon):
    assert gip.epsilon_for_theta(gip.theta_for_epsilon(epsilon, *size), *size) == pytest.approx(epsilon)


def test_published_settings_draw_almost_at_random():
    # d = 2.75M, a tenth kept, ε = 1.4e−4 a step: 90 % of the top tenth are lost, as in a random mask.
    d, m = 2_750_000, 275_000
    theta = gip.theta_for_epsilon(1.4e-4, d, m)
    assert theta == pytest.approx(2.5e-10, rel=0.03)
    assert gip.expected_swaps(theta, d, m) / m == pytest.approx(0.9, abs=1e-6)


def test_mask_without_choice_costs_nothing():
    assert gip.epsilon_for_theta(math.inf, 10, 10) == 0
    assert gip.theta_for_epsilon(1.0, 10, 0) == math.inf


@pytest.mark.parametrize("theta", [0.0, 1e-6, 0.5, 3.0])
def test_theta_for_swaps_inverts_expected_swaps(theta):
    d, m = [256] * 3, [25] * 3
    assert gip.theta_for_swaps(gip.expected_swaps(theta, d, m), d, m) == pytest.approx(theta, rel=1e-6, abs=1e-13)


# ---- pruning error


def simulate_error(theta: float, d: int, m: int, draws: int, seed: int) -> tuple[float, float]:
    """Return the mean and standard error of ‖g − g ⊙ I‖² over draws of the mechanism."""
    draw = np.random.default_rng(seed)
    g = np.sort(draw.standard_normal((draws, d)) ** 2, axis=1)
    a = exact_terms(theta, d, m) if theta < math.inf else [Fraction(1)]
    psi = sum(a)
    swapped = draw.choice(len(a), size=draws, p=[float(x / psi) for x in a])
    lost = []
    for row, i in zip(g, swapped, strict=True):
        kept = draw.permutation(d - m)[:i]  # of the small ones, those that are kept by mistake
        cut = d - m + draw.permutation(m)[:i]
        lost.append(row[: d - m].sum() - row[kept].sum() + row[cut].sum())
    return float(np.mean(lost)), float(np.std(lost) / math.sqrt(draws))


@pytest.mark.parametrize("k", [0.1, 0.3, 0.7])
@pytest.mark.parametrize("theta", [math.inf, 1.0, 2.0])
def test_pruning_mse_matches_a_simulation_and_the_printed_form_does_not(k, theta):
    d = 400
    mean, error = simulate_error(theta, d, round(k * d), draws=1500, seed=3)
    assert abs(gip.pruning_mse(theta, d, round(k * d), exact=True) - mean) < 4 * error
    limit = gip.pruning_mse(theta, d, round(k * d), exact=False)
    assert abs(limit - mean) < 4 * error + 1  # d → ∞: short of it by less than σ²
    assert abs(gip.pruning_mse(theta, d, round(k * d), printed=True) - mean) > 4 * error


def test_exact_form_is_needed_for_few_coordinates():
    mean, error = simulate_error(math.inf, 8, 3, draws=20_000, seed=4)
    assert abs(gip.pruning_mse(math.inf, 8, 3) - mean) < 4 * error
    assert abs(gip.pruning_mse(math.inf, 8, 3, exact=False) - mean) > 4 * error


@pytest.mark.parametrize("theta", [math.inf, 0.0, 0.7])
def test_exact_form_of_two_coordinates_by_hand(theta):
    """With |x² − y²| = 2 |u v| for independent u, v of N(0, 1), the smaller square has the mean 1 − 2/π."""
    swapped = math.exp(-2 * theta) / (1 + math.exp(-2 * theta))
    right = (1 - 2 / math.pi) * (1 - swapped) + (1 + 2 / math.pi) * swapped
    assert gip.pruning_mse(theta, 2, 1, sigma=3.0) == pytest.approx(9 * right, rel=1e-12)


def mean_ordered_squares(d: int) -> list[float]:
    """Return E x² of each of d ordered draws of |N(0, 1)|, by integrating their densities."""
    moments = []
    for rank in range(1, d + 1):
        count = rank * math.comb(d, rank)

        def integrand(x: float, rank: int = rank, count: int = count) -> float:
            below = math.erf(x / math.sqrt(2))
            density = math.sqrt(2 / math.pi) * math.exp(-(x**2) / 2)
            return x**2 * count * below ** (rank - 1) * (1 - below) ** (d - rank) * density

        moments.append(quad(integrand, 0, 12, epsabs=1e-12)[0])
    return moments


@pytest.mark.parametrize("d", [3, 4, 6])
@pytest.mark.parametrize("theta", [math.inf, 0.0, 0.4, 1.5])
def test_exact_form_matches_a_sum_over_every_mask(d, theta):
    """Coordinates are named by their rank: the true mask has the last m, and every mask its probability."""
    squares = mean_ordered_squares(d)
    assert sum(squares) == pytest.approx(d)
    for m in range(1, d):
        top = set(range(d - m, d))
        masks = [set(ones) for ones in itertools.combinations(range(d), m)]
        weights = [1.0 if mask == top else math.exp(-theta * len(mask ^ top)) for mask in masks]
        lost = [sum(squares[j] for j in range(d) if j not in mask) for mask in masks]
        right = sum(w * x for w, x in zip(weights, lost, strict=True)) / sum(weights)
        assert gip.pruning_mse(theta, d, m) == pytest.approx(right, rel=1e-9)


@given(st.floats(0.001, 0.999), st.integers(6, 9))
@settings(max_examples=50, deadline=None)
def test_exact_form_exceeds_the_limit_by_the_curvature_of_the_threshold(k, digits):
    """A threshold of variance k (1 − k)/d in its quantile adds σ² k (1 − k) a / 2φ(a), by the second derivative."""
    d = 10**digits
    m = round(k * d)
    a = -ndtri(m / d / 2)
    added = m / d * (1 - m / d) * a / (2 * math.exp(-(a**2) / 2) / math.sqrt(2 * math.pi))
    excess = gip.pruning_mse(math.inf, d, m) - gip.pruning_mse(math.inf, d, m, exact=False)
    assert excess == pytest.approx(added, rel=2e-3, abs=2e-12 * d)


def test_the_example_of_the_page_is_far_from_its_limit():
    assert gip.pruning_mse(math.inf, 10, 5) == pytest.approx(0.971, abs=5e-4)
    assert gip.pruning_mse(math.inf, 10, 5, exact=False) == pytest.approx(0.713, abs=5e-4)


def test_groups_beyond_the_exact_limit_are_asymptotic():
    large = 10 * gip.EXACT_LIMIT
    assert gip.pruning_mse(math.inf, large, large // 2) == gip.pruning_mse(math.inf, large, large // 2, exact=False)
    mixed = gip.pruning_mse(math.inf, [large, 10], [large // 2, 5]) - gip.pruning_mse(math.inf, large, large // 2)
    assert mixed == pytest.approx(0.971, abs=1e-3)


def test_forms_agree_in_the_limits():
    for options in ({}, {"exact": False}, {"printed": True}):  # a random mask loses its share of the energy
        assert gip.pruning_mse(0.0, 1000, 300, 2.0, **options) == pytest.approx(4 * 700)
    far = [gip.pruning_mse(1.0, 10**6, 10**5, exact=exact) for exact in (False, True)]
    assert far[0] == pytest.approx(far[1], rel=1e-5)
    assert gip.pruning_mse(1.0, 10, 0) == 10
    assert gip.pruning_mse(1.0, 10, 10) == 0


# ---- invalid arguments


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gip.log_psi(-1.0, 10, 3), "θ must not be negative, got -1"),
        (lambda: gip.log_psi(math.nan, 10, 3), "θ must not be negative, got nan"),
        (lambda: gip.log_psi(1.0, 10, 11), "m=11 of d=10"),
        (lambda: gip.log_psi(1.0, 10, 2.5), "m must be a whole number"),
        (lambda: gip.log_psi(1.0, [10, 10], [1, 2, 3]), "d has 2 groups and m has 3"),
        (lambda: gip.theta_for_epsilon(-0.1, 10, 3), "ε must not be negative"),
        (lambda: gip.theta_for_swaps(3.0, 10, 3), "between 0 and 2.1"),
        (lambda: gip.pruning_mse(1.0, 10, 3, -1.0), "σ must be finite"),
        (lambda: gip.pruning_mse(1.0, 10, 3, exact=True, printed=True), "leave out exact or printed"),
        (lambda: gip.pruning_mse(1.0, 10**10, 3, exact=True), "up to d = 1,000,000,000, got 10,000,000,000"),
    ],
)
def test_invalid_arguments_are_refused(call, message):
    with pytest.raises(PomonaError, match=message):
        call()
