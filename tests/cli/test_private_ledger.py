"""`pomona private ledger`: empty, limited before the first run, runs that are given up, and what is refused."""

from __future__ import annotations

import json

import pytest

from pomona.cli import main
from pomona.privacy import Budget, Ledger
from pomona.privacy.ledger import ledger_folder

BUDGET = Budget(8.0, 1e-5, 1347, 400, 12, 0.0, 1.0, 0.0, ((12, 8.0),))


def test_empty_ledger_says_so(capsys):
    assert main(["private", "ledger"]) == 0
    assert "nothing was spent on any data set" in capsys.readouterr().out
    assert main(["private", "ledger", "digits", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_limit_is_set_before_the_first_run(capsys):
    pytest.importorskip("dp_accounting")
    assert main(["private", "ledger", "digits", "--limit", "3", "--delta", "1e-6"]) == 0
    assert "all runs together: ε = 0 of 3 at δ = 1e-06" in capsys.readouterr().out
    assert main(["private", "ledger", "digits", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["limit"], found["delta"], found["runs"]) == ([3.0, 1e-6], 1e-6, [])


def test_runs_are_shown_and_given_up(capsys):
    pytest.importorskip("dp_accounting")
    ledger = Ledger(ledger_folder(), "ab" * 16, name="toy", run_name="first")
    ledger.admit("cd" * 16, BUDGET, secure=True)
    ledger.record("cd" * 16, 1, "w", "s")
    assert main(["private", "ledger", "abab"]) == 0
    out = capsys.readouterr().out
    assert "toy (abababab)" in out
    assert "cdcdcdcd" in out
    assert main(["private", "ledger", "toy", "--end", "cdc", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["runs"][0]["steps"], found["runs"][0]["ended"]) == (1, True)
    assert main(["private", "ledger", "toy", "--end", "99"]) == 2
    assert "0 runs of 'toy' begin with '99'" in capsys.readouterr().err


def test_ambiguous_names_are_refused(capsys):
    Ledger(ledger_folder(), "ab" * 16, name="toy").admit("ef" * 16, BUDGET, secure=True)
    with pytest.warns(UserWarning, match=r"another data set is called 'toy' \(abababab\)"):
        Ledger(ledger_folder(), "cd" * 16, name="toy").admit("ef" * 16, BUDGET, secure=True)
    Ledger(ledger_folder(), "ef" * 16, name="other").admit("ef" * 16, BUDGET, secure=True)
    assert main(["private", "ledger", "toy", "--limit", "9"]) == 2
    assert "2 data sets are called 'toy'" in capsys.readouterr().err
    assert main(["private", "ledger", "--limit", "9"]) == 2
    assert "name it" in capsys.readouterr().err
    pytest.importorskip("dp_accounting")
    assert main(["private", "ledger", "toy"]) == 0
    assert "2 data sets are called 'toy': the limit of one" in "".join(capsys.readouterr())


@pytest.mark.parametrize("delta", ["0", "1", "2", "-1", "nan"])
def test_delta_that_is_none_is_refused(capsys, delta):
    Ledger(ledger_folder(), "ab" * 16, name="toy").admit("ef" * 16, BUDGET, secure=True)
    for options in ([], ["--limit", "20"], ["--end", "ef"]):
        assert main(["private", "ledger", "toy", f"--delta={delta}", *options]) == 2
        assert "δ must be" in capsys.readouterr().err
    ledger = Ledger(ledger_folder(), "ab" * 16)
    assert ledger.limit is None
    assert not ledger.accounts["ef" * 16].ended


def test_lost_journal_is_not_an_empty_one(capsys):
    ledger = Ledger(ledger_folder(), "ab" * 16, name="toy")
    ledger.admit("ef" * 16, BUDGET, secure=True)
    ledger.path.unlink()
    for arguments in ([], ["toy"], ["abab"]):
        assert main(["private", "ledger", *arguments]) == 2
        assert "it is missing and had 2 lines" in capsys.readouterr().err
