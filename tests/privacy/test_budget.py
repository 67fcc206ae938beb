"""Budgets: they meet their target, are solved once, survive JSON, and refuse targets without privacy."""

from __future__ import annotations

import json
import math

import pytest

from pomona.errors import PomonaError
from pomona.privacy import Budget, Pair

pytest.importorskip("dp_accounting")


@pytest.fixture(scope="module")
def budget() -> Budget:
    return Budget.solve(epsilon=2.0, delta=1e-5, rows=1000, batch_size=100, steps=30, share=0.1)


def test_solved_budget_is_met_and_not_wasted(budget):
    spent = Pair(0.1, budget.sigma, (budget.index,)).epsilon(30, 1e-5)
    assert 2.0 * (1 - 1e-3) < spent <= 2.0
    assert Pair(0.1, pure=(budget.index,)).epsilon(30, 1e-5) == pytest.approx(0.2, rel=1e-3)
    # Basic composition and amplification would allow a much smaller index draw: w ε / (T q).
    assert budget.index > 0.2 / (30 * 0.1) / 2


def test_spent_epsilon_rises_to_the_budget_and_is_never_too_low(budget):
    spent = [budget.spent(step) for step in range(31)]
    assert spent[0] == 0
    assert spent == sorted(spent)
    assert spent[30] == pytest.approx(2.0, rel=1e-3)
    assert spent[30] <= 2.0
    for step in (1, 7, 29):
        assert spent[step] >= Pair(0.1, budget.sigma, (budget.index,)).epsilon(step, 1e-5) - 1e-9


def test_budget_survives_json(budget):
    assert Budget.from_dict(json.loads(json.dumps(budget.to_dict()))) == budget
    with pytest.raises(PomonaError, match="missing or unknown: sigma"):
        Budget.from_dict({k: v for k, v in budget.to_dict().items() if k != "sigma"})
    with pytest.raises(PomonaError, match="δ must lie"):
        Budget.from_dict(budget.to_dict() | {"delta": 0.1})


def test_budget_with_all_rows_in_every_step_is_the_analytic_gaussian():
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
    target = {"epsilon": 1.0, "delta": 1e-5, "rows": 1000, "batch_size": 100, "steps": 10, "share": 0.0}
    with pytest.raises(PomonaError, match=message):
        Budget.solve(**(target | change))


def test_budgets_are_solved_once():
    target = {"epsilon": 3.0, "delta": 1e-5, "rows": 100, "batch_size": 50, "steps": 2}
    assert Budget.solve(**target) is Budget.solve(**target)
    assert Budget.solve(**target).rate == 0.5


@pytest.mark.parametrize("wrong", [{"steps": 2.5}, {"rows": 1000.0}])
def test_counts_are_whole_numbers(wrong, budget):
    target = {"epsilon": 2.0, "delta": 1e-5, "rows": 1000, "batch_size": 100, "steps": 30}
    with pytest.raises(PomonaError, match="a whole one, got (2.5|1000.0): round it"):
        Budget.solve(**target | wrong)
    with pytest.raises(PomonaError, match="a whole one"):
        Budget.from_dict(budget.to_dict() | wrong)
