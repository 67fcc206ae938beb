"""Memory: neither steps nor attached and finished pruners leave anything behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from engine_helpers import count_global_hooks, count_hooks
from torch import nn

import pomona as pm
from pomona.core import history
from pomona.methods import make_pruner

METHODS = ["dpf", "incremental", "rigl", "set", "edge_popup"]


def make_model(name: str) -> nn.Sequential:
    """Return a tiny network."""
    return nn.Sequential(nn.Linear(4, 6, bias=name != "edge_popup"), nn.ReLU(), nn.Linear(6, 3, bias=False))


def make_updating_pruner(name: str) -> pm.Pruner:
    """Return a pruner with a mask update every second step."""
    return make_pruner({"name": name, "sparsity": 0.5, "every": 2})


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    """Train on one batch."""
    inputs = torch.ones(2, 4)
    for _ in range(count):
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()


def count_objects() -> int:
    """Return how many objects the garbage collector knows, after a collection."""
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize("name", METHODS)
def test_steps_leave_no_objects_behind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_ENTRIES", 20)
    model = make_model(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    pruner = make_updating_pruner(name).attach(model, optimizer, total_steps=10_000)
    take_steps(model, optimizer, 100)  # until the history is full
    before = count_objects()
    take_steps(model, optimizer, 300)
    assert pruner.update_count > 150
    # The history varies by half its length, with a few objects for each entry; 150 updates would leave more.
    assert count_objects() - before < 150


@pytest.mark.parametrize("name", METHODS)
def test_pruners_that_finish_leave_no_objects_or_hooks(name: str) -> None:
    model = make_model(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def cycle() -> weakref.ref[pm.Pruner]:
        pruner = make_updating_pruner(name).attach(model, optimizer, total_steps=3, resume=False)
        take_steps(model, optimizer, 3)
        pruner.finish(max_batches=0)
        return weakref.ref(pruner)

    hooks, everywhere = count_hooks(model, optimizer), count_global_hooks()
    for _ in range(3):
        cycle()
    before = count_objects()
    left = [cycle() for _ in range(25)]
    assert count_objects() - before < 25 + len(left)  # less than one for each cycle, besides the references
    assert not any(ref() for ref in left)
    assert count_hooks(model, optimizer) == hooks
    assert count_global_hooks() == everywhere


@pytest.mark.parametrize("name", METHODS)
def test_a_dropped_model_is_freed_with_its_pruner(name: str) -> None:
    def attach() -> list[weakref.ref]:
        model = make_model(name)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        pruner = make_updating_pruner(name).attach(model, optimizer, total_steps=3)
        take_steps(model, optimizer, 2)
        return [weakref.ref(one) for one in (model, model[0].weight, optimizer, pruner)]

    references = attach()
    everywhere = count_global_hooks()
    gc.collect()
    assert not any(reference() for reference in references)
    attach()
    assert count_global_hooks() == everywhere
