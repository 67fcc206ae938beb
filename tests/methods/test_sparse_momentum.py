"""Sparse momentum: every layer drops its smallest weights, and layers with more momentum grow more weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import Net, attach_to_network, compute_loss, make_adam, make_sgd, train
from reference_methods import (
    LinearStack,
    ReferenceTraining,
    draw_random_masks,
    get_mask_rows,
    get_weight_rows,
    keep_largest,
    make_zero_lr_sgd,
    step_with_gradients,
    train_beside_reference,
)

import pomona as pm

TARGETS = ("conv1.weight", "conv2.weight", "hidden.weight", "head.weight")


def test_sparse_momentum_by_hand() -> None:
    # Start, the draws of seed 0, half of each layer:
    #   a  .50 .77 .09 .13   1 1 0 0        b  .46 .63 .35 .40   1 1 0 1
    #      .31 .63 .49 .90   0 1 0 1           .02 .17 .29 .52   0 0 0 1
    model = LinearStack(
        a=[[3.0, 1.0, 9.0, 9.0], [9.0, -2.0, 9.0, 4.0]], b=[[5.0, -6.0, 9.0, 1.0], [9.0, 9.0, 9.0, 2.0]]
    )
    optimizer = make_zero_lr_sgd(model)
    pruner = pm.SparseMomentum(sparsity=0.5, rate=0.6, floor=0.0, every=1, include=["a", "b"], feedback=None)
    pruner.attach(model, optimizer, total_steps=3)
    assert get_mask_rows(pruner, "a") == [[1, 1, 0, 0], [0, 1, 0, 1]]
    assert get_mask_rows(pruner, "b") == [[1, 1, 0, 1], [0, 0, 0, 1]]

    # Update 1. The momentum is the first gradient, and dense: pruned weights have momentum too.
    # p = 0.6 · (1 + cos π/3)/2 = 0.45, so ⌈0.45·4⌉ = 2 are dropped: of a 1 and −2, of b 1 and 2.
    # Mean |momentum| of the active: a (1 + 1 + 4 + 2)/4 = 2, b (6 + 6 + 8 + 4)/4 = 6; of the four a gets 1, b gets 3.
    # The largest |momentum| among the zeros of a: 5 at (0,3); of b: 9 at (1,0), 8 at (0,3), which returns with
    # its value, and 7 at (0,2).
    step_with_gradients(
        model,
        optimizer,
        a=[[1.0, -1.0, 3.0, 5.0], [0.5, 4.0, 2.0, -2.0]],
        b=[[6.0, 6.0, -7.0, 8.0], [9.0, 1.0, 2.0, 4.0]],
    )
    assert get_mask_rows(pruner, "a") == [[1, 0, 0, 1], [0, 0, 0, 1]]
    assert get_mask_rows(pruner, "b") == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert get_weight_rows(model, "a") == [[3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 4.0]]
    assert get_weight_rows(model, "b") == [[5.0, -6.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]

    # Update 2. The new gradient is on two pruned weights only, so |momentum| is 0.9 of what it was, but
    # 0.9·3 + 10 = 12.7 at a(0,2) and 0.9·2 + 20 = 21.8 at b(1,2). p = 0.6 · (1 + cos 2π/3)/2 = 0.15:
    # ⌈0.15·3⌉ = 1 of a is dropped, the zero at (0,3); ⌈0.15·5⌉ = 1 of b, of the zeros at (0,2) and (1,0) the later.
    # Means a 0.9·(1 + 5 + 2)/3 = 2.4, b 0.9·(6 + 6 + 7 + 8 + 9)/5 = 6.48: a 2·2.4/8.88 = 0.54, b 1.46.
    # Whole parts 0 and 1, and the one left goes to the larger remainder, a. They grow at 12.7 and at 21.8.
    step_with_gradients(
        model,
        optimizer,
        a=[[0.0, 0.0, 10.0, 0.0], [0.0, 0.0, 0.0, 0.0]],
        b=[[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 20.0, 0.0]],
    )
    assert get_mask_rows(pruner, "a") == [[1, 0, 1, 0], [0, 0, 0, 1]]
    assert get_mask_rows(pruner, "b") == [[1, 1, 1, 1], [0, 0, 1, 0]]
    assert get_weight_rows(model, "a") == [[3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 4.0]]
    assert get_weight_rows(model, "b") == [[5.0, -6.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]


def test_sparse_momentum_by_hand_with_a_nearly_dense_layer() -> None:
    # One of eight is pruned: a(0,2) at .09, b(1,0) at .02. Mean |momentum| a 3, b 1, so a's share is 3/4, above 1/2,
    # and it drops no more than its sparsity: ⌈0.125·7⌉ = 1, the 1. b drops ⌈0.45·7⌉ = 4: 1, 2, 3, 4.
    # Of the five a should grow 3.75 and b 1.25, but a has room for ⌊0.99·(1 + 1)⌋ = 1 and b for ⌊0.99·(1 + 4)⌋ = 4.
    # a: |momentum| of its zeros is 9 at (0,2) and 3 at (0,0). b leaves out 0.5 at (0,1), the least of its five zeros.
    model = LinearStack(a=[[1.0, 2.0, 9.0, 3.0], [4.0, 5.0, 6.0, 7.0]], b=[[1.0, 2.0, 3.0, 4.0], [9.0, 5.0, 6.0, 7.0]])
    optimizer = make_zero_lr_sgd(model)
    pruner = pm.SparseMomentum(sparsity=0.125, rate=0.6, floor=0.0, every=1, include=["a", "b"])
    pruner.attach(model, optimizer, total_steps=3)
    step_with_gradients(
        model,
        optimizer,
        a=[[3.0, 3.0, 9.0, 3.0], [3.0, 3.0, 3.0, 3.0]],
        b=[[1.0, 0.5, 1.5, 1.0], [2.0, 1.0, 1.0, 1.0]],
    )
    assert get_mask_rows(pruner, "a") == [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert get_mask_rows(pruner, "b") == [[1, 0, 1, 1], [1, 1, 1, 1]]
    assert get_weight_rows(model, "b") == [[1.0, 0.0, 3.0, 4.0], [0.0, 5.0, 6.0, 7.0]]


RATE, FLOOR, TOTAL, EVERY = 0.5, 0.005, 153, 3


def divide_growth_evenly(total: int, shares: dict[str, float], room: dict[str, int]) -> dict[str, int]:
    """Divide growth by the authors' loop: the excess of full layers is shared evenly until it fits, then rounded."""
    growth, surplus = {name: share * total for name, share in shares.items()}, math.inf
    while surplus > 1e-9:
        surplus = sum(max(growth[name] - room[name], 0) for name in growth)
        growth = {name: min(value, room[name]) + surplus / len(growth) for name, value in growth.items()}
    counts = {name: math.floor(value + 1e-6) for name, value in growth.items()}
    for name in sorted(counts, key=lambda n: counts[n] - growth[n])[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def redistribute_by_momentum(reference: ReferenceTraining, t: int) -> None:
    """Update the masks as Dettmers & Zettlemoyer (2019), with counts rounded by largest remainder."""
    masks = reference.masks
    rate = FLOOR + (RATE - FLOOR) * (1 + math.cos(math.pi * t / TOTAL)) / 2
    momentum = {name: np.abs(reference.optimizer_state(name)[0]) for name in TARGETS}
    if len(reference.optimizer_state(TARGETS[0])) == 2:  # Adam
        momentum = {name: momentum[name] / (np.sqrt(reference.optimizer_state(name)[1]) + 1e-8) for name in TARGETS}
    means = {name: momentum[name][masks[name]].mean() for name in TARGETS}
    shares = {name: mean / sum(means.values()) for name, mean in means.items()}
    kept, removed = {}, 0
    for name in TARGETS:
        active = int(masks[name].sum())
        sparsity = 1 - active / masks[name].size
        own = min(rate, sparsity) if sparsity < 0.2 and shares[name] > 1 / len(TARGETS) else rate
        drop = math.ceil(own * active)
        kept[name] = keep_largest(np.where(masks[name], np.abs(reference.weight(name)), -np.inf), active - drop)
        removed += drop
    growth = divide_growth_evenly(removed, shares, {name: int(0.99 * (~kept[name]).sum()) for name in TARGETS})
    reference.masks = {n: k | keep_largest(np.where(k, -1, momentum[n]), growth[n]) for n, k in kept.items()}


@pytest.mark.parametrize("make", [make_sgd, make_adam])
def test_fifty_updates_match_the_sparse_momentum_reference(make: Any) -> None:
    reference = ReferenceTraining(make, dense_momentum=True)
    reference.masks = draw_random_masks(reference.model, TARGETS, seed=0, sparsity=0.8)
    steps = reference.run(TOTAL, redistribute_by_momentum, due=lambda t: t % EVERY == 0 and t < TOTAL)

    model = Net().double()
    pruner = pm.SparseMomentum(sparsity=0.8, every=EVERY, feedback=None)
    pruner.attach(model, make(model), total_steps=TOTAL)
    assert train_beside_reference(pruner, reference, steps) == 50
    assert sum(entry["flips"] for entry in pruner.history[1:]) > 1000, "the masks hardly changed"


@pytest.mark.parametrize("make", [make_sgd, make_adam])
def test_sparse_momentum_keeps_the_total_and_moves_weights_between_layers(make: Any) -> None:
    model = Net().double()
    optimizer = make(model)
    pruner = pm.SparseMomentum(sparsity=0.8, every=2).attach(model, optimizer, total_steps=60)
    total = sum(int(mask.sum()) for mask in pruner.masks().values())
    layers = []
    for t in range(60):
        train(model, optimizer, [t])
        layers.append(tuple(int(mask.sum()) for mask in pruner.masks().values()))
        assert sum(layers[-1]) == total
        assert not any(model.get_parameter(name)[~mask].any() for name, mask in pruner.masks().items())
    assert len(set(layers)) > 5


def test_pruned_weights_accumulate_momentum() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.SparseMomentum(sparsity=0.8, every=50).attach(model, optimizer, total_steps=100)
    train(model, optimizer, range(3))
    for name, mask in pruner.masks().items():
        parameter = model.get_parameter(name)
        assert not parameter[~mask].any(), "a pruned weight is not zero"
        # Only weights behind an inactive unit have no gradient and no momentum.
        assert (optimizer.state[parameter]["momentum_buffer"][~mask] != 0).double().mean() > 0.3


def test_the_classifier_is_pruned() -> None:
    model = Net()
    pruner = pm.SparseMomentum(sparsity=0.8).attach(model, make_sgd(model), total_steps=10, steps_per_epoch=5)
    assert tuple(pruner.masks()) == TARGETS
    assert all(int(m.sum()) == m.numel() - round(0.8 * m.numel()) for m in pruner.masks().values())


def test_updates_come_once_an_epoch_but_not_at_the_end() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.SparseMomentum(sparsity=0.8).attach(model, optimizer, total_steps=20, steps_per_epoch=5)
    train(model, optimizer, range(20))
    assert [entry["step"] for entry in pruner.history] == [0, 5, 10, 15]


def test_an_optimizer_without_momentum_is_refused_at_attach() -> None:
    model = Net()
    before = model.conv1.weight.clone()
    with pytest.raises(pm.PomonaError, match="reads the optimizer's momentum, which is 0 here"):
        pm.SparseMomentum(every=2).attach(model, make_sgd(model, momentum=0.0, nesterov=False), total_steps=10)
    assert torch.equal(model.conv1.weight, before), "attach changed a weight before it raised"


def test_an_optimizer_of_unknown_momentum_is_refused_at_the_first_update() -> None:
    model = Net()
    optimizer = torch.optim.Adagrad(model.parameters())
    pm.SparseMomentum(every=2).attach(model, optimizer, total_steps=10)
    with pytest.raises(pm.PomonaError, match="conv1.weight has no momentum: use SGD"):
        train(model, optimizer, range(2))


def test_sparse_momentum_refuses_a_frozen_layer_that_is_included() -> None:
    model = Net().double()
    model.hidden.weight.requires_grad_(False)
    with pytest.raises(pm.PomonaError, match="hidden.weight is frozen and sparse_momentum needs its gradient"):
        pm.SparseMomentum(every=2, include="hidden").attach(model, make_sgd(model), total_steps=10)


def test_sparse_momentum_without_epochs_is_refused_at_attach() -> None:
    model = Net()
    with pytest.raises(pm.PomonaError, match="steps_per_epoch=…\\), or every="):
        pm.SparseMomentum().attach(model, make_sgd(model), total_steps=10)


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_padded_rows_do_not_overflow(sparsity: float) -> None:
    balanced = pm.Balanced(block=8, pad=True)
    model, optimizer, pruner = attach_to_network(
        pm.SparseMomentum(sparsity=sparsity, every=2, pattern=balanced), total=12
    )
    train(model, optimizer, range(12))
    assert (pruner.sparsity() == 0) == (sparsity == 0)


def test_sparse_momentum_refuses_patterns_that_fix_the_sparsity() -> None:
    with pytest.raises(pm.PomonaError, match="fixes every layer's sparsity, and sparse_momentum moves weights"):
        pm.SparseMomentum(pattern=pm.NM(2, 4))


@pytest.mark.parametrize(
    "options", [{"rate": 1.0}, {"rate": -0.1}, {"rate": 0.1, "floor": 0.2}, {"every": 0}, {"every": -3}]
)
def test_invalid_options_of_sparse_momentum_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(pm.PomonaError, match="got"):
        pm.SparseMomentum(**options)


def test_the_loss_is_computed_on_sparse_weights() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.SparseMomentum(sparsity=0.8, every=2).attach(model, optimizer, total_steps=10)
    train(model, optimizer, range(7))
    loss = compute_loss(model.eval(), 0)
    pruner.apply(model)
    assert torch.equal(loss, compute_loss(model, 0))
