"""A plain loop, accelerate, Lightning and Hugging Face give the same masks and weights, also after a kill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import is_identical
from slow_cases import slow_unless
from training_stacks import STACKS, STEPS, train_plain, train_until_killed

import pomona as pm

METHODS: dict[str, Callable[[], pm.Pruner]] = {
    "dpf": lambda: pm.DPF(sparsity=0.8, every=4),
    "dpf balanced": lambda: pm.DPF(sparsity=0.75, every=4, pattern=pm.Balanced(block=4)),
    "dpf filters": lambda: pm.DPF(sparsity=0.5, every=4, pattern=pm.Filter()),
    "rigl": lambda: pm.RigL(sparsity=0.8, every=4),
    "incremental": lambda: pm.Incremental(sparsity=0.8, every=4),
    "incremental 2:4": lambda: pm.Incremental(every=4, pattern=pm.NM(2, 4)),
    "iterand": lambda: pm.IteRand(sparsity=0.6, every=4),
    "sfp": lambda: pm.SFP(sparsity=0.5, every=6),
}
CASES = [(method, stack) for method in METHODS for stack in STACKS]
QUICK = [("dpf", stack) for stack in STACKS] + [("iterand", "lightning"), ("rigl", "huggingface")]


@pytest.fixture(scope="module")
def plain_result(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return a function that gives the result of an uninterrupted plain loop, trained once for each method."""
    known: dict[str, Any] = {}

    def train(method: str) -> Any:
        if method not in known:
            known[method] = train_plain(METHODS[method], tmp_path_factory.mktemp("plain"))
        return known[method]

    return train


@pytest.mark.parametrize(("method", "stack"), slow_unless(QUICK, CASES))
def test_a_killed_and_an_uninterrupted_training_equal_the_plain_loop(
    method: str, stack: str, plain_result: Callable[[str], Any], tmp_path: Path
) -> None:
    package, train = STACKS[stack]
    pytest.importorskip(package)
    expected = plain_result(method)
    assert expected["step"] == STEPS
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert is_identical(train(METHODS[method], whole), expected)
    train_until_killed(train, METHODS[method], killed)
    assert is_identical(train(METHODS[method], killed, resume=True), expected)


@pytest.mark.filterwarnings("ignore:the optimizer was loaded with the state of a pruner at step 24")
@pytest.mark.parametrize("stack", ["lightning", "huggingface"])
def test_a_checkpoint_of_the_last_step_is_finished(
    stack: str, plain_result: Callable[[str], Any], tmp_path: Path
) -> None:
    package, train = STACKS[stack]
    pytest.importorskip(package)
    expected = plain_result("dpf filters")  # whose biases and norms are pruned by finish()
    train(METHODS["dpf filters"], tmp_path)
    assert is_identical(train(METHODS["dpf filters"], tmp_path, resume=True), expected)
