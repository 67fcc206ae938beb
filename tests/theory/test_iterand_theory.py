"""Appendix A of Chijiwa et al. (2021): the failure probability, the widths, and the construction."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pomona import PomonaError
from pomona.theory import iterand
from pomona.theory.iterand.construction import resample


def random_target(*sizes: int, seed: int = 0) -> list[np.ndarray]:
    """Return random matrices of norm 1 for these sizes."""
    draw = np.random.default_rng(seed)
    matrices = [draw.standard_normal((o, i)) for i, o in itertools.pairwise(sizes)]
    return [F / np.linalg.norm(F) for F in matrices]


# ---- the failure probability


def test_failure_of_few_draws_matches_a_hand_computation():
    # τ = 1/2: u ≥ 1/2 has probability 1/4, |v − 1| ≤ 1/2 another 1/4, and |v| ≤ 1/2 one half.
    assert iterand.failure(1.0, 0.5, R=1, units=1) == pytest.approx(15 / 16)
    assert iterand.failure(0.0, 0.5, R=1, units=1) == pytest.approx(7 / 8)
    assert iterand.failure(1.0, 0.5, R=2, units=1) == pytest.approx(1 - (7 / 16) ** 2)
    assert iterand.failure(1.0, 0.5, R=1, units=2) == pytest.approx((15 / 16) ** 2)
    # Two weights share u: both need it, then each its own v.
    assert iterand.failure([1.0, 0.0], 0.5, R=1, units=1) == pytest.approx(1 - 1 / 4 * 1 / 4 * 1 / 2)


@pytest.mark.parametrize(("tau", "R", "units"), [(0.25, 2, 20), (0.25, 10, 1)])
def test_failure_matches_a_simulation_and_the_printed_bound_does_not(tau, R, units):
    mean, error = iterand.failure_simulated(1.0, tau, R, units, draws=20_000, seed=0)
    assert abs(iterand.failure(1.0, tau, R, units) - mean) < 4 * error
    assert iterand.failure_printed(tau, R, units) < mean - 4 * error  # the printed bound is exceeded


def test_failure_of_weights_that_share_units_matches_a_simulation():
    w = [1.0, 0.3, -0.5]
    mean, error = iterand.failure_simulated(w, 0.2, 3, 10, draws=10_000, seed=0)
    assert abs(iterand.failure(w, 0.2, 3, 10) - mean) < 4 * error
    independent = 1 - math.prod(1 - iterand.failure(each, 0.2, 3, 10) for each in w)
    assert abs(independent - mean) > 4 * error  # sharing u makes a difference


@given(
    st.floats(0.01, 0.9), st.integers(1, 200), st.integers(1, 50), st.lists(st.floats(-1, 1), min_size=1, max_size=4)
)
@settings(max_examples=50, deadline=None)
def test_failure_decreases_with_draws_and_units(tau, R, units, w):
    now = iterand.failure(w, tau, R, units)
    assert 0 <= now <= 1
    assert iterand.failure(w, tau, R + 1, units) <= now * (1 + 1e-9) + 1e-300
    assert iterand.failure(w, tau, R, units + 1) <= now * (1 + 1e-9) + 1e-300
    union = sum(iterand.failure(each, tau, R, units) for each in w)
    assert now <= union * (1 + 1e-9)


def test_without_resampling_the_printed_bound_is_exact():
    assert iterand.failure(1.0, 0.3, 1, 40) == pytest.approx(iterand.failure_printed(0.3, 1, 40))


# ---- the widths


def test_printed_width_matches_a_hand_computation():
    # 2 · 3 ⌈64 · 4 · 9 · 2 / (0.25 · 100) · log(2 · 2 · 3 · 2 / 0.1)⌉
    assert iterand.width_printed(3, 2, 2, 0.5, 0.1, 10) == 6 * math.ceil(64 * 36 * 2 / 25 * math.log(240))


@pytest.mark.parametrize("R", [1, 7, 100, 3000])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 3), (3, 2, 2)])
def test_widths_are_sufficient_and_minimal(sizes, R):
    epsilon, delta = 0.5, 0.1
    layers = len(sizes) - 1
    found = iterand.widths(sizes, epsilon, delta, R)
    for (i, o), hidden, reach in zip(itertools.pairwise(sizes), found, iterand.reaches(sizes, epsilon), strict=True):
        tau = iterand.tolerance(i, o, layers, epsilon, reach)

        def union(units: int, tau: float = tau, pairs: int = 2 * i * o) -> float:
            return pairs * iterand.failure(1.0, tau, R, units)

        units = hidden // (2 * i)
        assert union(units) <= delta / layers * (1 + 1e-9)
        assert units == 1 or union(units - 1) > delta / layers


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.floats(0.01, 0.9), st.floats(1e-6, 0.5))
@settings(max_examples=50, deadline=None)
def test_width_does_not_grow_with_draws(d_in, d_out, layers, epsilon, delta):
    found = [iterand.width(d_in, d_out, layers, epsilon, delta, R) for R in (1, 10, 100, 10**4, 10**8)]
    assert sorted(found, reverse=True) == found
    assert found[-1] == 2 * d_in


def test_width_falls_with_R_squared_only_for_small_R():
    base = iterand.width(1, 1, 1, 0.01, 0.05, 1)
    assert base / iterand.width(1, 1, 1, 0.01, 0.05, 10) == pytest.approx(100, rel=0.05)
    assert base / iterand.width(1, 1, 1, 0.01, 0.05, 400) < 0.5 * 400**2


def test_printed_lemma_misses_its_delta_even_with_the_best_draws():
    """Lemma A.4 at w = 1, δ = 1e−3 and the R where one unit a sign is said to suffice; seed 0, a million draws.

    Each unit takes the best of its R draws, and either unit takes either sign: better than any mask can do.
    """
    epsilon, delta, draws = 0.1, 1e-3, 1_000_000
    R = math.ceil(4 / epsilon * math.sqrt(math.log(2 / delta)))
    assert math.ceil(16 / (epsilon * R) ** 2 * math.log(2 / delta)) == 1
    draw = np.random.default_rng(0)
    top = 2 * draw.uniform(size=(2, 2, draws)) ** (1 / R) - 1  # the largest of R, for u and v of both units
    low = (top + 1) * (1 - draw.uniform(size=top.shape) ** (1 / (R - 1))) - 1  # the smallest, given the largest
    plus, minus = (1 - top.prod(0) <= epsilon), (1 - low.prod(0) <= epsilon)
    failed = 1 - ((plus[0] & minus[1]) | (plus[1] & minus[0])).mean()
    assert failed > 1.5 * delta > delta + 4 * math.sqrt(failed / draws)


# ---- the construction


@pytest.mark.parametrize(("sizes", "R"), [((2, 2), 1000), ((2, 3, 2), 1000), ((2, 3, 2), 30), ((3, 2, 2, 1), 5000)])
def test_theorem_holds_over_seeds(sizes, R):
    epsilon, delta, target = 0.5, 0.1, random_target(*sizes)
    hidden = iterand.widths(sizes, epsilon, delta, R)
    assert iterand.success(target, epsilon, R, hidden) >= 1 - delta
    built = [iterand.build(target, epsilon, R, hidden, seed) for seed in range(10)]
    assert sum(network.fits for network in built) >= 9
    for network in built:
        gap, certificate = network.gap(2000), network.certificate()
        assert 0 < gap <= certificate
        assert certificate <= epsilon or not network.fits
        assert len(network.weights) == 2 * len(target)
        assert all((np.abs(G) <= 1).all() for G in network.weights)


def test_trial_agrees_with_the_theorem():
    found = iterand.trial([2, 3, 2], 0.5, 0.1, 300, seeds=5)
    assert found.widths == iterand.widths([2, 3, 2], 0.5, 0.1, 300)
    assert found.success >= 0.9
    assert found.fits == found.seeds == 5
    assert 0 < found.gap <= found.certificate <= 0.5
    # 16 inputs: with the printed widths later layers are too narrow for the size of their inputs.
    printed = iterand.trial([16, 1, 1], 0.5, 0.1, 30, seeds=3, printed=True)
    assert printed.success < 0.5
    assert printed.fits < 3


def test_one_unit_is_enough_for_all_outputs():
    # The condition on u is the same for each output, so that five outputs do not need five units.
    target = random_target(1, 5)
    network = iterand.build(target, 0.5, 5000, [2])
    assert network.fits
    assert network.masks[1].all()
    assert network.gap() <= network.certificate() <= 0.5


def test_success_probability_matches_a_simulation_of_2000_seeds():
    target, epsilon, R, hidden = random_target(2, 2), 0.9, 12, [12]
    expected = iterand.success(target, epsilon, R, hidden)
    assert 0.2 < expected < 0.8
    found = np.mean([iterand.build(target, epsilon, R, hidden, seed).fits for seed in range(2000)])
    assert abs(found - expected) < 4 * math.sqrt(expected * (1 - expected) / 2000)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_certificate_is_not_below_the_gap(d_in, d_out, R, seed):
    # It must also hold where the draws do not fit.
    target = random_target(d_in, d_out, 2, seed=seed)
    network = iterand.build(target, 0.9, R, [4 * d_in, 2 * d_out], seed)
    assert network.gap(500) <= network.certificate() * (1 + 1e-12)


def test_supremum_of_one_layer_is_at_a_corner():
    network = iterand.build(random_target(2, 2), 0.9, 5, [8], seed=1)
    x = np.random.default_rng(2).uniform(-1, 1, (20_000, 2))
    found = np.linalg.norm(iterand.forward(network.target, x) - network(x), axis=1).max()
    assert 0.9 * network.gap(10) <= found <= network.gap(10) * (1 + 1e-12)


def test_input_of_a_later_layer_can_exceed_the_printed_bound_of_2():
    # F_1 = (1, …, 1)/4 has norm 1, and takes the cube's corner of 16 inputs to 4.
    F = np.full((1, 16), 1 / 4)
    assert iterand.forward([F], np.ones((1, 16)))[0, 0] == 4
    assert iterand.reaches([16, 1, 1], 0.5) == [1, 4.5]


def test_resampling_stops_at_the_first_fit():
    draw = np.random.default_rng(0)
    found = resample(np.full((50, 50), 0.3), 0.1, 1000, draw)
    assert (np.abs(found - 0.3) <= 0.1).all()
    assert found.std() == pytest.approx(
        0.2 / math.sqrt(12), rel=0.05
    )  # uniform within the tolerance, not the nearest draw
    drawn_once = resample(np.full((3, 3), np.nan), 0.1, 1000, np.random.default_rng(1))
    assert (drawn_once == np.random.default_rng(1).uniform(-1, 1, (3, 3))).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: iterand.width(2, 2, 1, 1.5, 0.1, 10), "epsilon must lie between 0 and 1, got 1.5"),
        (lambda: iterand.width_printed(2, 2, 1, 0.5, 0.0, 10), "delta must lie between 0 and 1, got 0"),
        (lambda: iterand.width(2, 2, 1, 0.5, 0.1, 0), "R is a whole number, at least 1, got 0"),
        (lambda: iterand.width(2, 2, 1, 0.5, 0.1, 10, reach=0.0), "reach bounds what comes into the layer"),
        (lambda: iterand.widths([3], 0.5, 0.1, 10), "at least two sizes"),
        (lambda: iterand.failure(1.5, 0.5, 10, 1), "must lie in \\[−1, 1\\] to be drawn, got 1.5"),
        (lambda: iterand.build([np.eye(2)], 0.5, 10, [4]), "F_1 has the Frobenius norm 1.414"),
        (lambda: iterand.build(random_target(2, 2), 0.5, 10, [5]), "need a multiple of 4"),
        (lambda: iterand.build(random_target(2, 2), 0.5, 10, [4, 4]), "a target of 1 layers needs as many"),
        (lambda: iterand.build(random_target(2, 2) * 2, 0.5, 10, [4]), "a target of 2 layers"),
        (lambda: iterand.build([[[0.5, 0.5]], [[0.5, 0.5]]], 0.5, 10, [4, 4]), "F_2 takes 2 inputs, and there are 1"),
    ],
)
def test_invalid_arguments_are_refused(call, message):
    with pytest.raises(PomonaError, match=message):
        call()
