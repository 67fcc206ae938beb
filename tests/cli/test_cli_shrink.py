"""The command `shrink`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def test_shrink_writes_a_smaller_network(run_command):
    pytest.importorskip("torch_pruning")
    settings = ["--set", 'method="oneshot(pattern=\\"filter\\", sparsity=0.5, at=0.5)"', "--set", "train.epochs=1"]
    code, _, err = run_command("train", "small.toml", *settings, "--out", "run")
    assert code == 0, err
    code, out, err = run_command("shrink", "run", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["params"]["after"] < result["params"]["before"]
    assert Path(result["file"]).is_file()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["shrink", "nowhere"], "is not a finished run"),
    ],
)
def test_invalid_arguments_of_shrink_are_refused(assert_refused, arguments, expected):
    assert_refused(arguments, expected)
