"""The command `retrain`."""

from __future__ import annotations

import json

import pytest


def test_retrain_compares_the_retraining_with_its_run(run_command):
    code, _, err = run_command("train", "small.toml", "--set", "train.epochs=1", "--out", "run")
    assert code == 0, err
    code, out, err = run_command("retrain", "run", "--from", "init", "--json")
    assert code == 0, err
    first, second = json.loads(out)["runs"]
    assert first["sparsity"] == pytest.approx(second["sparsity"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["retrain", "nowhere"], "is not a run"),
    ],
)
def test_invalid_arguments_of_retrain_are_refused(assert_refused, arguments, expected):
    assert_refused(arguments, expected)
