"""Weights and parameters that the user changes between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import copy_latents, copy_state, ignore_warnings, make_hard, make_soft, soft_and_hard
from engine_helpers import TARGETS, Net, attach_to_network, compute_loss, is_identical, make_sgd, obeys_masks, train
from torch.optim import SGD

import pomona as pm


def test_edited_weights_become_the_latent_with_a_warning() -> None:
    model, optimizer, pruner = attach_to_network(make_soft())
    train(model, optimizer, range(2))
    other = Net(seed=5).double()
    model.load_state_dict(other.state_dict())
    optimizer.zero_grad()
    compute_loss(model, 0).backward()
    with pytest.warns(UserWarning, match="was changed between two steps") as caught:
        optimizer.step()
    assert [str(w.message).split()[0] for w in caught] == list(TARGETS)
    assert obeys_masks(model, pruner)
    off = ~pruner.masks()["conv1.weight"]
    moved = (copy_latents(pruner)["conv1.weight"] - other.conv1.weight).abs()
    assert moved[off].max() < 0.1, "the latents were not replaced"
    train(model, optimizer, [3])  # a second warning would fail the test


def test_edited_weights_of_a_hard_method_are_masked_again() -> None:
    model, optimizer, pruner = attach_to_network(make_hard())
    model.load_state_dict(Net(seed=5).double().state_dict())
    compute_loss(model, 0).backward()
    with pytest.warns(UserWarning, match="was changed between two steps"):
        optimizer.step()
    assert obeys_masks(model, pruner)


@soft_and_hard
def test_loading_the_same_sparse_weights_is_not_an_edit(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind())
    before = copy_latents(pruner)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    pruner.refresh()
    assert is_identical(copy_latents(pruner), before)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    train(model, optimizer, [0])  # a warning would fail the test


@soft_and_hard
def test_refresh_projects_loaded_weights(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind())
    other = Net(seed=5).double()
    model.load_state_dict(other.state_dict())
    pruner.refresh()
    mask = pruner.masks()["conv2.weight"]
    assert obeys_masks(model, pruner)
    assert torch.equal(model.conv2.weight[mask], other.conv2.weight[mask])
    if kind is make_soft:
        assert torch.equal(copy_latents(pruner)["conv2.weight"], other.conv2.weight)
    train(model, optimizer, [0])  # a warning would fail the test


@soft_and_hard
def test_finish_keeps_weights_that_were_loaded_before_it(kind: Callable[..., pm.Pruner]) -> None:
    """A user who loads the best checkpoint and calls finish() keeps the best weights."""
    model, optimizer, pruner = attach_to_network(kind(), total=8)
    train(model, optimizer, range(8))
    best = {k: v.clone() if k not in TARGETS else v * 2 for k, v in model.state_dict().items()}
    model.load_state_dict(best)
    with ignore_warnings():
        pruner.finish()
    assert is_identical(model.state_dict(), best)


@soft_and_hard
def test_replaced_parameters_outside_the_optimizer_are_refused(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, _ = attach_to_network(kind())
    train(model, optimizer, range(2))
    model.load_state_dict(Net(seed=5).double().state_dict(), assign=True)
    optimizer.zero_grad()
    compute_loss(model, 0).backward()
    with pytest.raises(pm.PomonaError, match=r"conv1\.weight is in no attached optimizer"):
        optimizer.step()


@soft_and_hard
def test_replaced_parameters_in_the_optimizer_are_pruned(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind())
    train(model, optimizer, range(2))
    old = dict(model.named_parameters())
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    new = {id(old[name]): parameter for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        group["params"] = [new[id(p)] for p in group["params"]]
    train(model, optimizer, range(2, 7))
    assert pruner.step == 7
    assert obeys_masks(model, pruner)
    if kind is make_hard:
        compute_loss(model, 0).backward()
        assert not model.conv1.weight.grad[~pruner.masks()["conv1.weight"]].any(), (
            "the gradient is not masked before clipping"
        )


@soft_and_hard
def test_a_rebuilt_optimizer_is_refused(kind: Callable[..., pm.Pruner]) -> None:
    model, _, _ = attach_to_network(kind())
    rebuilt = make_sgd(model)
    compute_loss(model, 0).backward()
    with pytest.raises(pm.PomonaError, match="optimizer"):
        rebuilt.step()


@soft_and_hard
def test_a_rebuilt_optimizer_is_accepted_after_finish(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind(), total=4)
    train(model, optimizer, range(4))
    pruner.finish()
    train(model, make_sgd(model), range(2))


@soft_and_hard
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_that_changes_its_dtype_stays_pruned(kind: Callable[..., pm.Pruner], dtype: torch.dtype) -> None:
    model = Net().to(torch.float64 if dtype == torch.float32 else torch.float32)
    optimizer = SGD(model.parameters(), lr=0.1)
    pruner = kind(schedule="cubic").attach(model, optimizer, total_steps=16)
    train(model, optimizer, range(2))
    model.to(dtype)
    train(model, optimizer, range(2, 16))
    assert model.conv1.weight.dtype == dtype
    assert all(value.dtype == dtype for value in copy_latents(pruner).values())
    assert obeys_masks(model, pruner)
    pruner.finish()
    assert obeys_masks(model, pruner)


@soft_and_hard
@pytest.mark.parametrize("pattern", [pm.Unstructured(), pm.Filter()])
def test_weights_of_several_dtypes_are_ranked_together(kind: Callable[..., pm.Pruner], pattern: Any) -> None:
    model = Net()
    model.conv1.to(torch.bfloat16)
    model.hidden.double()
    weights = torch.cat([model.get_parameter(name).detach().double().abs().flatten() for name in TARGETS])
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruner = kind(pattern=pattern, sparsity=0.75).attach(model, optimizer, total_steps=16)
    if pattern == pm.Unstructured():
        kept = torch.cat([mask.flatten() for mask in pruner.masks().values()])
        assert weights[kept].min() >= weights[~kept].max()
    for _ in range(16):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        for name, mask in pruner.masks().items():
            assert not model.get_parameter(name)[~mask].any()
    assert pruner.sparsity() == pytest.approx(0.75, abs=0.03)
    assert 0 <= pruner.history[-1]["delta"] < 1
    pruner.finish()


@soft_and_hard
def test_changing_the_memory_format_keeps_the_masks(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind())
    before = copy_state(pruner)
    model.to("cpu", memory_format=torch.channels_last)
    assert is_identical(copy_state(pruner), before)
    train(model, optimizer, range(6))
    assert obeys_masks(model, pruner)
