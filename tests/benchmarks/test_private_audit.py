"""The audits and the second accountant agree with what the budgets of many settings promise."""

from __future__ import annotations

import pytest

pytest.importorskip("dp_accounting")


def find_settings(load_script):
    """Return the script of the audits, and its settings."""
    script = load_script("private_audit")
    return script, script.SETTINGS


def test_there_are_settings_of_all_kinds(load_script):
    _, settings = find_settings(load_script)
    assert len(settings) >= 8
    assert {setting.method for setting in settings} == {"dpsgd", "gip", "random", "datalens"}
    assert len({setting.rate for setting in settings}) >= 3


@pytest.mark.parametrize("number", range(15))
def test_bounds_of_the_second_accountant_contain_the_promise(load_script, number):
    script, settings = find_settings(load_script)
    setting = settings[number]
    budget = setting.solve()
    low, high = script.bracket_epsilon(budget.pairs(range(budget.steps)), script.DELTA, 1e-3)
    assert low < setting.epsilon
    assert high > setting.epsilon * (1 - 1e-3)  # the budget may be solved to a thousandth below
    assert high - low < 2.1e-3 * budget.steps


@pytest.mark.parametrize("number", [pytest.param(k, marks=pytest.mark.slow) if k else k for k in range(15)])
def test_audit_finds_no_more_than_the_promise(load_script, number):
    script, settings = find_settings(load_script)
    row = script.measure_setting(settings[number], runs=4)
    assert 0.05 < row["audited"] < row["epsilon"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of its logarithms
def test_accountant_of_opacus_agrees_where_it_applies(load_script):
    """Its PRV accountant composes Gaussian noise on samples, also of different σ, and returns an upper bound."""
    accountants = pytest.importorskip("opacus.accountants")
    _, settings = find_settings(load_script)
    compared = 0
    for setting in settings:
        if setting.share or setting.rate == 1:  # it knows no index draws, and divides by zero without sampling
            continue
        budget, peer = setting.solve(), accountants.PRVAccountant()
        for pair, count in budget.pairs(range(budget.steps)).items():
            peer.history.append((pair.sigma, pair.rate, count))
        found = peer.get_epsilon(delta=budget.delta, eps_error=0.02)
        assert setting.epsilon * (1 - 2e-3) < found < setting.epsilon + 0.05
        compared += 1
    assert compared >= 5
