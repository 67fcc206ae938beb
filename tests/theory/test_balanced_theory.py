"""The appendix of Balanced Sparsity: exact order statistics, by integrals and by Monte Carlo."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import beta, halfnorm

import pomona as pm
from pomona import PomonaError
from pomona.theory import balanced


def by_integral(rank: int, size: int, power: float) -> float:
    """E[X^power] of an order statistic, from its density by adaptive quadrature."""

    def integrand(x: float) -> float:
        return x**power * beta.pdf(halfnorm.cdf(x), rank, size - rank + 1) * halfnorm.pdf(x)

    middle = halfnorm.ppf(rank / (size + 1))
    return quad(integrand, 0, middle, epsabs=0)[0] + quad(integrand, middle, 12, epsabs=0)[0]


# ---- order statistics


def test_two_draws_by_hand():
    # max² + min² is 2 on average, and max² − min² = |x² − y²| = 4/π: polar coordinates, E r² E|cos 2φ|.
    assert balanced.order_statistic(1, 2, 2) == pytest.approx(1 - 2 / math.pi, rel=1e-14)
    assert balanced.order_statistic(2, 2, 2) == pytest.approx(1 + 2 / math.pi, rel=1e-14)
    assert balanced.order_statistic(1, 1) == pytest.approx(math.sqrt(2 / math.pi), rel=1e-14)


@pytest.mark.parametrize(("rank", "size"), [(1, 3), (4, 8), (32, 32), (1, 64), (50, 64), (200, 4096)])
@pytest.mark.parametrize("power", [1, 2])
def test_order_statistics_against_their_integral(rank, size, power):
    expected = by_integral(rank, size, power)
    assert balanced.order_statistic(rank, size, power) == pytest.approx(expected, rel=1e-8)


@given(st.integers(2, 200).flatmap(lambda b: st.tuples(st.integers(1, b - 1), st.just(b))))
@settings(max_examples=30, deadline=None)
def test_a_block_is_the_mean_of_its_order_statistics(case):
    r, b = case
    each = np.mean([balanced.order_statistic(j, b, 2) for j in range(1, r + 1)])
    assert balanced.removed_second_moment(r / b, block=b) == pytest.approx(each, rel=1e-12)


def test_all_order_statistics_make_up_the_whole():
    for power, whole in ((1, math.sqrt(2 / math.pi)), (2, 1.0), (4, 3.0)):
        each = [balanced.order_statistic(j, 4096, power) for j in range(1, 4097, 1)]
        assert np.mean(each) == pytest.approx(whole, rel=1e-12)


def test_the_asymptotic_law_needs_the_half_normal():
    # The 200th of 4096 by size, seed 0, 4000 draws: the variance within 4 standard errors, the printed 60 times off.
    rank, size, draws = 200, 4096, 4000
    draw = np.random.default_rng(0)
    # By Rényi: U_(k:n) is the share of the first k of n + 1 exponential gaps.
    head = draw.gamma(rank, size=draws)
    x = halfnorm.ppf(head / (head + draw.gamma(size - rank + 1, size=draws))) * 0.02
    mean, variance = balanced.asymptotic(rank, size, 0.02)
    assert abs(x.mean() - mean) < 4 * x.std() / math.sqrt(draws)
    assert abs(x.var() - variance) < 4 * x.var() * math.sqrt(2 / draws)
    exact = [balanced.order_statistic(rank, size, power, 0.02) for power in (1, 2)]
    assert variance == pytest.approx(exact[1] - exact[0] ** 2, rel=0.01)
    wrong_mean, wrong = balanced.asymptotic(rank, size, 0.02, printed=True)
    assert wrong_mean < 0
    assert wrong > 50 * x.var()


# ---- what is removed


@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("block", [None, 8, 32])
def test_the_pruned_energy_of_a_real_mask(sparsity, block):
    """Seed 0, 512 × 512, masks by the library's own pattern; 4 standard errors over the weights that went."""
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.02
    pattern = pm.Unstructured() if block is None else pm.Balanced(block=block)
    [keep] = pattern.select_masks([weight.abs()], sparsity)
    gone = weight[~keep].square()
    expected = balanced.removed_second_moment(sparsity, 0.02, block)
    assert abs(gone.mean() - expected) < 4 * gone.std() / math.sqrt(len(gone))


def simulated(sparsity: float, sigma_w: float, sigma_x: float, block: int, blocks: int, seed: int) -> np.ndarray:
    """z = dw · x for each weight that magnitude pruning takes from independent blocks."""
    draw = np.random.default_rng(seed)
    w = draw.normal(0, sigma_w, (blocks, block))
    r = round(sparsity * block)
    gone = np.take_along_axis(w, np.abs(w).argsort(1)[:, :r], 1).ravel()
    return gone * draw.normal(0, sigma_x, gone.shape)


@pytest.mark.parametrize(("sparsity", "block"), [(0.5, 8), (0.5, 32), (0.875, 16), (0.25, 4)])
def test_the_outputs_variance_by_monte_carlo_seed_1_and_not_as_printed(sparsity, block):
    sigma_w, sigma_x, blocks = 0.7, 1.3, 8192
    z = simulated(sparsity, sigma_w, sigma_x, block, blocks, seed=1)
    mean, error = z.var(), (z**2).std() / math.sqrt(blocks)  # a block's weights are dependent: count blocks
    assert abs(balanced.output_variance(sparsity, sigma_w, sigma_x, block) - mean) < 4 * error
    wrong = balanced.output_variance_printed(sparsity, sigma_w, sigma_x, block * blocks, blocks)
    assert abs(wrong - mean) > 4 * error


@pytest.mark.parametrize(("sparsity", "block"), [(0.5, 8), (0.875, 16), (0.5, 4096)])
def test_the_characteristic_function_by_monte_carlo_seed_2_and_not_as_printed(sparsity, block):
    sigma_w, sigma_x, blocks = 0.7, 1.3, 100_000 // block
    z = simulated(sparsity, sigma_w, sigma_x, block, blocks, seed=2)
    t = np.array([0.5, 1.0, 2.0])
    waves = np.cos(np.multiply.outer(t, z))
    error = waves.std(1) / math.sqrt(z.size / min(block, 16))
    assert (np.abs(balanced.characteristic(t, sparsity, sigma_w, sigma_x, block) - waves.mean(1)) < 4 * error).all()
    wrong = balanced.characteristic_printed(t, sparsity, sigma_w, sigma_x, block * blocks, blocks)
    assert (np.abs(wrong - waves.mean(1)) > 4 * error).all()


def test_all_pruned_is_the_product_of_two_gaussians():
    t = np.linspace(0, 3, 7)
    expected = (1 + (0.7 * 1.3 * t) ** 2) ** -0.5
    assert balanced.characteristic(t, 1.0, 0.7, 1.3) == pytest.approx(expected, rel=1e-13)


@given(st.floats(0.05, 0.95), st.sampled_from([None, 4, 32, 256]))
@settings(max_examples=30, deadline=None)
def test_the_curvature_of_the_characteristic_function_is_the_variance(sparsity, block):
    h = 1e-3
    at = balanced.characteristic([0.0, h], sparsity, 0.7, 1.3, block)
    variance = balanced.output_variance(sparsity, 0.7, 1.3, block)
    assert at[0] == pytest.approx(1)
    assert 2 * (at[0] - at[1]) / h**2 == pytest.approx(variance, rel=1e-4, abs=1e-9)


def test_a_short_block_costs_and_a_long_one_does_not():
    free = balanced.removed_second_moment(0.5)
    costs = [balanced.removed_second_moment(0.5, block=b) / free - 1 for b in (8, 32, 256, 4096)]
    assert costs[:2] == pytest.approx([0.448, 0.115], abs=1e-3)
    assert sorted(costs, reverse=True) == costs
    assert 0 < costs[-1] < 1e-3


def test_the_printed_variance_vanishes_as_the_matrix_grows():
    # What a weight of the lower half holds does not, however many there are.
    printed = [balanced.output_variance_printed(0.5, 1.0, 1.0, size) for size in (1024, 65536)]
    assert printed[0] > 40 * printed[1]
    assert printed[0] < 0.1 * balanced.output_variance(0.5, 1.0, 1.0)


def test_the_ends():
    assert balanced.removed_second_moment(0.0) == balanced.removed_second_moment(0.01, block=8) == 0
    assert balanced.removed_second_moment(1.0, 3.0) == 9
    assert balanced.characteristic([0.0, 1.0], 0.0, 1.0, 1.0).tolist() == [1, 1]
    assert balanced.output_variance_printed(0.0, 1.0, 1.0, 64) == 0


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: balanced.removed_second_moment(1.2), "sparsity is the pruned share, from 0 to 1, got 1.2"),
        (lambda: balanced.removed_second_moment(0.5, -1.0), "sigma_w must be finite and not negative, got -1"),
        (lambda: balanced.removed_second_moment(0.5, block=0), "at least one"),
        (lambda: balanced.order_statistic(5, 4), "rank 5 of 4"),
        (lambda: balanced.asymptotic(4, 4), "above 0 and below 4"),
        (lambda: balanced.output_variance_printed(0.5, 1.0, 1.0, 10, 3), "10 weights cannot be split into 3"),
    ],
)
def test_bad_input(call, said):
    with pytest.raises(PomonaError, match=said):
        call()
