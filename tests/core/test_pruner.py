"""The pruner: `apply`, `finish`, copies, deletion, and states that are refused."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from engine_cases import TOTAL, copy_state, make_hard, make_soft, soft_and_hard
from engine_helpers import (
    TARGETS,
    Net,
    attach_to_network,
    count_global_hooks,
    is_identical,
    make_sgd,
    obeys_masks,
    train,
)
from torch import nn
from torch.optim.swa_utils import AveragedModel

import pomona as pm
from pomona.core.state import ADDED
from pomona.methods._mask_holder import MaskHolder


@soft_and_hard
def test_apply_projects_an_average_of_weights(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind(schedule="cubic"))
    average = AveragedModel(model)
    for step in range(20):
        train(model, optimizer, [step])
        average.update_parameters(model)
    mask = pruner.masks()["conv1.weight"]
    assert average.module.conv1.weight[~mask].any()
    before = average.module.conv1.weight.clone()
    pruner.apply(average)
    assert obeys_masks(average.module, pruner)
    assert torch.equal(average.module.conv1.weight[mask], before[mask])
    plain = copy.deepcopy(model)
    plain.load_state_dict(Net(seed=3).state_dict())
    pruner.apply(plain)
    assert obeys_masks(plain, pruner)
    assert obeys_masks(model, pruner)


def test_apply_refuses_another_model_and_a_pruner_without_masks() -> None:
    _, _, pruner = attach_to_network(make_soft())
    other = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(pm.PomonaError, match=r"conv1\.weight is missing"):
        pruner.apply(other)
    with pytest.raises(pm.PomonaError, match="not attached"):
        make_soft().apply(Net())


@soft_and_hard
def test_finish_before_the_end_warns_and_prunes_the_rest(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind(schedule="cubic"))
    train(model, optimizer, range(5))
    assert pruner.sparsity() < 0.8
    with pytest.warns(UserWarning, match="finish.. came at step 5 of 40"):
        pruner.finish()
    assert pruner.sparsity() == pytest.approx(0.8, abs=1e-3)
    assert obeys_masks(model, pruner)
    pruner.finish()  # a second call does nothing


def test_after_finish_only_the_masks_can_be_read() -> None:
    model, optimizer, pruner = attach_to_network(make_soft(), total=4)
    with pytest.raises(pm.PomonaError, match="not attached"):
        make_soft().finish()
    train(model, optimizer, range(4))
    pruner.finish()
    for act in (pruner.tick, pruner.refresh, lambda: pruner.load_state_dict({})):
        with pytest.raises(pm.PomonaError, match="finished"):
            act()
    assert pruner.sparsity() == pytest.approx(0.8, abs=1e-3)
    train(model, optimizer, range(2))
    assert not obeys_masks(model, pruner)


@soft_and_hard
@pytest.mark.parametrize("stepped", [False, True])
def test_a_deleted_pruner_leaves_no_references_and_no_hooks(kind: Callable[..., pm.Pruner], stepped: bool) -> None:
    before = count_global_hooks()
    model, optimizer, pruner = attach_to_network(kind())
    if stepped:
        train(model, optimizer, range(2))
    watch = weakref.ref(model), weakref.ref(pruner), weakref.ref(model.conv1.weight)
    del model, optimizer, pruner
    gc.collect()
    assert [ref() for ref in watch] == [None, None, None]
    assert count_global_hooks() == before


def make_smaller_network() -> Net:
    """Return the network with a smaller hidden layer."""
    model = Net()
    model.hidden, model.head = nn.Linear(12, 8), nn.Linear(8, 5)
    return model


def make_transposed_network() -> Net:
    """Return the network with a hidden layer of as many weights in another shape."""
    model = Net()
    model.hidden = nn.Linear(16, 12)  # as many weights, another shape
    return model


@soft_and_hard
@pytest.mark.parametrize("other", [make_smaller_network, make_transposed_network])
def test_the_state_of_another_model_is_refused_and_changes_nothing(
    kind: Callable[..., pm.Pruner], other: Callable[[], Net]
) -> None:
    _, _, pruner = attach_to_network(kind())
    stranger = other()
    state = kind().attach(stranger, make_sgd(stranger), total_steps=TOTAL).state_dict()
    before = copy_state(pruner)
    with pytest.raises(pm.PomonaError, match=r"hidden\.weight has shape"):
        pruner.load_state_dict(state)
    assert is_identical(copy_state(pruner), before)


@soft_and_hard
def test_the_state_of_another_method_is_refused(kind: Callable[..., pm.Pruner]) -> None:
    _, _, pruner = attach_to_network(kind())
    _, _, other = attach_to_network(kind(sparsity=0.7))
    with pytest.raises(pm.PomonaError, match="sparsity = 0.7, this pruner has 0.8"):
        pruner.load_state_dict(other.state_dict())
    with pytest.raises(pm.PomonaError, match="version"):
        pruner.load_state_dict({"version": 99})


@soft_and_hard
def test_a_damaged_state_is_refused_and_changes_nothing(kind: Callable[..., pm.Pruner]) -> None:
    _, optimizer, pruner = attach_to_network(kind(schedule="cubic"))
    train(pruner.model, optimizer, range(8))
    whole = copy.deepcopy(pruner.state_dict())
    train(pruner.model, optimizer, range(8, 16))
    before = copy_state(pruner)
    for key in whole.keys() - {"version", *ADDED}:
        damaged = {k: v for k, v in whole.items() if k != key}
        if kind is make_hard and key == "latents":
            continue
        with pytest.raises(pm.PomonaError, match=key):
            pruner.load_state_dict(damaged)
        assert is_identical(copy_state(pruner), before)


def make_holder() -> MaskHolder:
    """Return a pruner that holds masks of its own: every other row."""
    masks = {name: torch.ones_like(Net().get_parameter(name), dtype=torch.bool) for name in TARGETS}
    for mask in masks.values():
        mask[::2] = False
    return MaskHolder(pm.Finetune(include=TARGETS).method, masks, rewind=4)


@pytest.mark.parametrize("make", [make_soft, make_hard, make_holder])
def test_a_copied_pruner_is_of_its_class_and_trains_as_the_original(make: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(make())
    train(model, optimizer, range(3))
    other, other_optimizer, copied = copy.deepcopy((model, optimizer, pruner))
    assert type(copied) is type(pruner)
    assert copied.method is pruner.method
    train(model, optimizer, range(3, 12))
    train(other, other_optimizer, range(3, 12))
    assert obeys_masks(other, copied)
    assert is_identical(model.state_dict(), other.state_dict())
    assert is_identical(pruner.masks(), copied.masks())
    if isinstance(pruner, MaskHolder):
        assert is_identical(pruner.snapshot, copied.snapshot)
        assert copied.snapshot
        assert int(pruner.masks()["conv1.weight"].sum()) * 2 == Net().conv1.weight.numel()


def test_a_copied_lottery_trains_in_rounds() -> None:
    copied = copy.deepcopy(pm.Lottery(sparsity=0.5, rate=0.5))
    model = Net()

    def train_round(model: nn.Module, pruner: pm.Pruner, index: int) -> None:
        optimizer = make_sgd(model)
        pruner.attach(model, optimizer, total_steps=2)
        train(model, optimizer, range(2))
        pruner.finish()

    assert [entry["round"] for entry in copied.rounds(model, train_round)] == [0, 1]
