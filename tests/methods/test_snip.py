"""SNIP: pruning once before training, by |w · ∂L/∂w|."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import Net, compute_loss, make_adam, make_batch, make_sgd, train
from reference_methods import (
    LinearStack,
    get_mask_rows,
    keep_largest_globally,
    make_linear_loss,
    make_zero_lr_sgd,
    step_with_gradients,
)
from torch import Tensor, nn
from torch.nn import functional as F

import pomona as pm

WEIGHTS = [[4.0, -3.0, 2.0, 1.0], [-8.0, 0.5, 0.0, 6.0]]
GRADIENT = [[1.0, -2.0, 0.5, -5.0], [0.25, 8.0, 100.0, 0.5]]
# |w · g| = 4  6  1  5    Four of eight are kept: 6, 5 and both 4s. By magnitude it would have been
#           2  4  0  3    8, 6, 4 and 3; by gradient 100, 8, 5 and 2.
MASK = [[1, 1, 0, 1], [0, 1, 0, 0]]
KEPT = [[4.0, -3.0, 0.0, 1.0], [0.0, 0.5, 0.0, 0.0]]


def test_snip_by_hand_from_a_loss() -> None:
    model = LinearStack(a=WEIGHTS)
    pruner = pm.SNIP(sparsity=0.5, include=["a"]).attach(
        model, make_zero_lr_sgd(model), loss=lambda: make_linear_loss(model, a=GRADIENT)
    )
    assert get_mask_rows(pruner) == MASK
    assert model.a.weight.tolist() == KEPT


def test_snip_by_hand_from_the_first_step() -> None:
    model = LinearStack(a=WEIGHTS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    pruner = pm.SNIP(sparsity=0.5, include=["a"]).attach(model, optimizer)
    assert get_mask_rows(pruner) == [[1] * 4] * 2, "weights are pruned before the first gradient"
    step_with_gradients(model, optimizer, a=GRADIENT)
    assert get_mask_rows(pruner) == MASK
    assert model.a.weight.tolist() == KEPT, "the first step changed kept weights"
    step_with_gradients(model, optimizer, a=GRADIENT)  # w − g where the mask is: 4 − 1, −3 + 2, 1 + 5, 0.5 − 8
    assert model.a.weight.tolist() == [[3.0, -1.0, 0.0, 6.0], [0.0, -7.5, 0.0, 0.0]]
    assert get_mask_rows(pruner) == MASK


def test_snip_by_hand_over_weights_biases_and_the_last_layer() -> None:
    # All five parameters are ranked together. Loss = 3 y with y = v (w x + b) + c at x = (1, 2):
    #   w = (2, −1), b = 0.5, so h = 2 − 2 + 0.5 = 0.5; v = 4, c = 0.3
    #   |w · g|: |2 · 3·4·1| = 24, |−1 · 3·4·2| = 24; of b |0.5 · 12| = 6; of v |4 · 3·0.5| = 6; of c 0.3 · 3 = 0.9
    # Two of five are pruned: c, and the later of the two 6s, which is v.
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1)).double()
    for parameter, value in zip(model.parameters(), ([[2.0, -1.0]], [0.5], [[4.0]], [0.3]), strict=True):
        parameter.data.copy_(torch.tensor(value))
    x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    pruner = pm.SNIP(sparsity=0.4, allocation="global(floor=0)").attach(
        model, make_zero_lr_sgd(model), loss=lambda: 3 * model(x).sum()
    )
    masks = {name: mask.int().tolist() for name, mask in pruner.masks().items()}
    assert masks == {"0.weight": [[1, 1]], "0.bias": [1], "1.weight": [[0]], "1.bias": [0]}


def select_by_saliency(model: nn.Module, loss: Tensor, sparsity: float) -> dict[str, np.ndarray]:
    """Return masks of the largest normalised |w · g| over weights and biases (Lee et al., 2019); norms stay dense."""
    named = {n: p for n, p in model.named_parameters() if not n.startswith("norm")}
    gradients = torch.autograd.grad(loss, list(named.values()))
    raw = {n: (p * g).abs().detach().numpy() for (n, p), g in zip(named.items(), gradients, strict=True)}
    whole = sum(s.sum() for s in raw.values())
    count = sum(s.size for s in raw.values())
    return keep_largest_globally({n: s / whole for n, s in raw.items()}, count - round(sparsity * count))


@pytest.mark.parametrize("way", ["loss", "first step"])
def test_snip_matches_numpy_on_fifty_networks(way: str) -> None:
    for seed in range(50):
        model = Net(seed).double()
        sparsity = (0.1, 0.5, 0.8, 0.9, 0.98)[seed % 5]
        copied = copy.deepcopy(model).train(way == "first step")  # a loss at attach is computed in evaluation mode
        expected = select_by_saliency(copied, compute_loss(copied, seed), sparsity)
        optimizer = make_sgd(model)
        pruner = pm.SNIP(sparsity=sparsity, allocation="global(floor=0)")
        if way == "loss":
            pruner.attach(model, optimizer, loss=lambda: compute_loss(model, seed))  # noqa: B023 - called at once
        else:
            pruner.attach(model, optimizer)
            train(model, optimizer, [seed])
        masks = pruner.masks()
        assert masks.keys() == expected.keys()
        assert all(np.array_equal(masks[n].numpy(), expected[n]) for n in expected)


def test_loss_and_first_step_agree_in_evaluation_mode() -> None:
    one, other = Net().double(), Net().double()
    by_loss = pm.SNIP(sparsity=0.8).attach(one, make_sgd(one), loss=lambda: compute_loss(one, 0))
    optimizer = make_sgd(other)
    by_step = pm.SNIP(sparsity=0.8).attach(other, optimizer)
    other.eval()
    train(other, optimizer, [0])
    assert all(torch.equal(m, by_step.masks()[n]) for n, m in by_loss.masks().items())
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_the_loss_at_attach_does_not_change_the_model() -> None:
    model = Net().double()
    model.norm.eval()
    statistics, modes = model.norm.running_mean.clone(), [m.training for m in model.modules()]
    pm.SNIP(sparsity=0.5).attach(model, make_sgd(model), loss=lambda: compute_loss(model, 0))
    assert torch.equal(model.norm.running_mean, statistics)
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())


def test_after_a_loss_at_attach_the_first_step_trains() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.SNIP(sparsity=0.5).attach(model, optimizer, loss=lambda: compute_loss(model, 0))
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, [0])
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert [entry["step"] for entry in pruner.history] == [0]


@pytest.mark.parametrize("make", [make_sgd, make_adam])
def test_the_first_step_prunes_and_does_not_train(make: Any) -> None:
    model = Net().double()
    optimizer = make(model)
    pruner = pm.SNIP(sparsity=0.5).attach(model, optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    compute_loss(model, 0).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    masks = pruner.masks()
    for name, parameter in model.named_parameters():
        kept = masks.get(name, torch.ones_like(parameter, dtype=torch.bool))
        assert torch.equal(parameter, torch.where(kept, before[name], 0))
        assert torch.equal(parameter.grad, gradients[name]), "the gradient is not restored after the step"
    assert not any(optimizer.state.values()), "the optimizer took a step"
    train(model, optimizer, [1, 2])
    assert len(pruner.history) == 1
    assert not any(model.get_parameter(name)[~mask].any() for name, mask in masks.items())


def mask_of_first_step(style: str) -> dict[str, Tensor]:
    """Return the mask after the first step of a training loop of the given style, on a fixed batch."""
    model = Net().double().eval()
    optimizer = make_sgd(model)
    pruner = pm.SNIP(sparsity=0.8).attach(model, optimizer)
    images, labels = make_batch(0)
    if style == "accumulated":
        for half in (slice(0, 3), slice(3, 6)):
            (F.cross_entropy(model(images[half]), labels[half]) / 2).backward()
        optimizer.step()
    elif style == "closure":

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = compute_loss(model, 0)
            loss.backward()
            return loss

        optimizer.step(closure)
    else:
        loss = compute_loss(model, 0)
        scaler = torch.amp.GradScaler("cpu", enabled=style == "scaled")
        scaler.scale(loss).backward()
        if style == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
    return {name: mask.clone() for name, mask in pruner.masks().items()}


@pytest.mark.parametrize("style", ["accumulated", "closure", "scaled", "clipped"])
def test_every_training_loop_gives_the_snip_mask(style: str) -> None:
    assert all(torch.equal(mask, mask_of_first_step("plain")[name]) for name, mask in mask_of_first_step(style).items())


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_skipped_by_the_scaler_is_not_the_first(fused: bool) -> None:
    model = Net()
    optimizer = make_sgd(model, fused=fused)
    pruner = pm.SNIP(sparsity=0.8).attach(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for t, factor in enumerate((torch.inf, 1.0)):
        optimizer.zero_grad()
        scaler.scale(compute_loss(model, t) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        pruned = pruner.sparsity()
        assert pruned == 0 if t == 0 else pruned == pytest.approx(0.8, abs=1e-3)
    for name, mask in pruner.masks().items():
        assert torch.equal(model.get_parameter(name), torch.where(mask, before[name], 0))


def test_finish_without_a_gradient_is_refused() -> None:
    model = Net()
    pruner = pm.SNIP(sparsity=0.5).attach(model, make_sgd(model))
    with pytest.raises(pm.PomonaError, match="snip has seen no gradient: give attach\\(…, loss=…\\)"):
        pruner.finish()


def test_snip_refuses_two_optimizers() -> None:
    model = Net()
    optimizers = [torch.optim.SGD(list(model.parameters())[:3], lr=0.1), make_sgd(model)]
    with pytest.raises(pm.PomonaError, match="takes one optimizer, got 2"):
        pm.SNIP().attach(model, optimizers)


def test_filters_of_the_last_layer_are_not_pruned() -> None:
    model = Net().double()
    pruner = pm.SNIP(sparsity=0.5, pattern=pm.Filter()).attach(
        model, make_sgd(model), loss=lambda: compute_loss(model, 0)
    )
    assert "head.weight" not in pruner.masks()
    assert "conv1.bias" not in pruner.masks(), "a bias is removed with its filter, not separately"


def test_snip_refuses_a_frozen_layer_by_name() -> None:
    model = Net().double()
    model.hidden.weight.requires_grad_(False)
    with pytest.raises(pm.PomonaError, match="hidden.weight is frozen and snip needs its gradient"):
        pm.SNIP(sparsity=0.5).attach(model, make_sgd(model))


def test_snip_refuses_a_gradient_that_is_not_finite() -> None:
    model = Net().double()
    before = model.conv1.weight.clone()
    with pytest.raises(pm.PomonaError, match="gradient of conv1.weight holds NaN or inf"):
        pm.SNIP(sparsity=0.5).attach(model, make_sgd(model), loss=lambda: compute_loss(model, 0) * torch.nan)
    assert torch.equal(model.conv1.weight, before)


@pytest.mark.parametrize(
    "value", [3.0, torch.ones(2, requires_grad=True), torch.ones(())], ids=["float", "vector", "leaf"]
)
def test_a_value_that_is_not_a_scalar_loss_is_refused(value: Any) -> None:
    model = Net().double()
    with pytest.raises(pm.PomonaError, match="loss"):
        pm.SNIP(sparsity=0.5).attach(model, make_sgd(model), loss=lambda: value)


def test_a_loss_for_another_method_is_refused() -> None:
    model = Net().double()
    with pytest.raises(pm.PomonaError, match="loss"):
        pm.OneShot(sparsity=0.5).attach(model, make_sgd(model), loss=lambda: compute_loss(model, 0))


def test_an_unused_layer_is_refused_by_name() -> None:
    model = Net().double()
    model.spare = nn.Linear(4, 4).double()
    with pytest.raises(pm.PomonaError, match="spare.weight has no gradient"):
        pm.SNIP(sparsity=0.5).attach(model, make_sgd(model), loss=lambda: compute_loss(model, 0))


def test_tick_is_refused_until_the_masks_are_selected() -> None:
    model = Net().double()
    pruner = pm.SNIP(sparsity=0.5).attach(model, make_sgd(model), loss=lambda: compute_loss(model, 0))
    pruner.tick()  # a gradient is no longer needed
    assert pruner.step == 1
    other = Net().double()
    with pytest.raises(pm.PomonaError, match="snip needs the gradient of this step, which a replay hides"):
        pm.SNIP(sparsity=0.5).attach(other, make_sgd(other)).tick()


def test_a_resumed_run_does_not_prune_again() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.SNIP(sparsity=0.5).attach(model, optimizer, loss=lambda: compute_loss(model, 0))
    other = Net(1).double()
    other_optimizer = make_sgd(other)
    resumed = pm.SNIP(sparsity=0.5).attach(other, other_optimizer)
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(optimizer.state_dict())
    before = other.conv1.weight.detach().clone()
    train(other, other_optimizer, [0])
    assert not torch.equal(before, other.conv1.weight), "the first step was replaced by another update"
    assert all(torch.equal(mask, resumed.masks()[name]) for name, mask in pruner.masks().items())
