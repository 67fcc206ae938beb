"""The accountant against integrals, against a second accountant, and against others' where they know the case."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import trapezoid
from scipy.stats import norm

from pomona.errors import PomonaError
from pomona.privacy import Budget, Pair, best_split, splits

pytest.importorskip("dp_accounting")


def test_two_draws_of_one_sample_are_amplified_together():
    # ε 1 + 1 at q = 0.1: each alone and added is 0.317, which is wrong; together it is log(1 + q (e² − 1)) = 0.494.
    alone = Pair(0.1, pure=(1.0,)).epsilon(1, 1e-12)
    assert 2 * alone == pytest.approx(0.317, abs=5e-4)
    together = Pair(0.1, pure=(1.0, 1.0)).epsilon(1, 1e-12)
    assert together == pytest.approx(math.log1p(0.1 * math.expm1(2)), abs=1e-4)
    assert together == pytest.approx(0.494, abs=5e-4)


def densities(pair: Pair, swapped: bool):
    """Both densities over x for each answer of one randomised response, on the sampled data."""
    e, s, q = pair.pure[0], pair.sigma, pair.rate
    yes = 1 / (1 + math.exp(-e))
    for answer in (yes, 1 - yes):
        with_row = lambda x, w=answer: w * norm.pdf(x, 1, s)  # noqa: E731
        without = lambda x, w=1 - answer: w * norm.pdf(x, 0, s)  # noqa: E731
        if swapped:  # the row is added: P against (1 − q) P + q Q
            yield with_row, lambda x, p=with_row, r=without: (1 - q) * p(x) + q * r(x)
        else:
            yield lambda x, p=with_row, r=without: (1 - q) * r(x) + q * p(x), without


@pytest.mark.parametrize("pair", [Pair(0.1, 1.0, (0.5,)), Pair(0.3, 0.7, (2.0,)), Pair(1.0, 2.0, (0.1,))])
@pytest.mark.parametrize("epsilon", [-0.05, 0.0, 0.2, 1.0, 2.5])
def test_the_divergence_of_a_step_is_the_integral(pair, epsilon):
    x = np.linspace(-20, 21, 400_001)
    for swapped, ours in ((False, pair.removed), (True, pair.added)):
        total = sum(trapezoid(np.maximum(p(x) - math.exp(epsilon) * r(x), 0.0), x) for p, r in densities(pair, swapped))
        assert float(ours(np.array(epsilon))) == pytest.approx(total, abs=1e-7)


def second(pair: Pair, steps: int, delta: float, interval: float = 1e-3, size: int = 1 << 14) -> tuple[float, float]:
    """Another accountant: the loss of a step from its distribution function, rounded down and up, and the sum of
    many by a Fourier transform. The true ε lies between the two."""
    found = []
    half = size // 2
    grid = (np.arange(size) - half) * interval
    for direction in ("removed", "added"):
        for up in (False, True):
            mass = loss_mass(pair, grid, interval, direction, up)
            total = np.real(np.fft.ifft(np.fft.fft(np.roll(mass, -half)) ** steps))
            total = np.roll(total, half)
            high = grid[-1]
            low = 0.0
            for _ in range(60):
                middle = (low + high) / 2
                tail = grid > middle
                value = (total[tail] * -np.expm1(middle - grid[tail])).sum()
                low, high = (middle, high) if value > delta else (low, middle)
            found.append((up, high))
    return max(e for up, e in found if not up), max(e for up, e in found if up)


def loss_mass(pair: Pair, grid: np.ndarray, interval: float, direction: str, up: bool) -> np.ndarray:
    """P(loss in each cell), from where x crosses the cell's ends; the loss rises with x, for either answer."""
    e, s, q = sum(pair.pure), pair.sigma, pair.rate
    yes = 1 / (1 + math.exp(-e))
    edges = np.concatenate([grid, [grid[-1] + interval]]) - (interval if up else 0)

    def crossing(edges: np.ndarray, shift: float) -> np.ndarray:
        """x at which the sampled loss is at each edge."""
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
def test_a_second_accountant_agrees(pair, steps, delta):
    low, high = second(pair, steps, delta)
    ours = pair.epsilon(steps, delta)
    assert low < ours < high
    assert high - low < 2e-3 * steps  # two roundings of a thousandth in every step


def test_without_index_draws_it_is_subsampled_gaussian_noise():
    from dp_accounting.pld import privacy_loss_distribution as pld

    theirs = pld.from_gaussian_mechanism(2.0, sampling_prob=0.05).self_compose(200).get_epsilon_for_delta(1e-5)
    assert Pair(0.05, 2.0).epsilon(200, 1e-5) == pytest.approx(theirs, rel=1e-4)


def test_rényi_accounting_is_above_and_near():
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
def test_a_cost_is_never_negative_and_never_above_plain_addition(rate, sigma, pure, steps):
    cost = Pair(rate, sigma, pure).epsilon(steps, 1e-6)
    assert cost >= 0
    if sigma is None:
        most = steps * math.log1p(rate * math.expm1(sum(pure)))
        assert cost <= most + steps * 1e-7


def test_a_loss_that_is_beyond_floats_is_bounded_all_the_same():
    assert Pair(0.5, None, (5.0,)).epsilon(282, 1e-6) == pytest.approx(282 * math.log1p(0.5 * math.expm1(5)))


@settings(max_examples=25, deadline=None)
@given(rate=st.floats(0.01, 1.0), sigma=st.floats(0.5, 20.0), index=st.floats(0.0, 2.0), epsilon=st.floats(0.0, 3.0))
def test_divergences_are_ordered_as_they_must_be(rate, sigma, index, epsilon):
    at = np.array([epsilon])
    pair = Pair(rate, sigma, (index,))
    for ours in (pair.removed, pair.added):
        assert -1e-12 <= ours(at)[0] <= 1
    assert pair.removed(at)[0] <= Pair(1.0, sigma, (index,)).removed(at)[0] + 1e-12  # sampling helps
    assert Pair(rate, sigma).removed(at)[0] <= pair.removed(at)[0] + 1e-12  # an index draw costs
    assert pair.removed(at)[0] <= Pair(rate, sigma / 2, (index,)).removed(at)[0] + 1e-12  # and so does less noise


def test_no_noise_and_no_draw_is_for_free_and_full_sampling_is_plain():
    at = np.array([0.0, 0.5])
    assert Pair(0.3).removed(at) == pytest.approx([0, 0])
    plain = norm.cdf(0.5 / 2 - at * 2) - np.exp(at) * norm.cdf(-0.5 / 2 - at * 2)
    assert Pair(1.0, 2.0).removed(at) == pytest.approx(plain)
    assert Pair(1.0, 2.0).added(at) == pytest.approx(plain)


# ---- budgets


@pytest.fixture(scope="module")
def budget() -> Budget:
    return Budget.solve(epsilon=2.0, delta=1e-5, rows=1000, batch_size=100, steps=30, share=0.1)


def test_a_budget_is_met_and_not_wasted(budget):
    spent = Pair(0.1, budget.sigma, (budget.index,)).epsilon(30, 1e-5)
    assert 2.0 * (1 - 1e-3) < spent <= 2.0
    assert Pair(0.1, pure=(budget.index,)).epsilon(30, 1e-5) == pytest.approx(0.2, rel=1e-3)
    # An index draw that linear composition and amplification allow is much smaller: w ε / (T q).
    assert budget.index > 0.2 / (30 * 0.1) / 2


def test_what_is_spent_rises_to_the_budget_and_is_never_told_too_low(budget):
    spent = [budget.spent(step) for step in range(31)]
    assert spent[0] == 0
    assert spent == sorted(spent)
    assert spent[30] == pytest.approx(2.0, rel=1e-3)
    assert spent[30] <= 2.0
    for step in (1, 7, 29):
        assert spent[step] >= Pair(0.1, budget.sigma, (budget.index,)).epsilon(step, 1e-5) - 1e-9


def test_a_budget_travels_as_plain_values(budget):
    import json

    assert Budget.of(json.loads(json.dumps(budget.to_dict()))) == budget
    with pytest.raises(PomonaError, match="sigma"):
        Budget.of({k: v for k, v in budget.to_dict().items() if k != "sigma"})
    with pytest.raises(PomonaError, match="δ must lie"):
        Budget.of(budget.to_dict() | {"delta": 0.1})


def test_a_budget_with_all_rows_in_every_step():
    whole = Budget.solve(epsilon=1.0, delta=1e-5, rows=50, batch_size=50, steps=1)
    # The analytic Gaussian mechanism (Balle and Wang, ICML 2018): σ = 3.730 at (1, 1e−5).
    assert whole.sigma == pytest.approx(3.7304, rel=1e-3)
    assert whole.index == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, "ε must be above 0"),
        ({"epsilon": -1.0}, "ε must be above 0"),
        ({"epsilon": math.inf}, "ε must be above 0 and finite"),
        ({"delta": 0.001}, "δ must lie between 0 and 1/N = 0.001"),
        ({"delta": 0.0}, "δ must lie"),
        ({"batch_size": 1001}, "batch_size must lie in 1 … 1000"),
        ({"batch_size": 0}, "batch_size must lie"),
        ({"steps": 0}, "rows and steps"),
        ({"share": 1.0}, "share is the part"),
        ({"share": -0.1}, "share is the part"),
    ],
)
def test_bad_budgets_are_refused(change, message):
    asked = {"epsilon": 1.0, "delta": 1e-5, "rows": 1000, "batch_size": 100, "steps": 10, "share": 0.0}
    with pytest.raises(PomonaError, match=message):
        Budget.solve(**(asked | change))


def test_bad_pairs_are_refused():
    for options, message in (((0.0,), "probability"), ((0.5, 0.0), "σ must"), ((0.5, 1.0, (-1.0,)), "negative")):
        with pytest.raises(PomonaError, match=message):
            Pair(*options)


def test_a_missing_accountant_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting.pld", None)
    with pytest.raises(PomonaError, match="pomona\\[privacy\\]"):
        Pair(0.1, 1.0).epsilon(1, 1e-5)


# ---- the split between indices and noise


def test_the_best_split_depends_on_how_much_the_indices_can_know():
    setting = {"clip": 1.0, "epsilon": 4.0, "delta": 1e-5, "rows": 1000, "batch_size": 200, "steps": 10}
    few = splits([20], [1], spread=0.5, shares=(0.01, 0.5), **setting)
    assert [split.share for split in few] == [0.0, 0.01, 0.5]
    assert [split.sigma for split in few] == sorted(split.sigma for split in few)
    assert [split.lost for split in few] == sorted((split.lost for split in few), reverse=True)
    assert [split.pruning for split in few] == sorted((split.pruning for split in few), reverse=True)
    best = best_split([20], [1], spread=0.5, shares=(0.01, 0.5), **setting)
    assert best.error == min(split.error for split in few)
    assert best.share > 0.01  # one of twenty: the draw can find it, and the authors' 1 % is too little
    many = best_split([100_000], [10_000], spread=0.01, shares=(0.01, 0.5), **setting)
    assert many.share == 0.0  # ten thousand: no share buys anything but noise
    assert many.lost == pytest.approx(0.9)
    largest = splits([20], [1], shares=(), **setting)[0]
    assert largest.pruning == pytest.approx(0.95)  # random-k of a gradient of norm 1


def test_budgets_are_solved_once():
    asked = {"epsilon": 3.0, "delta": 1e-5, "rows": 100, "batch_size": 50, "steps": 2}
    assert Budget.solve(**asked) is Budget.solve(**asked)
    assert Budget.solve(**asked).rate == 0.5
