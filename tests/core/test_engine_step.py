"""One optimizer step: projection, gradients, momentum, skipped parameters, exceptions and several optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import (
    TOTAL,
    copy_latents,
    copy_state,
    make_closure,
    make_factory,
    make_hard,
    make_soft,
    soft_and_hard,
)
from engine_helpers import (
    TARGETS,
    Net,
    attach_to_network,
    compute_loss,
    is_identical,
    make_adam,
    make_sgd,
    obeys_masks,
    train,
)
from torch import Tensor
from torch.optim import SGD, Adam

import pomona as pm
from pomona.masking import apply_mask


def test_projection_makes_no_negative_zero_and_no_nan() -> None:
    values = torch.tensor([-1.0, torch.inf, -torch.inf, torch.nan, 2.0])
    mask = torch.tensor([False, False, False, False, True])
    apply_mask(values, mask, values)
    assert values.tolist() == [0, 0, 0, 0, 2]
    assert not values.signbit().any()


def test_soft_methods_keep_the_dense_gradient() -> None:
    model, optimizer, pruner = attach_to_network(make_soft())
    compute_loss(model, 0).backward()
    gradient = model.conv1.weight.grad
    before = gradient.clone()
    assert before[~pruner.masks()["conv1.weight"]].any()
    optimizer.step()
    assert model.conv1.weight.grad is gradient
    assert torch.equal(gradient, before)


def test_hard_methods_mask_a_gradient_assigned_by_the_user() -> None:
    model, optimizer, pruner = attach_to_network(make_hard())
    model.conv1.weight.grad = torch.ones_like(model.conv1.weight)
    optimizer.step()
    assert obeys_masks(model, pruner)
    assert not optimizer.state[model.conv1.weight]["momentum_buffer"][~pruner.masks()["conv1.weight"]].any()


@soft_and_hard
def test_gradient_accumulation_is_one_step_on_sparse_weights(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind())
    for step in range(8):
        assert obeys_masks(model, pruner)
        (compute_loss(model, step) / 4).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    assert pruner.step == 2


@pytest.mark.parametrize("make", [make_sgd, make_adam])
def test_hard_methods_keep_no_momentum_of_pruned_weights(make: Any) -> None:
    model = Net().double()
    optimizer = make(model)
    train(model, optimizer, range(3))
    pruner = make_hard(schedule="cubic").attach(model, optimizer, total_steps=TOTAL)

    def clean() -> bool:
        return all(
            not value[~mask].any()
            for name, mask in pruner.masks().items()
            for value in optimizer.state[model.get_parameter(name)].values()
            if value.ndim
        )

    assert clean()
    for step in range(12):
        train(model, optimizer, [step])
        assert clean()
    assert pruner.sparsity() > 0.3


def test_pruning_at_attach_clears_the_momentum_of_pruned_weights() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    train(model, optimizer, range(3))
    pruner = pm.OneShot(sparsity=0.5).attach(model, optimizer)
    momentum = optimizer.state[model.conv1.weight]["momentum_buffer"]
    assert not momentum[~pruner.masks()["conv1.weight"]].any()
    assert momentum[pruner.masks()["conv1.weight"]].all()


class FailsOnRequest(SGD):
    """SGD that raises in the middle of a step while `broken` is true."""

    broken = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.broken:
            self.param_groups[0]["params"][0].add_(1.0)
            raise RuntimeError("out of memory")
        return super().step(closure)


@soft_and_hard
@pytest.mark.parametrize("where", ["step", "closure", "closure's end"])
@pytest.mark.parametrize("then", ["refresh", "step", "finish", "save"])
def test_an_exception_leaves_the_engine_consistent(kind: Callable[..., pm.Pruner], where: str, then: str) -> None:
    model, optimizer, pruner = attach_to_network(kind(), make=make_factory(FailsOnRequest))
    train(model, optimizer, range(5))
    dense = copy_latents(pruner)

    def closure() -> Tensor:
        if where == "closure":
            raise RuntimeError("out of memory")
        loss = make_closure(model, optimizer, 5)()
        if where == "closure's end":
            raise RuntimeError("out of memory")
        return loss

    optimizer.broken = where == "step"
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(*[closure] * (where != "step"))
    optimizer.broken = False
    assert pruner.step == 5
    assert is_identical(copy_latents(pruner), dense)
    if then == "refresh":
        pruner.refresh()
    elif then == "step":
        train(model, optimizer, [5])
        assert pruner.step == 6
    elif then == "finish":
        pruner.finish()
    elif then == "save":
        state = copy.deepcopy(pruner.state_dict())
        pruner.load_state_dict(state)
    assert obeys_masks(model, pruner)
    assert then == "step" or then == "finish" or is_identical(copy_latents(pruner), dense)


def test_soft_methods_undo_a_step_that_failed() -> None:
    model, optimizer, pruner = attach_to_network(make_soft(), make=make_factory(FailsOnRequest))
    before = copy_state(pruner)
    optimizer.broken = True
    compute_loss(model, 0).backward()
    with pytest.raises(RuntimeError):
        optimizer.step()
    pruner.refresh()
    after = copy_state(pruner)
    assert is_identical({k: after["model"][k] for k in TARGETS}, {k: before["model"][k] for k in TARGETS})
    assert is_identical(after["state"], before["state"])


@soft_and_hard
def test_several_optimizers_count_as_one_step(kind: Callable[..., pm.Pruner]) -> None:
    model = Net().double()
    first = SGD(model.conv1.parameters(), lr=0.1, momentum=0.9)
    rest = [p for n, p in model.named_parameters() if not n.startswith("conv1")]
    second = Adam(rest, lr=0.01)
    pruner = kind(schedule="cubic").attach(model, [first, second], total_steps=TOTAL)
    for step in range(5):
        model.zero_grad()
        compute_loss(model, step).backward()
        before = copy.deepcopy(model.state_dict())
        first.step()
        assert pruner.step == step
        assert torch.equal(model.conv2.weight, before["conv2.weight"])
        assert obeys_masks(model, pruner)
        second.step()
        assert pruner.step == step + 1
        assert obeys_masks(model, pruner)
    assert [entry["step"] for entry in pruner.history] == [0, 4]


@soft_and_hard
def test_a_parameter_without_gradient_is_not_changed(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind())
    before, dense = model.conv2.weight.clone(), copy_latents(pruner).get("conv2.weight")
    version = model.conv2.weight._version
    compute_loss(model, 0).backward()
    model.conv2.weight.grad = None
    optimizer.step()
    assert model.conv2.weight._version == version
    assert torch.equal(model.conv2.weight, before)
    assert dense is None or torch.equal(copy_latents(pruner)["conv2.weight"], dense)
    assert pruner.step == 1


def test_tick_counts_a_step_and_updates_masks() -> None:
    _, _, pruner = attach_to_network(make_soft())
    for _ in range(4):
        pruner.tick()
    assert pruner.step == 4
    assert [entry["step"] for entry in pruner.history] == [0, 4]


@pytest.mark.parametrize("every", [1, 3, 7])
@pytest.mark.parametrize("limit", [1, 2, 5, 50])
def test_steps_to_update_ends_where_masks_change(every: int, limit: int) -> None:
    method = pm.DPF(sparsity=0.5, every=every)
    (_, _, one), (_, _, several) = attach_to_network(pm.DPF(sparsity=0.5, every=every)), attach_to_network(method)
    while several.step < several.total:
        steps = several.steps_to_update(min(limit, several.total - several.step))
        for _ in range(steps - 1):
            updates = len(one.history)
            one.tick()
            assert len(one.history) == updates
        one.tick()
        several.tick(steps)
        assert (several.step, len(several.history)) == (one.step, len(one.history))
    assert [entry["step"] for entry in several.history] == [entry["step"] for entry in one.history]


def test_a_step_whose_gradient_is_needed_is_not_replayed_with_those_before_it() -> None:
    _, _, pruner = attach_to_network(pm.RigL(sparsity=0.5, every=4))
    assert pruner.steps_to_update(10) == 4
    pruner.tick(4)
    assert pruner.wants_gradient()
    with pytest.raises(pm.PomonaError, match="needs the gradient of this step"):
        pruner.tick()
