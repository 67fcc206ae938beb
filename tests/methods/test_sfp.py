"""SFP: filters are set to zero once an epoch and are trained in between."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import Net, compute_loss, make_adam, make_sgd, train
from reference_methods import keep_largest
from torch import Tensor, nn

import pomona as pm


def make_filter_network(*rows: list[float]) -> nn.Sequential:
    """Return a network of a 1 × 1 convolution with the given filters and a last layer."""
    model = nn.Sequential(nn.Conv2d(2, len(rows), 1, bias=False), nn.Flatten(), nn.Linear(len(rows), 1)).double()
    model[0].weight.data.copy_(torch.tensor(rows)[:, :, None, None])
    return model


def as_rows(tensor: Tensor) -> list[list[float]]:
    """Return the filters of a weight as rows."""
    return tensor.flatten(1).tolist()


def test_sfp_by_hand() -> None:
    # Norms 5, √2, 2, 6: the smaller two of four are pruned at attach.
    model = make_filter_network([3.0, 4.0], [1.0, 1.0], [0.0, 2.0], [-6.0, 0.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    pruner = pm.SFP(sparsity=0.5).attach(model, optimizer, total_steps=4, steps_per_epoch=2)

    def step(*gradient: list[float]) -> None:
        optimizer.zero_grad()
        (model[0].weight * torch.tensor(gradient)[:, :, None, None]).sum().backward()
        optimizer.step()

    zero = [0.0, 0.0]
    assert as_rows(model[0].weight) == [[3.0, 4.0], zero, zero, [-6.0, 0.0]]
    # Epoch 1. The pruned filters are trained with their full gradient and momentum:
    # filter 0 (3, 4) → (2, 4) → (1.5, 4); filter 1 (0, 0) → (0, −8) → (0, −12); filter 2 (0, 0) → (1, 0) → (1.5, 0).
    step([1.0, 0.0], [0.0, 8.0], [-1.0, 0.0], zero)
    assert as_rows(model[0].weight) == [[2.0, 4.0], [0.0, -8.0], [1.0, 0.0], [-6.0, 0.0]], (
        "pruned filters are not trained between updates"
    )
    step(zero, zero, zero, zero)
    # The update at the epoch's end: norms √18.25 = 4.3, 12, 1.5, 6. Filter 1 is kept again, filter 0 is pruned.
    assert as_rows(model[0].weight) == [zero, [0.0, -12.0], zero, [-6.0, 0.0]]
    assert as_rows(pruner.masks()["0.weight"].int()) == [[0, 0], [1, 1], [0, 0], [1, 1]]
    # Epoch 2. The momentum was kept: (0.5, 0), (0, 4), (−0.5, 0) before this step. The last update comes at the end.
    step(zero, zero, [-20.0, 0.0], [-1.0, 0.0])
    assert as_rows(model[0].weight) == [[-0.25, 0.0], [0.0, -14.0], [20.25, 0.0], [-5.0, 0.0]]
    step(zero, [0.0, -13.0], zero, zero)  # filter 1: velocity 2/2 − 13 = −12, −14 + 12 = −2
    # Filter 0 −0.25 − 0.125; filter 2: 20.25 + 10.125 = 30.375; filter 3: −5 + 0.5 = −4.5.
    assert as_rows(model[0].weight) == [zero, zero, [30.375, 0.0], [-4.5, 0.0]]
    pruner.finish()
    assert as_rows(model[0].weight) == [zero, zero, [30.375, 0.0], [-4.5, 0.0]]


TARGETS = ("conv1.weight", "conv2.weight")  # convolutions, the first among them
TOTAL, EVERY = 150, 3


def zero_filters_by_norm(model: nn.Module, sparsity: float) -> dict[str, np.ndarray]:
    """Set the filters of smallest norm of every layer to zero, as He et al. (2018), and return the masks."""
    masks = {}
    for name in TARGETS:
        weight = model.get_parameter(name).detach().numpy()
        norms = np.sqrt((weight**2).reshape(len(weight), -1).sum(1))
        kept = keep_largest(norms, len(weight) - round(sparsity * len(weight)))
        weight[~kept] = 0
        masks[name] = np.broadcast_to(kept[:, None, None, None], weight.shape)
    return masks


@pytest.mark.parametrize("make", [lambda m: make_sgd(m, lr=0.2), lambda m: make_adam(m, lr=0.1)], ids=["sgd", "adam"])
def test_fifty_updates_match_the_sfp_reference(make: Any) -> None:
    reference, model = Net().double(), Net().double()
    reference_optimizer, optimizer = make(reference), make(model)
    pruner = pm.SFP(sparsity=0.3, every=EVERY).attach(model, optimizer, total_steps=TOTAL)
    masks, returned = zero_filters_by_norm(reference, 0.3), 0
    for t in range(TOTAL):
        train(reference, reference_optimizer, [t])
        if (t + 1) % EVERY == 0:
            old, masks = masks, zero_filters_by_norm(reference, 0.3)
            returned += sum(int((masks[n] & ~old[n]).any((1, 2, 3)).sum()) for n in TARGETS)
        train(model, optimizer, [t])
        assert pruner.masks().keys() == masks.keys()
        assert all(np.array_equal(pruner.masks()[n].numpy(), m) for n, m in masks.items())
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    assert len(pruner.history) == 51  # with the one at attach
    assert returned > 0, "no pruned filter was kept again: the case is not tested"


@pytest.mark.parametrize("steps", [7, 10])
def test_after_finish_removed_filters_give_zeros(steps: int) -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.SFP(sparsity=0.5, every=5).attach(model, optimizer, total_steps=10)
    train(model, optimizer, range(steps))
    if steps == 7:
        assert model.conv1.weight.flatten(1).any(1).all(), "a filter is zero between updates"
    pruner.finish()
    removed = ~pruner.masks()["conv1.weight"].flatten(1).any(1)
    assert removed.sum() == 4
    for vector in (model.conv1.weight, model.conv1.bias, model.norm.weight, model.norm.bias):
        assert not vector[removed].any()
        assert vector[~removed].flatten(1 if vector.ndim > 1 else 0).any(-1).all()
    for training in (False, True):
        model.train(training)
        out = model.norm(model.conv1(torch.randn(8, 4, 5, 5, dtype=torch.float64) * 100))
        assert not out[:, removed].any()
        assert out[:, ~removed].any()
    removed_outputs = ~pruner.masks()["conv2.weight"].flatten(1).any(1)
    assert not model.conv2(torch.randn(2, 8, 5, 5, dtype=torch.float64))[:, removed_outputs].any()


def test_the_norm_behind_a_filter_is_kept_until_the_end() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.SFP(sparsity=0.5, every=5).attach(model, optimizer, total_steps=10)
    train(model, optimizer, range(5))
    removed = ~pruner.masks()["conv1.weight"].flatten(1).any(1)
    assert not model.conv1.weight[removed].any()
    assert model.norm.weight[removed].all(), "a filter behind a zero gain would get no gradient"
    compute_loss(model, 5).backward()
    assert model.conv1.weight.grad[removed].flatten(1).any(1).all()


def test_only_convolutions_are_pruned() -> None:
    model = Net()
    pruner = pm.SFP().attach(model, make_sgd(model), total_steps=10, steps_per_epoch=5)
    assert tuple(pruner.masks()) == TARGETS
    assert pruner.method.sparsity == 0.3


def test_apply_prunes_a_copy_between_updates() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.SFP(sparsity=0.5, every=5).attach(model, optimizer, total_steps=10)
    train(model, optimizer, range(7))
    copied = copy.deepcopy(model)
    pruner.apply(copied)
    assert copied.conv1.weight.flatten(1).any(1).sum() == 4
    assert model.conv1.weight.flatten(1).any(1).sum() == 8, "apply changed the model itself"


def test_sfp_without_epochs_is_refused_at_attach() -> None:
    model = Net()
    before = model.conv1.weight.clone()
    with pytest.raises(pm.PomonaError, match="steps_per_epoch=…\\), or every="):
        pm.SFP().attach(model, make_sgd(model), total_steps=10)
    assert torch.equal(model.conv1.weight, before)


@pytest.mark.parametrize("every", [0, -1])
def test_invalid_options_of_sfp_are_refused(every: int) -> None:
    with pytest.raises(pm.PomonaError, match=f"got {every}"):
        pm.SFP(every=every)
