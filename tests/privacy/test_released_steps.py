"""Attack 8: private steps that are copied, set back or made again with their key never use noise for two gradients."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from private_training import flat_parameters, make_budget, make_data, make_network

from pomona.errors import PomonaError
from pomona.privacy import PrivateStep, Source, released_steps


def make_step(seed: int = 0, **options):
    """Return a network and its DP-SGD steps with a key of the operating system, without a ledger."""
    model = make_network(seed)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    return model, PrivateStep(model, optimizer, make_budget(), **{"method": "dpsgd", **options})


def take(step, count: int) -> None:
    x, y = make_data()
    for _ in range(count):
        rows = step.draw()
        step(x[rows], y[rows])


def test_copies_of_a_step_and_of_its_key_are_refused():
    _, step = make_step()
    for make in (copy.copy, copy.deepcopy, pickle.dumps, lambda one: copy.deepcopy((one, one.optimizer))):
        with pytest.raises(PomonaError, match="a private step cannot be copied or pickled"):
            make(step)
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(PomonaError, match="a random source cannot be copied or pickled"):
            make(step.source)


def test_step_that_is_set_back_repeats_itself_or_is_refused():
    model, step = make_step()
    state, weights = step.state_dict(), copy.deepcopy(model.state_dict())
    take(step, 8)
    end = flat_parameters(model)
    step.load_state_dict(state)
    assert step.spent == 2.0  # what was released stays released
    with torch.no_grad():
        model[0].weight.add_(1)
    before = flat_parameters(model)
    with pytest.raises(PomonaError, match="step 1 of this run was taken before with other gradients"):
        take(step, 1)
    assert torch.equal(flat_parameters(model), before)
    model.load_state_dict(weights)
    step.load_state_dict(state)
    take(step, 8)
    assert torch.equal(flat_parameters(model), end)


def test_key_in_another_step_is_compared_too():
    _, step = make_step()
    take(step, 2)
    state = step.state_dict()
    take(step, 1)
    _, twin = make_step(seed=1)
    twin.load_state_dict(state)
    with pytest.raises(PomonaError, match="step 3 of this run was taken before"):
        take(twin, 1)
    source = Source()
    source.key = step.source.key
    _, twin = make_step(seed=1, source=source)
    with pytest.raises(PomonaError, match="step 1 of this run was taken before"):
        take(twin, 1)


def test_rows_that_were_drawn_stay_charged_when_a_state_is_loaded():
    _, step = make_step()
    state = step.state_dict()
    for _ in range(5):
        step.draw()
    step.load_state_dict(state)
    assert step.spent == 2.0
    assert make_step()[1].spent == 0.0


def test_two_steps_may_follow_each_other_with_one_source():
    """Their numbers have other addresses, so nothing is drawn twice."""
    source = Source()
    for seed in (0, 1):
        _, step = make_step(seed, source=source)
        assert step.spent == 0.0
        take(step, 8)


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(released_steps, "MOST_STEPS", 10)
    _, first = make_step()
    take(first, 8)
    _, second = make_step(seed=1)
    take(second, 8)
    assert [len(known.released) for known in released_steps._runs.values()] == [8]
