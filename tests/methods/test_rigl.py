"""RigL: weights are dropped by magnitude and grown by the dense gradient, in place of a step."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import Net, compute_loss, make_adam, make_batch, make_sgd, train
from reference_methods import (
    LinearStack,
    ReferenceTraining,
    draw_random_masks,
    get_mask_rows,
    get_weight_rows,
    keep_largest,
    step_with_gradients,
    train_beside_reference,
)
from torch import Tensor, nn
from torch.nn import functional as F

import pomona as pm

TARGETS = ("conv2.weight", "hidden.weight", "head.weight")  # the first layer is dense, the last is not


def test_rigl_by_hand() -> None:
    # Start, the draws of seed 0:  .50 .77 .09 .13    two of eight are pruned:  1 1 0 0
    #                              .31 .63 .49 .90                              1 1 1 1
    model = LinearStack(a=[[3.0, 1.0, 9.0, 9.0], [-2.0, -1.0, 2.5, -4.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    pruner = pm.RigL(sparsity=0.25, share=0.9, every=1, until=1.0, include=["a"])
    pruner.attach(model, optimizer, total_steps=3)
    assert get_mask_rows(pruner) == [[1, 1, 0, 0], [1, 1, 1, 1]]
    weights = [[3.0, 1.0, 0.0, 0.0], [-2.0, -1.0, 2.5, -4.0]]

    # Step 0 is a step, under the mask.
    step_with_gradients(model, optimizer, a=[[0.0, 0.0, 7.0, 7.0], [0.0, 0.0, 0.0, 0.0]])
    assert get_weight_rows(model) == weights

    # In place of step 1: α = 0.9/2 · (1 + cos π/3) = 0.675 and the ⌊0.675·6⌋ = 4 smallest are dropped: 1, −1, −2, 2.5.
    # 3 and −4 are left. |g| where free:  ·  4  1  5    the four largest grow: 5, 4, 3, 2. So −1, 1 and −2
    #                                     2  3  0  ·    return with their values; (0,3) is new and zero.
    step_with_gradients(model, optimizer, a=[[9.0, 4.0, -1.0, -5.0], [2.0, -3.0, 0.0, 9.0]])
    assert get_mask_rows(pruner) == [[1, 1, 0, 1], [1, 1, 0, 1]]
    assert get_weight_rows(model) == [[3.0, 1.0, 0.0, 0.0], [-2.0, -1.0, 0.0, -4.0]]

    # In place of step 2: α = 0.9/2 · (1 + cos 2π/3) = 0.225 and ⌊0.225·6⌋ = 1 is dropped: the zero at (0,3).
    # |g| where free: 1 at (0,2), 2 at (0,3), 6 at (1,2), which grows.
    step_with_gradients(model, optimizer, a=[[9.0, 9.0, 1.0, 2.0], [9.0, 9.0, 6.0, 9.0]])
    assert get_mask_rows(pruner) == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert get_weight_rows(model) == [[3.0, 1.0, 0.0, 0.0], [-2.0, -1.0, 0.0, -4.0]]


SHARE, TOTAL, END, EVERY = 0.3, 136, 102, 2  # T_end is at 0.75 of training


def rewire_by_gradient(reference: ReferenceTraining, t: int) -> None:
    """Drop the ⌊α_t · active⌋ smallest weights and grow as many by the dense gradient (Evci et al., 2020)."""
    share = SHARE / 2 * (1 + math.cos(math.pi * t / END))
    for name in TARGETS:
        mask = reference.masks[name]
        active = int(mask.sum())
        drop = int(share * active)
        kept = keep_largest(np.where(mask, np.abs(reference.weight(name)), -np.inf), active - drop)
        grown = keep_largest(np.where(kept, -1, np.abs(reference.gradient(name))), drop)
        new = grown & ~mask
        for value in (reference.weight(name), *reference.optimizer_state(name)):
            value[new] = 0
        reference.masks[name] = kept | grown


@pytest.mark.parametrize("make", [make_sgd, make_adam])
def test_fifty_updates_match_the_rigl_reference(make: Any) -> None:
    reference = ReferenceTraining(make)
    reference.masks = draw_random_masks(reference.model, TARGETS, seed=0, sparsity=0.7)
    steps = reference.run(TOTAL, rewire_by_gradient, due=lambda t: 0 < t < END and t % EVERY == 0, replaces=True)

    model = Net().double()
    pruner = pm.RigL(sparsity=0.7, every=EVERY).attach(model, make(model), total_steps=TOTAL)
    assert train_beside_reference(pruner, reference, steps) == 50
    assert sum(entry["flips"] for entry in pruner.history[1:]) > 1000


def copy_training_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return copies of all tensors that a step can change."""
    return copy.deepcopy({"optimizer": [optimizer.state[p] for p in model.parameters()], **model.state_dict()})


@pytest.mark.parametrize("make", [make_sgd, make_adam])
def test_the_update_replaces_the_step(make: Any) -> None:
    model = Net().double()
    optimizer = make(model)
    pruner = pm.RigL(sparsity=0.6, share=0.5, every=5, until=1.0).attach(model, optimizer, total_steps=50)
    train(model, optimizer, range(5))
    old = {name: mask.clone() for name, mask in pruner.masks().items()}

    dense = copy.deepcopy(model)  # a plain model, without hooks
    compute_loss(dense, 5).backward()
    optimizer.zero_grad()
    compute_loss(model, 5).backward()
    before = copy_training_state(model, optimizer)
    optimizer.step()
    assert pruner.history[-1]["step"] == 5
    assert pruner.history[-1]["flips"] > 0
    after = copy_training_state(model, optimizer)

    regrown = 0
    for index, (name, parameter) in enumerate(model.named_parameters()):
        assert torch.equal(parameter.grad, dense.get_parameter(name).grad), "the gradient is not dense, or not restored"
        mask = pruner.masks().get(name, torch.ones_like(parameter, dtype=torch.bool))
        was = old.get(name, mask)
        assert torch.equal(after[name], torch.where(mask, before[name], 0)), f"{name} was trained"
        assert not after[name][mask & ~was].any(), "a new weight is not zero"
        if name in old:  # at least the smallest quarter was dropped
            smallest = before[name].abs()[was].sort().values[: int(was.sum()) // 4]
            regrown += int(torch.isin(after[name][mask & was].abs(), smallest).sum())
        for key, value in after["optimizer"][index].items():
            earlier = before["optimizer"][index][key]
            if value.shape != parameter.shape:
                assert torch.equal(value, earlier), f"{key} of {name} counted a step"
                continue
            assert torch.equal(value, torch.where(mask, earlier, 0)), f"{key} of {name} changed"
            assert not value[mask & ~was].any(), f"{key} of a new weight is not zero"
    assert regrown > 0, "no weight was dropped and grown again: the case is not tested"
    assert torch.equal(after["norm.running_mean"], before["norm.running_mean"])

    before = copy_training_state(model, optimizer)
    train(model, optimizer, [6])
    assert not torch.equal(before["conv1.weight"], model.conv1.weight), "the step after the update did not train"


def test_the_gradient_is_masked_between_updates() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.RigL(sparsity=0.6, every=4, until=1.0).attach(model, optimizer, total_steps=50)
    for t in range(12):
        optimizer.zero_grad()
        compute_loss(model, t).backward()
        is_dense = any(bool(model.get_parameter(n).grad[~m].any()) for n, m in pruner.masks().items())
        assert is_dense == (t in (4, 8))
        optimizer.step()


def mask_after_update(style: str) -> dict[str, Tensor]:
    """Return the mask after an update in a training loop of the given style; the steps before it are plain."""
    model = Net().double().eval()
    optimizer = make_sgd(model)
    pruner = pm.RigL(sparsity=0.6, share=0.5, every=4, until=1.0).attach(model, optimizer, total_steps=50)
    train(model, optimizer, range(4))
    optimizer.zero_grad()
    images, labels = make_batch(4)
    if style == "accumulated":
        for half in (slice(0, 3), slice(3, 6)):
            (F.cross_entropy(model(images[half]), labels[half]) / 2).backward()
        optimizer.step()
    elif style == "closure":

        def closure() -> Tensor:
            loss = compute_loss(model, 4)
            loss.backward()
            return loss

        optimizer.step(closure)
    else:
        scaler = torch.amp.GradScaler("cpu", enabled=style == "scaled", init_scale=2.0**10)
        scaler.scale(compute_loss(model, 4)).backward()
        if style == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
    assert [entry["step"] for entry in pruner.history] == [0, 4]
    return {name: mask.clone() for name, mask in pruner.masks().items()}


@pytest.mark.parametrize("style", ["accumulated", "closure", "scaled", "clipped"])
def test_every_training_loop_gives_the_rigl_mask(style: str) -> None:
    plain = mask_after_update("plain")
    assert all(torch.equal(mask, plain[name]) for name, mask in mask_after_update(style).items())


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_skipped_by_the_scaler_postpones_the_update(fused: bool) -> None:
    model = Net()
    optimizer = make_sgd(model, fused=fused)
    pruner = pm.RigL(sparsity=0.6, share=0.5, every=4, until=1.0).attach(model, optimizer, total_steps=50)
    train(model, optimizer, range(4))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = {name: mask.clone() for name, mask in pruner.masks().items()}
    for factor in (torch.inf, 1.0, 1.0):
        optimizer.zero_grad()
        scaler.scale(compute_loss(model, 4) * factor).backward()
        weights = model.conv1.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        trained = not torch.equal(weights, model.conv1.weight)
        if factor == torch.inf:
            assert not trained
            assert pruner.step == 4
            assert all(torch.equal(mask, before[name]) for name, mask in pruner.masks().items())
            dense = copy.deepcopy(model)
    # The update used the next finite gradient, like a run without overflow.
    assert [entry["step"] for entry in pruner.history] == [0, 4]
    compute_loss(dense, 4).backward()
    for name, mask in pruner.masks().items():
        old, active = before[name].numpy(), int(before[name].sum())
        drop = int(0.25 * (1 + math.cos(math.pi * 4 / 50)) * active)
        kept = keep_largest(np.where(old, dense.get_parameter(name).detach().abs().numpy(), -np.inf), active - drop)
        grown = keep_largest(np.where(kept, -1, dense.get_parameter(name).grad.abs().numpy()), drop)
        assert np.array_equal(mask.numpy(), kept | grown)
    assert trained, "the step after the update did not train"
    assert pruner.step == 6


def test_rigl_keeps_the_count_of_every_layer() -> None:
    model = Net().double()
    optimizer = make_adam(model)
    pruner = pm.RigL(sparsity=0.9, share=0.8, every=2, until=1.0).attach(model, optimizer, total_steps=60)
    counts = {name: int(mask.sum()) for name, mask in pruner.masks().items()}
    for t in range(60):
        train(model, optimizer, [t])
        assert {name: int(mask.sum()) for name, mask in pruner.masks().items()} == counts
        for name, mask in pruner.masks().items():
            parameter = model.get_parameter(name)
            assert not parameter[~mask].any()
            for value in optimizer.state[parameter].values():
                assert value.shape != mask.shape or not value[~mask].any()


def test_weights_edited_before_an_update_grow_from_zero() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.RigL(sparsity=0.6, share=0.5, every=4, until=1.0).attach(model, optimizer, total_steps=50)
    train(model, optimizer, range(4))
    old = {name: mask.clone() for name, mask in pruner.masks().items()}
    with torch.no_grad():
        for name in TARGETS:
            model.get_parameter(name).add_(1.0)
    optimizer.zero_grad()
    compute_loss(model, 4).backward()
    with pytest.warns(UserWarning, match="was changed between two steps"):
        optimizer.step()
    for name, mask in pruner.masks().items():
        assert not model.get_parameter(name)[mask & ~old[name]].any()


def test_masks_are_fixed_after_until() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.RigL(sparsity=0.6, every=3, until=0.5).attach(model, optimizer, total_steps=24)
    train(model, optimizer, range(24))
    assert [entry["step"] for entry in pruner.history] == [0, 3, 6, 9]


def test_rigl_leaves_the_first_layer_dense_and_prunes_the_last() -> None:
    model = Net()
    assert tuple(pm.RigL(sparsity=0.6).attach(model, make_sgd(model), total_steps=24).masks()) == TARGETS


def test_tick_is_refused_where_rigl_needs_the_gradient() -> None:
    model = Net()
    pruner = pm.RigL(sparsity=0.6, every=3).attach(model, make_sgd(model), total_steps=24)
    for _ in range(3):
        assert not pruner.wants_gradient()
        pruner.tick()
    assert pruner.wants_gradient()
    with pytest.raises(pm.PomonaError, match="rigl needs the gradient of this step, which a replay hides"):
        pruner.tick()
    assert pruner.step == 3


def test_rigl_refuses_two_optimizers() -> None:
    model = Net()
    with pytest.raises(pm.PomonaError, match="takes one optimizer, got 2"):
        pm.RigL().attach(model, [make_sgd(model), make_sgd(model)], total_steps=24)


def test_rigl_refuses_a_frozen_layer_that_is_included() -> None:
    model = Net().double()
    model.hidden.weight.requires_grad_(False)
    with pytest.raises(pm.PomonaError, match="hidden.weight is frozen and rigl needs its gradient"):
        pm.RigL(sparsity=0.5, every=2, until=1.0, include="hidden").attach(model, make_sgd(model), total_steps=24)


@pytest.mark.parametrize("factor", [torch.nan, torch.inf])
def test_rigl_refuses_a_gradient_that_is_not_finite(factor: float) -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.RigL(sparsity=0.5, every=2, until=1.0).attach(model, optimizer, total_steps=24)
    train(model, optimizer, range(2))
    before = {name: mask.clone() for name, mask in pruner.masks().items()}
    (compute_loss(model, 2) * factor).backward()
    with pytest.raises(pm.PomonaError, match="gradient of .* holds NaN or inf"):
        optimizer.step()
    assert all(torch.equal(mask, before[name]) for name, mask in pruner.masks().items())


@pytest.mark.parametrize("options", [{"until": 0.0}, {"until": 1.5}, {"share": 1.0}, {"every": 0}])
def test_invalid_options_of_rigl_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(pm.PomonaError, match=f"got {next(iter(options.values()))}"):
        pm.RigL(**options)
