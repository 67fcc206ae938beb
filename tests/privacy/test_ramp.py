"""Ramps of the noise and of the index draws: their factors, and budgets that account for every step as it is taken."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_accounting import compose_bounds

from pomona.errors import PomonaError
from pomona.privacy import Budget, Pair
from pomona.privacy.accounting import compose_steps
from pomona.privacy.budget import solve_steps
from pomona.privacy.ramp import CONSTANT, EPSILON_RAMP, MAX_PARTS, Ramp

TARGET = {"epsilon": 2.0, "delta": 1e-5, "rows": 400, "batch_size": 40, "steps": 30}


def test_factors_by_hand():
    ramp = Ramp(1.0, 3.0, parts=3)
    assert [ramp(step, 6) for step in range(6)] == [1, 1, 2, 2, 3, 3]
    assert [Ramp(0.5, 2.0, parts=4)(step, 2) for step in range(2)] == [0.5, 1.5]
    assert CONSTANT.is_constant
    assert CONSTANT(5, 10) == 1
    assert not ramp.is_constant


@given(start=st.floats(0.1, 10), end=st.floats(0.1, 10), parts=st.integers(2, MAX_PARTS), steps=st.integers(1, 2000))
def test_factors_lie_between_the_ends_in_parts_of_equal_length(start, end, parts, steps):
    ramp = Ramp(start, end, parts)
    factors = [ramp(step, steps) for step in range(steps)]
    assert factors[0] == start
    assert min(start, end) * (1 - 1e-12) <= min(factors) <= max(factors) <= max(start, end) * (1 + 1e-12)
    assert factors == sorted(factors, reverse=start > end)
    lengths = Counter(factors).values()
    assert start == end or (len(lengths) <= parts and max(lengths) - min(lengths) <= 1)


def test_forms_of_a_ramp_and_bad_ones():
    assert Ramp.of((2, 1)) == Ramp(2.0, 1.0)
    assert Ramp.of({"start": 2.0, "parts": 8}) == Ramp(2.0, 1.0, 8)
    assert Ramp.of(None) == CONSTANT
    assert Ramp.of(Ramp(2, 3)) == Ramp(2, 3)
    for value in ({"begin": 1.0}, (1.0,), 3, "high"):
        with pytest.raises(PomonaError, match="a ramp has a start and an end"):
            Ramp.of(value)
    for value in ((0.0, 1.0), (1.0, float("inf")), (-1.0, 1.0)):
        with pytest.raises(PomonaError, match="factors of a ramp must be above 0"):
            Ramp.of(value)
    with pytest.raises(PomonaError, match="2 to 64 parts"):
        Ramp(1.0, 2.0, 65)
    assert (EPSILON_RAMP.start, EPSILON_RAMP.end) == (1 / 3, 5 / 3)
    assert np.mean([EPSILON_RAMP(step, 800) for step in range(800)]) == pytest.approx(1.0)


# ---- budgets

pytest.importorskip("dp_accounting")


@pytest.fixture(scope="module")
def budget() -> Budget:
    return Budget.solve(**TARGET, share=0.3, noise_ramp=Ramp(1.5, 0.75, 4), index_ramp=Ramp(1 / 3, 5 / 3, 3))


def test_steps_of_a_budget_have_the_releases_that_are_accounted_for(budget):
    kinds = budget.pairs(range(30))
    assert kinds.total() == 30
    for step in range(30):
        noise, draw = 1.5 - 0.25 * (step * 4 // 30), (1 + 2 * (step * 3 // 30)) / 3
        assert budget.sigma_at(step) == pytest.approx(budget.sigma * noise)
        assert budget.index_at(step) == pytest.approx(budget.index * draw)
        assert kinds[Pair(0.1, budget.sigma_at(step), (budget.index_at(step),))] > 0


def test_second_accountant_agrees_with_budgets_of_ramps(budget):
    low, high = compose_bounds(budget.pairs(range(30)), 1e-5)
    assert low < 2.0 < high < 2.1
    alone = Counter(Pair(0.1, None, (budget.index_at(step),)) for step in range(30))
    assert next(compose_steps(alone)).get_epsilon_for_delta(1e-5) == pytest.approx(0.6, rel=2e-3)


def test_equal_parts_cost_what_a_constant_budget_costs():
    steps = {Pair(0.1, 1.2 * (1 + k * 1e-10), (0.05,)): 10 + k for k in range(5)}
    together = next(compose_steps(steps)).get_epsilon_for_delta(1e-5)
    assert together == pytest.approx(Pair(0.1, 1.2, (0.05,)).epsilon(60, 1e-5), rel=1e-6)
    first, second = compose_steps({Pair(0.1, 1.2): 3, Pair(0.1, 2.0): 2}, {Pair(0.1, 2.0): 4})
    assert first.get_epsilon_for_delta(1e-5) < second.get_epsilon_for_delta(1e-5)
    whole = next(compose_steps({Pair(0.1, 1.2): 3, Pair(0.1, 2.0): 6}))
    assert second.get_epsilon_for_delta(1e-5) == pytest.approx(whole.get_epsilon_for_delta(1e-5), rel=1e-9)


def test_spent_epsilon_is_that_of_the_steps_taken(budget):
    for step in (1, 8, 29):
        cost = next(compose_steps(budget.pairs(range(step)))).get_epsilon_for_delta(1e-5)
        assert budget.spent(step) >= cost - 1e-9
    assert budget.spent(30) == pytest.approx(2.0, rel=1e-3)


def test_budget_of_ramps_survives_json_and_is_verified(budget):
    again = Budget.from_dict(json.loads(json.dumps(budget.to_dict())))
    assert again == budget
    copy = dataclasses.replace(again, curve=((30, 2.0),))
    copy.verify()
    # Less noise in the first steps, larger draws, or a schedule that is not accounted for.
    for change in ({"noise_ramp": CONSTANT}, {"noise_ramp": Ramp(0.75, 0.75)}, {"index_ramp": Ramp(5.0, 5.0)}):
        with pytest.raises(PomonaError, match="solve the budget again"):
            dataclasses.replace(copy, **change, sigma=0.9 * copy.sigma).verify()
    with pytest.raises(PomonaError, match="an index ramp needs index draws"):
        Budget.solve(**TARGET, index_ramp=EPSILON_RAMP)


def test_constant_ramps_leave_no_trace_in_files():
    plain = Budget.solve(**TARGET)
    assert not {"noise_ramp", "index_ramp"} & plain.to_dict().keys()
    assert Budget.from_dict(plain.to_dict()) == plain
    assert Budget.solve(**TARGET, noise_ramp=(1.0, 1.0)) is plain


# ---- T from σ


@pytest.mark.parametrize("sigma", [1.5, 3.0, 12.0])
def test_steps_from_sigma_are_the_most_that_the_budget_allows(sigma):
    target = {"epsilon": 1.0, "delta": 1e-5, "rows": 1000, "batch_size": 50}
    steps = solve_steps(**target, sigma=sigma)
    pair = Pair(0.05, sigma)
    assert pair.epsilon(steps, 1e-5) <= 1.0 < pair.epsilon(steps + 1, 1e-5)
    assert Budget.solve(**target, steps=steps).sigma == pytest.approx(sigma, rel=0.05)


def test_steps_from_a_sigma_that_allows_none_or_too_many_are_refused():
    target = {"epsilon": 1.0, "delta": 1e-5, "rows": 1000, "batch_size": 500}
    with pytest.raises(PomonaError, match="one step with σ=0.5 costs more than ε=1"):
        solve_steps(**target, sigma=0.5)
