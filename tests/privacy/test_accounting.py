"""The accountant against integrals, against a second accountant, and against other libraries where they apply."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import trapezoid
from scipy.stats import norm

from pomona.errors import PomonaError
from pomona.privacy import Pair

pytest.importorskip("dp_accounting")


def test_two_mechanisms_on_one_sample_are_amplified_together():
    # ε 1 + 1 at q = 0.1: each alone and added is 0.317, which is wrong; together it is log(1 + q (e² − 1)) = 0.494.
    alone = Pair(0.1, pure=(1.0,)).epsilon(1, 1e-10)
    assert 2 * alone == pytest.approx(0.317, abs=5e-4)
    together = Pair(0.1, pure=(1.0, 1.0)).epsilon(1, 1e-10)
    assert together == pytest.approx(math.log1p(0.1 * math.expm1(2)), abs=1e-4)
    assert together == pytest.approx(0.494, abs=5e-4)


def sampled_densities(pair: Pair, is_added: bool):
    """Yield P and Q of the sampled data as functions of x, for each answer of one randomised response."""
    e, s, q = pair.pure[0], pair.sigma, pair.rate
    yes = 1 / (1 + math.exp(-e))
    for answer in (yes, 1 - yes):
        with_row = lambda x, w=answer: w * norm.pdf(x, 1, s)  # noqa: E731
        without = lambda x, w=1 - answer: w * norm.pdf(x, 0, s)  # noqa: E731
        if is_added:  # the row is added: P against (1 − q) P + q Q
            yield with_row, lambda x, p=with_row, r=without: (1 - q) * p(x) + q * r(x)
        else:
            yield lambda x, p=with_row, r=without: (1 - q) * r(x) + q * p(x), without


@pytest.mark.parametrize("pair", [Pair(0.1, 1.0, (0.5,)), Pair(0.3, 0.7, (2.0,)), Pair(1.0, 2.0, (0.1,))])
@pytest.mark.parametrize("epsilon", [-0.05, 0.0, 0.2, 1.0, 2.5])
def test_delta_of_a_step_is_the_integral_of_its_definition(pair, epsilon):
    x = np.linspace(-20, 21, 400_001)
    for is_added, delta in ((False, pair.delta_if_removed), (True, pair.delta_if_added)):
        total = sum(
            trapezoid(np.maximum(p(x) - math.exp(epsilon) * r(x), 0.0), x) for p, r in sampled_densities(pair, is_added)
        )
        assert float(delta(np.array(epsilon))) == pytest.approx(total, abs=1e-7)


def compose_bounds(
    steps: Mapping[Pair, int], delta: float, interval: float = 1e-3, size: int = 1 << 14
) -> tuple[float, float]:
    """Return a lower and an upper bound on ε from a second, independent accountant.

    The loss of each kind of step is rounded down and up, and composed over all steps by a Fourier transform.
    """
    bounds = []
    half = size // 2
    grid = (np.arange(size) - half) * interval
    for direction in ("removed", "added"):
        for round_up in (False, True):
            transform = np.ones(size, dtype=complex)
            for pair, count in steps.items():
                mass = loss_mass(pair, grid, interval, direction, round_up)
                transform *= np.fft.fft(np.roll(mass, -half)) ** count
            total = np.roll(np.real(np.fft.ifft(transform)), half)
            high = grid[-1]
            low = 0.0
            for _ in range(60):
                middle = (low + high) / 2
                tail = grid > middle
                value = (total[tail] * -np.expm1(middle - grid[tail])).sum()
                low, high = (middle, high) if value > delta else (low, middle)
            bounds.append((round_up, high))
    return max(e for up, e in bounds if not up), max(e for up, e in bounds if up)


def loss_mass(pair: Pair, grid: np.ndarray, interval: float, direction: str, round_up: bool) -> np.ndarray:
    """Return P(loss in each grid interval); the loss increases with x, so its edges map to values of x."""
    e, s, q = sum(pair.pure), pair.sigma, pair.rate
    yes = 1 / (1 + math.exp(-e))
    edges = np.concatenate([grid, [grid[-1] + interval]]) - (interval if round_up else 0)

    def crossing(edges: np.ndarray, shift: float) -> np.ndarray:
        """Return the x at which the sampled loss equals each edge."""
        with np.errstate(all="ignore"):
            if direction == "removed":  # loss = log(1 − q + q e^{shift + (x − ½)/σ²})
                inner = np.log((np.exp(edges) - 1 + q) / q)
            else:  # loss = −log(1 − q + q e^{−shift − (x − ½)/σ²})
                inner = -np.log((np.exp(-edges) - 1 + q) / q)
        inner = np.where(np.isnan(inner), -np.inf if direction == "removed" else np.inf, inner)
        return (inner - shift) * s**2 + 0.5

    total = np.zeros(len(grid))
    for answer, shift in ((yes, e), (1 - yes, -e)):
        x = crossing(edges, shift)
        with_row, without = answer * norm.cdf(x, 1, s), (1 - answer) * norm.cdf(x, 0, s)
        cdf = with_row if direction == "added" else (1 - q) * without + q * with_row
        total += np.diff(cdf)
    return total


@pytest.mark.parametrize(
    ("pair", "steps", "delta"),
    [
        (Pair(0.1, 1.5, (0.05,)), 60, 1e-5),
        (Pair(0.05, 1.0, (0.3,)), 40, 1e-6),
        (Pair(0.3, 4.0, (0.02,)), 100, 1e-5),
    ],
)
def test_second_accountant_agrees(pair, steps, delta):
    low, high = compose_bounds({pair: steps}, delta)
    ours = pair.epsilon(steps, delta)
    assert low < ours < high
    assert high - low < 2e-3 * steps  # two roundings by one grid interval in every step


def test_without_index_draws_it_is_subsampled_gaussian_noise():
    from dp_accounting.pld import privacy_loss_distribution as pld

    theirs = pld.from_gaussian_mechanism(2.0, sampling_prob=0.05).self_compose(200).get_epsilon_for_delta(1e-5)
    assert Pair(0.05, 2.0).epsilon(200, 1e-5) == pytest.approx(theirs, rel=1e-4)


def test_rényi_accounting_is_slightly_above():
    rdp = pytest.importorskip("opacus.accountants.analysis.rdp")

    orders = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))
    bound, _ = rdp.get_privacy_spent(
        orders=orders, rdp=rdp.compute_rdp(q=0.05, noise_multiplier=2.0, steps=200, orders=orders), delta=1e-5
    )
    ours = Pair(0.05, 2.0).epsilon(200, 1e-5)
    assert 0.85 * bound < ours < bound


@settings(max_examples=20, deadline=None)
@given(
    rate=st.floats(1e-4, 1.0),
    sigma=st.one_of(st.none(), st.floats(0.3, 50.0)),
    pure=st.one_of(st.just(()), st.tuples(st.floats(0.0, 5.0))),
    steps=st.integers(1, 300),
)
def test_epsilon_is_never_negative_and_never_above_basic_composition(rate, sigma, pure, steps):
    cost = Pair(rate, sigma, pure).epsilon(steps, 1e-6)
    assert cost >= 0
    if sigma is None:
        basic = steps * math.log1p(rate * math.expm1(sum(pure)))
        assert cost <= basic + steps * 1e-7


def test_loss_that_overflows_is_bounded_by_basic_composition():
    assert Pair(0.5, None, (5.0,)).epsilon(282, 1e-6) == pytest.approx(282 * math.log1p(0.5 * math.expm1(5)))


@settings(max_examples=25, deadline=None)
@given(rate=st.floats(0.01, 1.0), sigma=st.floats(0.5, 20.0), index=st.floats(0.0, 2.0), epsilon=st.floats(0.0, 3.0))
def test_delta_increases_with_the_rate_the_index_draw_and_less_noise(rate, sigma, index, epsilon):
    at = np.array([epsilon])
    pair = Pair(rate, sigma, (index,))
    for delta in (pair.delta_if_removed, pair.delta_if_added):
        assert -1e-12 <= delta(at)[0] <= 1
    assert pair.delta_if_removed(at)[0] <= Pair(1.0, sigma, (index,)).delta_if_removed(at)[0] + 1e-12  # sampling helps
    assert Pair(rate, sigma).delta_if_removed(at)[0] <= pair.delta_if_removed(at)[0] + 1e-12  # an index draw costs
    assert (
        pair.delta_if_removed(at)[0] <= Pair(rate, sigma / 2, (index,)).delta_if_removed(at)[0] + 1e-12
    )  # and so does less noise


def test_releasing_nothing_costs_nothing_and_full_sampling_does_not_amplify():
    at = np.array([0.0, 0.5])
    assert Pair(0.3).delta_if_removed(at) == pytest.approx([0, 0])
    plain = norm.cdf(0.5 / 2 - at * 2) - np.exp(at) * norm.cdf(-0.5 / 2 - at * 2)
    assert Pair(1.0, 2.0).delta_if_removed(at) == pytest.approx(plain)
    assert Pair(1.0, 2.0).delta_if_added(at) == pytest.approx(plain)


def test_bad_pairs_are_refused():
    for options, message in (((0.0,), "probability"), ((0.5, 0.0), "σ must"), ((0.5, 1.0, (-1.0,)), "negative")):
        with pytest.raises(PomonaError, match=message):
            Pair(*options)


def test_missing_dp_accounting_is_reported_with_the_install_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting.pld", None)
    with pytest.raises(PomonaError, match="pomona\\[privacy\\]"):
        Pair(0.1, 1.0).epsilon(1, 1e-5)
