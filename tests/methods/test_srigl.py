"""SRigL: RigL with a constant fan-in and ablated neurons, by hand and against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from engine_helpers import Net, attach_to_network, compute_loss, make_sgd, train
from reference_methods import LinearStack, get_mask_rows, get_weight_rows, keep_largest, step_with_gradients

import pomona as pm

TOTAL, EVERY = 40, 4


def test_srigl_by_hand() -> None:
    # Two of four weights a row are kept. The third row has one salient weight of two, 50 % of its fan-in.
    model = LinearStack(a=[[9.0, 8.0, 7.0, 6.0], [9.0, 8.0, 7.0, 6.0], [0.1, 0.2, 0.3, 0.4]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    pruner = pm.SRigL(sparsity=0.5, share=0.9, every=1, until=1.0, ablation=0.6, include=["a"])
    pruner.attach(model, optimizer, total_steps=4)
    assert [sum(row) for row in get_mask_rows(pruner)] == [2, 2, 2]
    zero = [[0.0] * 4] * 3
    step_with_gradients(model, optimizer, a=zero)  # step 0 is a step
    with torch.no_grad():
        kept = pruner.masks()["a.weight"]
        kept.copy_(torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]).bool())
        model.a.weight.copy_(torch.tensor([[9.0, 8.0, 0, 0], [9.0, 8.0, 0, 0], [0.1, 0.2, 0, 0]]))
    pruner.refresh()
    # In place of step 1: α = 0.9/2 · (1 + cos π/4) = 0.768, and ⌊0.768 · 6⌋ = 4 of the smallest are dropped: 0.1, 0.2
    # and both 8s; two 9s are left. Of |g| the four largest are salient: both of the first row's free 5s and 4s, and
    # one each of the others. So the rows have 3, 2 and 1 salient weights, the third less than 0.6 · 2: it is ablated.
    step_with_gradients(model, optimizer, a=[[0.0, 5.0, 4.0, 1.0], [0.0, 3.0, 1.0, 0.5], [2.0, 1.0, 0.1, 0.1]])
    # Six weights in two rows: a fan-in of three.
    assert get_mask_rows(pruner) == [[1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
    assert get_weight_rows(model) == [[9.0, 8.0, 0.0, 0.0], [9.0, 8.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]


def rewire_reference(weight: np.ndarray, mask: np.ndarray, gradient: np.ndarray, share: float) -> np.ndarray:
    """Return the new mask of a layer, row by row with NumPy."""
    total = int(mask.sum())
    drop = int(share * total + 1e-9)
    kept = keep_largest(np.where(mask, np.abs(weight), -np.inf), total - drop)
    active = mask.any(1)
    free = np.where(kept | ~active[:, None], -np.inf, np.abs(gradient))
    salient = kept | keep_largest(free, drop)
    stays = active & (salient.sum(1) >= 0.3 * total / active.sum())
    fan_in = min(round(total / stays.sum()), weight.shape[1])
    new = np.zeros_like(mask)
    for row in np.flatnonzero(stays):
        # Kept weights rank first, by magnitude; then the free ones, by gradient.
        ranks = np.where(kept[row], np.abs(weight[row]) + np.abs(gradient).max() + 1, free[row])
        ranked = np.argsort(-ranks, kind="stable")
        new[row, ranked[:fan_in]] = True
    return new


def test_srigl_updates_match_numpy() -> None:
    model, optimizer, pruner = attach_to_network(pm.SRigL(sparsity=0.7, every=EVERY), total=TOTAL)
    compared = 0
    for at in range(30):
        before = {name: mask.clone() for name, mask in pruner.masks().items()}
        weights = {name: model.get_parameter(name).detach().clone() for name in before}
        optimizer.zero_grad()
        compute_loss(model, at).backward()
        gradients = {name: model.get_parameter(name).grad.clone() for name in before}
        optimizer.step()
        if at and at % EVERY == 0:
            share = 0.3 / 2 * (1 + math.cos(math.pi * at / (0.75 * TOTAL)))
            for name, mask in pruner.masks().items():
                flat = [t.flatten(1).numpy() for t in (weights[name], before[name], gradients[name])]
                assert (mask.flatten(1).numpy() == rewire_reference(*flat, share)).all(), (name, at)
                compared += 1
    assert compared == 7 * 3


def test_every_active_neuron_has_the_same_fan_in() -> None:
    model, optimizer, pruner = attach_to_network(pm.SRigL(sparsity=0.9, every=2), total=TOTAL)
    for at in range(TOTAL):
        train(model, optimizer, [at])
        for mask in pruner.masks().values():
            counts = mask.flatten(1).sum(1)
            active = counts > 0
            assert len(counts[active].unique()) == 1
            fan_in = math.floor(0.1 * mask[0].numel() + 0.5)  # of every neuron at the start
            assert abs(int(mask.sum()) - fan_in * len(mask)) <= int(active.sum()) / 2


def test_an_ablation_outside_0_to_1_is_refused() -> None:
    model = Net()
    with pytest.raises(pm.PomonaError, match=r"ablation is a share of the fan-in in \[0, 1\], got 1.5"):
        pm.SRigL(ablation=1.5).attach(model, make_sgd(model), total_steps=4)
