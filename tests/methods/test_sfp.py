"""SFP: filters are zeroed once an epoch and train on all the same."""

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


def filters(*rows: list[float]) -> nn.Sequential:
    """A 1 × 1 convolution with these filters, and a head."""
    model = nn.Sequential(nn.Conv2d(2, len(rows), 1, bias=False), nn.Flatten(), nn.Linear(len(rows), 1)).double()
    model[0].weight.data.copy_(torch.tensor(rows)[:, :, None, None])
    return model


def rows(tensor: Tensor) -> list[list[float]]:
    return tensor.flatten(1).tolist()


def test_by_hand() -> None:
    # Norms 5, √2, 2, 6: the smaller two of four go, at attach already.
    model = filters([3.0, 4.0], [1.0, 1.0], [0.0, 2.0], [-6.0, 0.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    pruner = pm.SFP(sparsity=0.5).attach(model, optimizer, total_steps=4, steps_per_epoch=2)

    def step(*gradient: list[float]) -> None:
        optimizer.zero_grad()
        (model[0].weight * torch.tensor(gradient)[:, :, None, None]).sum().backward()
        optimizer.step()

    zero = [0.0, 0.0]
    assert rows(model[0].weight) == [[3.0, 4.0], zero, zero, [-6.0, 0.0]]
    # Epoch 1. The zeroed filters take their whole gradient, and the momentum of it:
    # filter 0 (3, 4) → (2, 4) → (1.5, 4); filter 1 (0, 0) → (0, −8) → (0, −12); filter 2 (0, 0) → (1, 0) → (1.5, 0).
    step([1.0, 0.0], [0.0, 8.0], [-1.0, 0.0], zero)
    assert rows(model[0].weight) == [[2.0, 4.0], [0.0, -8.0], [1.0, 0.0], [-6.0, 0.0]], "they grow between cuts"
    step(zero, zero, zero, zero)
    # The cut at the epoch's end: norms √18.25 = 4.3, 12, 1.5, 6. Filter 1 is back, filter 0 goes for it.
    assert rows(model[0].weight) == [zero, [0.0, -12.0], zero, [-6.0, 0.0]]
    assert rows(pruner.masks()["0.weight"].int()) == [[0, 0], [1, 1], [0, 0], [1, 1]]
    # Epoch 2. The momentum was kept: (0.5, 0), (0, 4), (−0.5, 0) before this step. A last cut comes at the end.
    step(zero, zero, [-20.0, 0.0], [-1.0, 0.0])
    assert rows(model[0].weight) == [[-0.25, 0.0], [0.0, -14.0], [20.25, 0.0], [-5.0, 0.0]]
    step(zero, [0.0, -13.0], zero, zero)  # filter 1: velocity 2/2 − 13 = −12, −14 + 12 = −2
    # Filter 0 −0.25 − 0.125; filter 2: 20.25 + 10.125 = 30.375; filter 3: −5 + 0.5 = −4.5.
    assert rows(model[0].weight) == [zero, zero, [30.375, 0.0], [-4.5, 0.0]]
    pruner.finish()
    assert rows(model[0].weight) == [zero, zero, [30.375, 0.0], [-4.5, 0.0]]


TARGETS = ("conv1.weight", "conv2.weight")  # convolutions, the first among them
TOTAL, EVERY = 150, 3


def cut(model: nn.Module, sparsity: float) -> dict[str, np.ndarray]:
    """He et al.: in every layer zero the filters of the smallest norm; the nearest whole number of them."""
    masks = {}
    for name in TARGETS:
        weight = model.get_parameter(name).detach().numpy()
        norms = np.sqrt((weight**2).reshape(len(weight), -1).sum(1))
        kept = keep_largest(norms, len(weight) - round(sparsity * len(weight)))
        weight[~kept] = 0
        masks[name] = np.broadcast_to(kept[:, None, None, None], weight.shape)
    return masks


@pytest.mark.parametrize("make", [lambda m: make_sgd(m, lr=0.2), lambda m: make_adam(m, lr=0.1)], ids=["sgd", "adam"])
def test_fifty_cuts_of_a_reference(make: Any) -> None:
    theirs, ours = Net().double(), Net().double()
    plain, optimizer = make(theirs), make(ours)
    pruner = pm.SFP(sparsity=0.3, every=EVERY).attach(ours, optimizer, total_steps=TOTAL)
    masks, returned = cut(theirs, 0.3), 0
    for t in range(TOTAL):
        train(theirs, plain, [t])
        if (t + 1) % EVERY == 0:
            old, masks = masks, cut(theirs, 0.3)
            returned += sum(int((masks[n] & ~old[n]).any((1, 2, 3)).sum()) for n in TARGETS)
        train(ours, optimizer, [t])
        assert pruner.masks().keys() == masks.keys()
        assert all(np.array_equal(pruner.masks()[n].numpy(), m) for n, m in masks.items())
        assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert len(pruner.history) == 51  # with the one at attach
    assert returned > 0, "no filter ever came back: the softness was not tried"


@pytest.mark.parametrize("steps", [7, 10])
def test_after_finish_a_removed_filter_is_silent(steps: int) -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.SFP(sparsity=0.5, every=5).attach(model, optimizer, total_steps=10)
    train(model, optimizer, range(steps))
    if steps == 7:
        assert model.conv1.weight.flatten(1).any(1).all(), "between cuts every filter is there"
    pruner.finish()
    gone = ~pruner.masks()["conv1.weight"].flatten(1).any(1)
    assert gone.sum() == 4
    for vector in (model.conv1.weight, model.conv1.bias, model.norm.weight, model.norm.bias):
        assert not vector[gone].any()
        assert vector[~gone].flatten(1 if vector.ndim > 1 else 0).any(-1).all()
    for training in (False, True):
        model.train(training)
        out = model.norm(model.conv1(torch.randn(8, 4, 5, 5, dtype=torch.float64) * 100))
        assert not out[:, gone].any()
        assert out[:, ~gone].any()
    silent = ~pruner.masks()["conv2.weight"].flatten(1).any(1)
    assert not model.conv2(torch.randn(2, 8, 5, 5, dtype=torch.float64))[:, silent].any()


def test_the_norm_behind_a_filter_is_there_until_the_end() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.SFP(sparsity=0.5, every=5).attach(model, optimizer, total_steps=10)
    train(model, optimizer, range(5))
    gone = ~pruner.masks()["conv1.weight"].flatten(1).any(1)
    assert not model.conv1.weight[gone].any()
    assert model.norm.weight[gone].all(), "behind a zero gain no filter would ever learn again"
    compute_loss(model, 5).backward()
    assert model.conv1.weight.grad[gone].flatten(1).any(1).all()


def test_only_convolutions_are_cut() -> None:
    model = Net()
    pruner = pm.SFP().attach(model, make_sgd(model), total_steps=10, steps_per_epoch=5)
    assert tuple(pruner.masks()) == TARGETS
    assert pruner.method.sparsity == 0.3


def test_a_copy_of_the_model_in_mid_epoch_is_dense() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.SFP(sparsity=0.5, every=5).attach(model, optimizer, total_steps=10)
    train(model, optimizer, range(7))
    twin = copy.deepcopy(model)
    pruner.apply(twin)
    assert twin.conv1.weight.flatten(1).any(1).sum() == 4
    assert model.conv1.weight.flatten(1).any(1).sum() == 8, "apply changed the model itself"


def test_without_epochs_it_is_refused_at_attach() -> None:
    model = Net()
    before = model.conv1.weight.clone()
    with pytest.raises(pm.PomonaError, match="steps_per_epoch=…\\), or every="):
        pm.SFP().attach(model, make_sgd(model), total_steps=10)
    assert torch.equal(model.conv1.weight, before)


@pytest.mark.parametrize("every", [0, -1])
def test_bad_options(every: int) -> None:
    with pytest.raises(pm.PomonaError, match=f"got {every}"):
        pm.SFP(every=every)
