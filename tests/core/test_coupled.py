"""Biases and norms that are removed together with filters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from engine_cases import ignore_warnings, make_hard, make_soft
from engine_helpers import Net, attach_to_network, compute_loss, train

import pomona as pm


def test_pruned_filters_of_a_soft_method_receive_gradients() -> None:
    model, _, pruner = attach_to_network(make_soft(pattern=pm.Filter(), sparsity=0.5))
    compute_loss(model, 0).backward()
    for name, mask in pruner.masks().items():
        removed = ~mask.flatten(1).any(1)
        assert removed.any()
        assert model.get_parameter(name).grad[removed].any(), f"the pruned filters of {name} get no gradient"


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    "make", [make_soft, make_hard, lambda **o: pm.SFP(**o, every=4), lambda **o: pm.DPF(**o, every=4, settle=0.0)]
)
def test_biases_and_norms_of_removed_filters_are_zero_after_finish(make: Callable[..., pm.Pruner], early: bool) -> None:
    model, optimizer, pruner = attach_to_network(
        make(pattern=pm.Filter(), sparsity=0.5, allocation="uniform"), total=16
    )
    train(model, optimizer, range(6 if early else 16))
    with ignore_warnings():
        pruner.finish()
    removed = ~pruner.masks()["conv1.weight"].flatten(1).any(1)
    assert removed.any()
    for vector in (model.conv1.bias, model.norm.weight, model.norm.bias):
        assert not vector[removed].any()
        assert vector[~removed].any()


def test_a_compressor_does_not_change_biases_and_norms() -> None:
    options = {"pattern": pm.Filter(), "sparsity": 0.5, "allocation": "uniform", "compressor": pm.Binary()}
    model, optimizer, pruner = attach_to_network(make_soft(**options), total=16)
    train(model, optimizer, range(16))
    pruner.finish()
    assert set(model.conv1.weight.unique().tolist()) == {-1, 0, 1}
    assert not set(model.norm.weight.tolist()) <= {-1, 0, 1}
    assert not set(model.conv1.bias.tolist()) <= {-1, 0, 1}


def test_apply_compresses_weights_but_not_biases_and_norms() -> None:
    model, optimizer, pruner = attach_to_network(make_soft(pattern=pm.Filter(), sparsity=0.5, compressor=pm.Binary()))
    train(model, optimizer, range(3))
    other = copy.deepcopy(model)
    other.load_state_dict(Net(seed=3).state_dict())
    before = copy.deepcopy(other.state_dict())
    pruner.apply(other)
    assert set(other.hidden.weight.unique().tolist()) <= {-1, 0, 1}
    for name in ("conv1.bias", "norm.weight", "hidden.bias"):  # nothing of them is removed yet
        assert torch.equal(other.state_dict()[name], before[name])
