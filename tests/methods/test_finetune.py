"""One-shot, incremental and random pruning against references, and fine-tuning after every method."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import TARGETS, Net, compute_loss, make_adam, make_batch, make_sgd, train
from reference_methods import (
    LinearStack,
    ReferenceTraining,
    draw_random_scores,
    get_mask_rows,
    get_weight_rows,
    keep_largest,
    keep_largest_globally,
    make_zero_lr_sgd,
    step_with_gradients,
    train_beside_reference,
)
from torch import Tensor, nn
from torch.nn import functional as F

import pomona as pm
from pomona.core.connectivity import find_blocked_layers
from pomona.methods import METHODS, make_pruner

WEIGHTS = [[4.0, -3.0, 2.0, 1.0], [-8.0, 0.5, 7.0, 6.0]]
ZERO = [[0.0] * 4] * 2


# ---- one-shot


def test_oneshot_by_hand() -> None:
    # ⌊0.6·8⌉ = 5 are pruned: 0.5, 1, 2, −3, 4.
    model = LinearStack(a=WEIGHTS)
    pruner = pm.OneShot(sparsity=0.6, include=["a"]).attach(model, make_zero_lr_sgd(model))
    assert get_mask_rows(pruner) == [[0, 0, 0, 0], [1, 0, 1, 1]]
    assert get_weight_rows(model) == [[0.0, 0.0, 0.0, 0.0], [-8.0, 0.0, 7.0, 6.0]]


def test_oneshot_during_training_by_hand() -> None:
    # Dense until step 2 of 4; the gradient takes 1 from each weight at each step.
    #   after 2:  2 −5  0 −1      the five smallest: 0, −1, −1.5, 2, 4
    #           −10 −1.5  5  4
    model = LinearStack(a=WEIGHTS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    pruner = pm.OneShot(sparsity=0.6, at=0.5, include=["a"]).attach(model, optimizer, total_steps=4)
    one = [[1.0] * 4] * 2
    step_with_gradients(model, optimizer, a=one)
    assert get_mask_rows(pruner) == [[1] * 4] * 2
    step_with_gradients(model, optimizer, a=one)
    assert get_mask_rows(pruner) == [[0, 1, 0, 0], [1, 0, 1, 0]]
    for _ in range(2):
        step_with_gradients(model, optimizer, a=one)
    assert get_weight_rows(model) == [[0.0, -7.0, 0.0, 0.0], [-12.0, 0.0, 3.0, 0.0]]
    assert len(pruner.history) == 1


def test_oneshot_at_the_end_by_hand() -> None:
    model = LinearStack(a=WEIGHTS)
    optimizer = make_zero_lr_sgd(model)
    pruner = pm.OneShot(sparsity=0.6, at=1.0, include=["a"]).attach(model, optimizer, total_steps=2)
    step_with_gradients(model, optimizer, a=ZERO)
    assert get_weight_rows(model) == WEIGHTS
    step_with_gradients(model, optimizer, a=ZERO)
    pruner.finish()
    assert get_weight_rows(model) == [[0.0, 0.0, 0.0, 0.0], [-8.0, 0.0, 7.0, 6.0]]


def list_blocked(model: torch.nn.Module, masks: Mapping[str, Any]) -> list[str]:
    """Return the layers that nothing of the input passes under masks by name."""
    return find_blocked_layers(model, {model.get_parameter(n): torch.as_tensor(mask) for n, mask in masks.items()})


@pytest.mark.parametrize("allocation", ["global(floor=0)", "uniform"])
def test_oneshot_matches_numpy_on_fifty_networks(allocation: str) -> None:
    for seed in range(50):
        sparsity, model = (0.0, 0.3, 0.5, 0.9, 0.99)[seed % 5], Net(seed).double()
        size = {name: model.get_parameter(name).detach().abs().numpy() for name in TARGETS}
        if allocation != "uniform":
            count = sum(s.size for s in size.values())
            expected = keep_largest_globally(size, count - round(sparsity * count))
        else:
            expected = {name: keep_largest(s, s.size - round(sparsity * s.size)) for name, s in size.items()}
        masks = pm.OneShot(sparsity=sparsity, allocation=allocation).attach(model, make_sgd(model)).masks()
        if allocation == "uniform" and list_blocked(model, expected):  # then weights are exchanged for live ones
            assert not list_blocked(model, masks)
            assert all(int(masks[name].sum()) == mask.sum() for name, mask in expected.items())
        else:
            assert all(np.array_equal(masks[name].numpy(), mask) for name, mask in expected.items())


# ---- incremental


def test_incremental_by_hand() -> None:
    # s_t = 0.875 · (1 − (1 − t/4)³), of eight weights:
    #   t = 0: 0;  1: 0.5059, 4.05 → 4 are pruned;  2: 0.7656, 6.1 → 6;  3: 0.8613, 6.9 → 7;  4: 0.875, 7
    model = LinearStack(a=WEIGHTS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    pruner = pm.Incremental(sparsity=0.875, every=1, schedule=pm.Cubic(until=1.0), include=["a"])
    pruner.attach(model, optimizer, total_steps=4)
    assert get_mask_rows(pruner) == [[1] * 4] * 2
    step_with_gradients(model, optimizer, a=ZERO)  # 0.5, 1, 2, −3
    assert get_mask_rows(pruner) == [[1, 0, 0, 0], [1, 0, 1, 1]]
    # −8 shrinks to −1, and gradients of pruned weights have no effect: 4, 6 would be next, but −1 and 4 are.
    step_with_gradients(model, optimizer, a=[[0.0, 50.0, 50.0, 50.0], [-7.0, 50.0, 0.0, 0.0]])
    assert get_mask_rows(pruner) == [[0, 0, 0, 0], [0, 0, 1, 1]]
    step_with_gradients(model, optimizer, a=[[50.0] * 4, [50.0, 50.0, 2.0, 0.0]])  # 7 − 2 is below 6
    assert get_mask_rows(pruner) == [[0, 0, 0, 0], [0, 0, 0, 1]]
    step_with_gradients(model, optimizer, a=[[50.0] * 4, [50.0, 50.0, 50.0, 0.0]])
    assert get_weight_rows(model) == [[0.0] * 4, [0.0, 0.0, 0.0, 6.0]]


def test_incremental_counts_weights_that_trained_to_zero() -> None:
    # One more is pruned at each step: 1 at (0,0). Then 2 and 8 train to zero; the later of these two is pruned, and
    # (0,0) counts as pruned though it is zero like them.
    model = LinearStack(a=[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    pruner = pm.Incremental(sparsity=0.5, every=1, schedule=pm.Linear(until=1.0), include=["a"])
    pruner.attach(model, optimizer, total_steps=4)
    step_with_gradients(model, optimizer, a=ZERO)
    assert get_mask_rows(pruner) == [[0, 1, 1, 1], [1, 1, 1, 1]]
    step_with_gradients(model, optimizer, a=[[0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 8.0]])
    assert get_mask_rows(pruner) == [[0, 1, 1, 1], [1, 1, 1, 0]]


TOTAL, EVERY = 196, 3


def prune_incrementally(reference: ReferenceTraining, t: int) -> None:
    """Prune s_f (1 − (1 − t/t_end)³) of all weights by magnitude (Zhu & Gupta, 2017); pruned weights stay pruned."""
    x = min(t / (0.75 * TOTAL), 1.0)
    count = sum(mask.size for mask in reference.masks.values())
    size = {name: np.where(mask, np.abs(reference.weight(name)), -1) for name, mask in reference.masks.items()}
    reference.masks = keep_largest_globally(size, count - round(0.9 * (1 - (1 - x) ** 3) * count))


@pytest.mark.parametrize("make", [make_sgd, make_adam])
def test_incremental_matches_a_reference_over_fifty_updates(make: Any) -> None:
    reference = ReferenceTraining(make)
    reference.masks = {name: np.ones(reference.weight(name).shape, dtype=bool) for name in TARGETS}
    steps = reference.run(TOTAL, prune_incrementally, due=lambda t: t % EVERY == 0 and t <= 0.75 * TOTAL)

    model = Net().double()
    pruner = pm.Incremental(sparsity=0.9, every=EVERY, allocation="global(floor=0)")
    pruner.attach(model, make(model), total_steps=TOTAL)
    train_beside_reference(pruner, reference, steps)
    assert len(pruner.history) == 50


# ---- random


def test_random_by_hand() -> None:
    # The draws of seed 0:  .50 .77 .09 .13    three of eight are pruned: .09, .13, .31
    #                       .31 .63 .49 .90
    # and those of seed 3:  .00 .11 .29 .03    .00, .03, .06
    #                       .47 .06 .77 .74
    for seed, mask in ((0, [[1, 1, 0, 0], [0, 1, 1, 1]]), (3, [[0, 1, 1, 0], [1, 0, 1, 1]])):
        model = LinearStack(a=WEIGHTS)
        assert (
            get_mask_rows(pm.Random(sparsity=0.375, seed=seed, include=["a"]).attach(model, make_zero_lr_sgd(model)))
            == mask
        )


def test_random_matches_numpy_on_fifty_seeds() -> None:
    for seed in range(50):
        sparsity, model = (0.1, 0.5, 0.7, 0.9, 0.99)[seed % 5], Net().double()
        drawn = draw_random_scores({name: model.get_parameter(name).detach().numpy() for name in TARGETS}, seed)
        count = sum(s.size for s in drawn.values())
        expected = keep_largest_globally(drawn, count - round(sparsity * count))
        masks = (
            pm.Random(sparsity=sparsity, seed=seed, allocation="global(floor=0)").attach(model, make_sgd(model)).masks()
        )
        assert all(np.array_equal(masks[name].numpy(), mask) for name, mask in expected.items())


# ---- fine-tuning


def test_finetune_by_hand() -> None:
    model = LinearStack(a=[[4.0, 0.0, 2.0, 0.0], [0.0, 0.5, -0.0, 6.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    pruner = pm.Finetune(include=["a"]).attach(model, optimizer)
    for _ in range(2):
        step_with_gradients(model, optimizer, a=[[1.0] * 4, [1.0] * 4])
    # 0.5 − 1 − 1 is −1.5; a weight that passes through zero (2 − 1 − 1) is not pruned.
    assert get_weight_rows(model) == [[2.0, 0.0, 0.0, 0.0], [0.0, -1.5, 0.0, 4.0]]
    step_with_gradients(model, optimizer, a=[[1.0] * 4, [1.0] * 4])
    assert get_weight_rows(model) == [[1.0, 0.0, -1.0, 0.0], [0.0, -2.5, 0.0, 3.0]]
    assert get_mask_rows(pruner) == [[1, 0, 1, 0], [0, 1, 0, 1]]
    pruner.finish()


def prune_network(name: str, pattern: Any = None, steps: int = 12) -> tuple[Net, dict[str, Tensor]]:
    """Return a network after training with a method, and its last masks."""
    options: dict[str, Any] = {"sparsity": 0.6}
    if pattern is not None:
        options["pattern"] = pattern
    if name in ("set", "rigl", "sparse_momentum", "dsr", "sfp", "dpf", "incremental"):
        options["every"] = 2
    if name == "dsr":
        options |= {"threshold": 0.05, "churn": 0.1}
    if pattern is not None and name != "snip":
        options["allocation"] = "uniform"
    model = Net().double()
    if name == "lottery":
        masks = {}

        def training(model: nn.Module, finetune: pm.Pruner, index: int) -> None:
            optimizer = make_sgd(model)
            finetune.attach(model, optimizer, total_steps=2)
            train(model, optimizer, range(2))
            masks.update({n: mask.clone() for n, mask in finetune.masks().items()})
            finetune.finish()

        pm.Lottery(**options, retrainings=2).rounds(model, training)
        return model, masks
    optimizer = make_sgd(model)
    model.norm.requires_grad_(METHODS[name].weights != "score")  # score methods refuse a norm that is trained
    pruner = make_pruner({"name": name, **options}).attach(model, optimizer, total_steps=steps)
    train(model, optimizer, range(steps))
    pruner.finish()
    model.norm.requires_grad_(True)
    return model, {n: mask.clone() for n, mask in pruner.masks().items()}


every_method = pytest.mark.parametrize("name", [name for name in METHODS if name != "finetune"])


@every_method
@pytest.mark.parametrize("make", [make_sgd, make_adam])
def test_finetune_keeps_the_zeros_of_every_method(name: str, make: Any) -> None:
    model, masks = prune_network(name)
    zeros = {n: p == 0 for n, p in model.named_parameters()}
    optimizer = make(model)
    finetune = pm.Finetune().attach(model, optimizer)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for t in range(6):
        train(model, optimizer, [t])
        for n, mask in masks.items():
            assert not model.get_parameter(n)[~mask].any(), f"a pruned weight of {n} is not zero"
            for state in optimizer.state[model.get_parameter(n)].values():
                assert state.shape != mask.shape or not state[~mask].any()
    for n, parameter in model.named_parameters():
        assert not before[n].any() or not torch.equal(parameter, before[n]), f"{n} was not trained"
        if n in finetune.masks():
            assert torch.equal(~finetune.masks()[n], zeros[n])
    finetune.finish()


# Methods that regrow weights refuse filters.
FILTER_METHODS = ["dpf", "incremental", "lottery", "oneshot", "random", "sfp", "snip"]


def outputs_are_zero(model: Net, kept: Tensor) -> bool:
    """Return whether the channels of removed filters are exactly zero for any input, in training and evaluation."""
    x = torch.randn(8, 4, 5, 5, dtype=torch.float64) * 100
    copied = copy.deepcopy(model)
    outs = [copied.train(mode).norm(copied.conv1(x)) for mode in (True, False)]
    return all(not out[:, ~kept].any() and bool(out[:, kept].any()) for out in outs)


@pytest.mark.parametrize("name", FILTER_METHODS)
def test_filters_are_removed_with_their_bias_and_norm(name: str) -> None:
    model, masks = prune_network(name, pm.Filter())
    kept = masks["conv1.weight"].flatten(1).any(1)
    assert 0 < kept.sum() < len(kept)
    assert outputs_are_zero(model, kept)
    optimizer = make_sgd(model)
    finetune = pm.Finetune(pattern=pm.Filter()).attach(model, optimizer)
    for t in range(4):
        train(model, optimizer, [t])
        assert outputs_are_zero(model, kept), "fine-tuning changed the bias of a removed filter"
    finetune.finish()
    assert outputs_are_zero(model, kept)
    assert not model.conv2(torch.randn(2, 8, 5, 5, dtype=torch.float64))[
        :, ~masks["conv2.weight"].flatten(1).any(1)
    ].any()


@pytest.mark.parametrize("make", [make_sgd, make_adam])
@pytest.mark.parametrize("name", ["oneshot", "incremental", "random", "snip"])
def test_hard_methods_keep_removed_outputs_at_zero_at_every_step(name: str, make: Any) -> None:
    options: dict[str, Any] = {"sparsity": 0.5, "pattern": pm.Filter()}
    if name == "incremental":
        options["every"] = 2
    model = Net().double()
    nn.init.normal_(model.norm.bias)
    optimizer = make(model)
    pruner = make_pruner({"name": name, **options}).attach(model, optimizer, total_steps=24)
    removed = 0
    for t in range(24):
        train(model, optimizer, [t])
        kept = pruner.masks()["conv1.weight"].flatten(1).any(1)
        removed += int((~kept).sum())
        if not kept.all():
            x = torch.randn(4, 4, 5, 5, dtype=torch.float64)
            copied = copy.deepcopy(model)
            for mode in (True, False):
                assert not copied.train(mode).norm(copied.conv1(x))[:, ~kept].any(), (
                    f"a removed output is not zero after step {t + 1}"
                )
        for vector in (model.conv1.bias, model.norm.weight, model.norm.bias):
            assert not vector[~kept].any()
            for state in optimizer.state[vector].values():
                assert state.shape != vector.shape or not state[~kept].any(), (
                    "optimizer state of a removed filter is not zero"
                )
    assert removed > 0


class ConvolutionAndNorm(nn.Module):
    """A convolution and a batch norm, with other layers between them."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.variant = variant
        self.conv = nn.Conv2d(3, 8, 3, bias=variant != "no bias")
        self.norm = nn.BatchNorm2d(8, affine=variant != "no gain")
        self.between = {
            "relu first": nn.ReLU(),
            "pool first": nn.MaxPool2d(2),
            "chain": nn.Sequential(nn.ReLU(), nn.Dropout()),
        }.get(variant, nn.Identity())
        self.head = nn.Linear(8, 2)

    def features(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.variant == "function first":
            x = F.relu(x)
        return self.norm(self.between(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.variant == "untraceable" and x.sum() == 0:
            return x
        return self.head(F.relu(self.features(x)).mean((2, 3)))


@pytest.mark.parametrize(
    "variant", ["plain", "no bias", "no gain", "relu first", "pool first", "function first", "chain"]
)
def test_removed_outputs_are_zero_for_every_order_of_layers(variant: str) -> None:
    model = ConvolutionAndNorm(variant).double()
    optimizer = make_sgd(model)
    x = torch.randn(6, 3, 8, 8, dtype=torch.float64)
    for _ in range(3):  # so that statistics, gains and biases are not zero
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    pruner = pm.OneShot(sparsity=0.5, pattern=pm.Filter()).attach(model, optimizer)
    removed = ~pruner.masks()["conv.weight"].flatten(1).any(1)
    for mode in (False, True, False):
        assert not copy.deepcopy(model).train(mode).features(x)[:, removed].any()
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    pruner.finish()
    assert not model.eval().features(x)[:, removed].any()


def test_a_norm_in_an_untraceable_model_is_removed_or_reported() -> None:
    """A forward that branches on its data cannot be traced: the norm is found nevertheless, or there is a warning."""
    model = ConvolutionAndNorm("untraceable").double()
    nn.init.normal_(model.norm.bias)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pruner = pm.OneShot(sparsity=0.5, pattern=pm.Filter()).attach(model, make_sgd(model))
    removed = ~pruner.masks()["conv.weight"].flatten(1).any(1)
    leak = bool(model.eval().features(torch.randn(2, 3, 8, 8, dtype=torch.float64))[:, removed].any())
    assert not leak or any("norm" in str(w.message) for w in caught)


def test_the_finetuned_loss_is_lower() -> None:
    model, _ = prune_network("oneshot")
    images, labels = make_batch(0)
    before = F.cross_entropy(model.eval()(images), labels).item()
    optimizer = make_sgd(model.train())
    finetune = pm.Finetune().attach(model, optimizer)
    train(model, optimizer, [0] * 30)
    finetune.finish()
    assert F.cross_entropy(model.eval()(images), labels).item() < before
    assert finetune.sparsity() > 0.5


def test_finetune_takes_no_sparsity() -> None:
    with pytest.raises(pm.PomonaError, match="sparsity"):
        pm.Finetune(sparsity=0.5)


def test_finetune_trains_a_dense_model_unchanged() -> None:
    model, plain = Net().double(), Net().double()
    optimizer = make_sgd(model)
    finetune = pm.Finetune(include=TARGETS).attach(model, optimizer)
    train(model, optimizer, range(5))
    finetune.finish()
    train(plain, make_sgd(plain), range(5))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert compute_loss(model, 0).isfinite()
