"""What the callbacks share, by hand: lengths of training and epochs, and since when the final sparsity is held."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import pomona as pm
from pomona.integrations.trainer_pruning import TrainerPruning, count_epoch_steps, count_steps_left


@pytest.mark.parametrize(
    ("total", "step", "left"), [(100, 0, 100), (100, 30, 70), (-1, 0, None), (float("inf"), 5, None), (None, 0, None)]
)
def test_the_steps_left(total: Any, step: int, left: int | None) -> None:
    assert count_steps_left(total, step) == left


@pytest.mark.parametrize(
    ("batches", "accumulated", "steps"), [(12, 1, 12), (12, 2, 6), (13, 2, 7), (float("inf"), 2, None), (None, 1, None)]
)
def test_the_steps_of_an_epoch(batches: Any, accumulated: int, steps: int | None) -> None:
    assert count_epoch_steps(batches, accumulated) == steps


@pytest.mark.parametrize(
    ("sparsities", "held"),
    [
        ({0: 0.0, 10: 0.5, 20: 0.8, 25: 0.8}, 10),
        ({0: 0.8, 5: 0.0, 25: 0.8}, 5),  # a dense phase in between, as ACDC has
        ({0: 0.0, 10: 0.8, 20: 0.0}, None),
        ({0: 0.8}, 30),
    ],
)
def test_since_when_the_final_sparsity_is_held(sparsities: dict[int, float], held: int | None) -> None:
    training = TrainerPruning(pm.DPF(sparsity=0.8))
    history = [{"step": step, "sparsity": sparsity} for step, sparsity in sparsities.items()]
    method, reached = SimpleNamespace(final_sparsity=0.8), history[-1]["sparsity"]
    training.pruner = SimpleNamespace(method=method, reached=reached, step=30, history=history)  # type: ignore[assignment]
    assert training.count_steps_at_target() == held
