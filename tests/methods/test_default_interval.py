"""DPF's default interval between mask updates: the paper's 16 steps, and fewer where training is short."""

from __future__ import annotations

import pytest
from engine_helpers import attach_to_network, is_identical, save_and_load, train

import pomona as pm
from pomona.core.method import Method, TrainingProgress
from pomona.errors import PomonaError
from pomona.methods import METHODS

TOTAL = 240


def schedule(method: Method, total: int) -> list[tuple[bool, bool, float]]:
    """Return for each step of a training whether an update is due, whether it is the last, and its sparsity."""
    steps = [TrainingProgress(step, total) for step in range(total + 1)]
    return [(method.is_update_due(p), method.is_last_update(p), method.scheduled_sparsity(p)) for p in steps]


@pytest.mark.parametrize(
    ("total", "every"), [(1, 1), (120, 1), (TOTAL, 2), (480, 4), (1599, 15), (1600, 16), (10**6, 16)]
)
def test_the_interval_follows_from_the_length_of_training(total: int, every: int):
    default = METHODS.resolve("dpf")
    assert default.interval(TrainingProgress(0, total)) == every
    if total < 10**4:
        assert schedule(default, total) == schedule(METHODS.resolve(f"dpf(every={every})"), total)


def test_a_short_training_has_a_hundred_updates_before_its_mask_rests():
    for total in (150, 300, 700, 1000, 1599):
        updates = [due for due, _, _ in schedule(METHODS.resolve("dpf"), total)]
        assert sum(updates) >= 90
        assert not any(updates[int(0.9 * total) + 1 :])


def test_a_number_that_is_given_is_kept():
    assert METHODS.resolve("dpf(every=16)").interval(TrainingProgress(0, TOTAL)) == 16
    assert METHODS.resolve("dpf(printed=true)").interval(TrainingProgress(0, TOTAL)) == 16
    assert METHODS.resolve("dpf(printed=true, every=4)").interval(TrainingProgress(0, TOTAL)) == 4


def test_the_steps_to_replay_end_at_the_next_update():
    model, optimizer, pruner = attach_to_network(pm.DPF(sparsity=0.8))
    train(model, optimizer, range(1))
    assert pruner.steps_to_update(100) == 1
    assert attach_to_network(pm.DPF(sparsity=0.8, every=16))[2].steps_to_update(100) == 16


def test_a_resumed_short_training_is_the_same_to_the_bit():
    model, optimizer, pruner = attach_to_network(pm.DPF(sparsity=0.8), 90)
    train(model, optimizer, range(90))
    first, first_optimizer, begun = attach_to_network(pm.DPF(sparsity=0.8), 90)
    train(first, first_optimizer, range(31))
    state = begun.state_dict()
    assert state["method"]["every"] == 1  # a later version with another default continues by this number, or refuses
    resumed, resumed_optimizer, continued = attach_to_network(pm.DPF(sparsity=0.8), 90)
    resumed.load_state_dict(first.state_dict())
    resumed_optimizer.load_state_dict(save_and_load(first_optimizer.state_dict()))
    continued.load_state_dict(save_and_load(state))
    train(resumed, resumed_optimizer, range(31, 90))
    assert continued.history == pruner.history
    assert is_identical(resumed.state_dict(), model.state_dict())


@pytest.mark.parametrize(("total", "fits"), [(TOTAL, False), (1600, True)])
def test_a_state_from_before_the_default_changed_fits_where_its_number_is_the_same(total: int, fits: bool):
    state = attach_to_network(pm.DPF(sparsity=0.8, every=16), total)[2].state_dict()
    pruner = attach_to_network(pm.DPF(sparsity=0.8), total)[2]
    if fits:
        pruner.load_state_dict(state)
    else:
        with pytest.raises(PomonaError, match="a method with every = 16, this pruner has 2"):
            pruner.load_state_dict(state)
