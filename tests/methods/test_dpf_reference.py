"""DPF against an independent straight-through reference, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine_helpers import TARGETS, Net, make_adam, make_batch, make_sgd
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

import pomona as pm
from pomona.patterns import Pattern

STEPS, EVERY = 200, 16
PLAIN = {"compressor": "none", "feedback": None, "allocation": "global(floor=0)"}  # as the reference is


# Coupled parameters, removed with a filter at the last mask update: its bias, and the batch norm behind it.
COUPLED = {
    "conv1.bias": "conv1.weight",
    "norm.weight": "conv1.weight",
    "norm.bias": "conv1.weight",
    "conv2.bias": "conv2.weight",
    "hidden.bias": "hidden.weight",
}


def keep_largest_units(weights: dict[str, Tensor], sparsity: float, filters: bool) -> dict[str, Tensor]:
    """Return masks of the largest weights, or of the filters of largest L2 norm.

    They are a prefix of the full order, with the count nearest to the one asked for.
    """
    units = [
        (row.square().sum().sqrt().item(), row.numel(), name, i)
        for name, w in weights.items()
        for i, row in enumerate(w.flatten(1) if filters else w.reshape(-1, 1))
    ]
    units.sort(key=lambda unit: -unit[0])
    total = sum(size for _, size, _, _ in units)
    wanted, have, prefix = total - round(sparsity * total), 0, 0
    while prefix < len(units) and abs(have + units[prefix][1] - wanted) < abs(have - wanted):
        have, prefix = have + units[prefix][1], prefix + 1
    kept: dict[str, set[int]] = {name: set() for name in weights}
    for _, _, name, i in units[:prefix]:
        kept[name].add(i)
    masks = {}
    for name, w in weights.items():
        size = len(w) if filters else w.numel()
        mask = torch.tensor([float(i in kept[name]) for i in range(size)], dtype=torch.float64)
        masks[name] = mask.repeat_interleave(w.numel() // size).view(w.shape)
    return masks


def train_straight_through(
    make: Callable[[nn.Module], Optimizer], sparsity: float, filters: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], Net]:
    """Train by straight-through autograd and return the dense weights, the sparse ones and the model."""
    model = Net().double()
    optimizer = make(model)
    weights = dict(model.named_parameters())
    pruned = {name: weights[name] for name in (*TARGETS, *(COUPLED if filters else ()))}
    masks = {name: torch.ones_like(w) for name, w in pruned.items()}
    for step in range(STEPS + 1):
        if step % EVERY == 0 and step <= 0.9 * STEPS:
            x = min(step / (0.75 * STEPS), 1.0)
            latents = {k: pruned[k].detach() for k in TARGETS}
            masks |= keep_largest_units(latents, sparsity * (1 - (1 - x) ** 3), filters)
            if filters and step + EVERY > 0.9 * STEPS:
                masks |= {one: masks[leader].flatten(1)[:, 0] for one, leader in COUPLED.items()}
        sparse = {name: w + (masks[name] * w - w).detach() for name, w in pruned.items()}
        if step == STEPS:
            break
        images, labels = make_batch(step)
        optimizer.zero_grad()
        F.cross_entropy(functional_call(model, {**weights, **sparse}, (images,)), labels).backward()
        optimizer.step()
    return {k: w.detach() for k, w in pruned.items()}, {k: w.detach() for k, w in sparse.items()}, model


every_optimizer = pytest.mark.parametrize(
    "make",
    [lambda m: make_sgd(m, lr=0.1), make_adam, lambda m: AdamW(m.parameters(), lr=0.003, weight_decay=0.1)],
    ids=["sgd", "adam", "adamw"],
)


@every_optimizer
@pytest.mark.parametrize(("pattern", "sparsity"), [(pm.Unstructured(), 0.9), (pm.Filter(), 0.5)])
def test_dpf_matches_straight_through_training(
    make: Callable[[nn.Module], Optimizer], pattern: Pattern, sparsity: float
) -> None:
    dense, sparse, reference = train_straight_through(make, sparsity, filters=pattern == pm.Filter())

    model = Net().double()
    optimizer = make(model)
    pruner = pm.DPF(sparsity=sparsity, pattern=pattern, every=EVERY, **PLAIN)
    pruner.attach(model, optimizer, total_steps=STEPS)
    returned = 0
    for step in range(STEPS):
        images, labels = make_batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        before = {k: m.clone() for k, m in pruner.masks().items()}
        optimizer.step()
        returned += sum(int((m & ~before[k]).sum()) for k, m in pruner.masks().items())

    assert returned > 0, "no pruned weight was kept again: the feedback is not tested"
    latents, weights = pruner.state_dict()["latents"], model.state_dict()
    assert latents.keys() == dense.keys()
    for name in dense:
        assert torch.equal(latents[name], dense[name])
        assert torch.equal(weights[name], sparse[name])
    pruner.finish()
    expected = reference.state_dict() | sparse
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())
