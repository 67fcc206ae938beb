"""DPF against a straight-through reference that shares no code with it, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kit import TARGETS, Net, adam, batch, sgd
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

import pomona as pm

STEPS, EVERY, SPARSITY = 200, 16, 0.9


def ranked(weights: dict[str, Tensor], sparsity: float, filters: bool) -> dict[str, Tensor]:
    """Keep the largest weights, or filters by L2 norm: a full sort, a prefix nearest to the count asked for."""
    units = [
        ((row.square().sum().sqrt() if filters else row).abs().item(), row.numel(), name, i)
        for name, w in weights.items()
        for i, row in enumerate(w.flatten(1) if filters else w.flatten())
    ]
    units.sort(key=lambda unit: -unit[0])
    total = sum(size for _, size, _, _ in units)
    wanted, have, prefix = total - round(sparsity * total), 0, 0
    while prefix < len(units) and abs(have + units[prefix][1] - wanted) < abs(have - wanted):
        have, prefix = have + units[prefix][1], prefix + 1
    masks = {name: torch.zeros(len(w) if filters else w.numel(), dtype=torch.float64) for name, w in weights.items()}
    for _, _, name, i in units[:prefix]:
        masks[name][i] = 1.0
    return {
        name: (masks[name].view(-1, *[1] * (w.ndim - 1)) if filters else masks[name].view(w.shape)).expand(w.shape)
        for name, w in weights.items()
    }


def reference(make: Callable[[nn.Module], Optimizer], filters: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], Net]:
    """The dense weights, the sparse ones and the model after training by straight-through autograd."""
    model = Net().double()
    optimizer = make(model)
    weights = dict(model.named_parameters())
    pruned = {name: weights[name] for name in TARGETS}
    masks: dict[str, Tensor] = {}
    for step in range(STEPS + 1):
        if step % EVERY == 0 and step <= 0.9 * STEPS:
            x = min(step / (0.75 * STEPS), 1.0)
            masks = ranked({k: w.detach() for k, w in pruned.items()}, SPARSITY * (1 - (1 - x) ** 3), filters)
        sparse = {name: w + (masks[name] * w - w).detach() for name, w in pruned.items()}
        if step == STEPS:
            break
        images, labels = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(functional_call(model, {**weights, **sparse}, (images,)), labels).backward()
        optimizer.step()
    return {k: w.detach() for k, w in pruned.items()}, {k: w.detach() for k, w in sparse.items()}, model


@pytest.mark.parametrize("pattern", [pm.Unstructured(), pm.Filter()], ids=["unstructured", "filter"])
@pytest.mark.parametrize(
    "make", [sgd, adam, lambda m: AdamW(m.parameters(), lr=0.01, weight_decay=0.1)], ids=["sgd", "adam", "adamw"]
)
def test_dpf_is_straight_through_training(make: Callable[[nn.Module], Optimizer], pattern: pm.Unstructured) -> None:
    dense, sparse, theirs = reference(make, filters=isinstance(pattern, pm.Filter))

    ours = Net().double()
    optimizer = make(ours)
    pruner = pm.DPF(sparsity=SPARSITY, pattern=pattern, every=EVERY).attach(ours, optimizer, total_steps=STEPS)
    changes = 0
    for step in range(STEPS):
        images, labels = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(ours(images), labels).backward()
        before = {k: m.clone() for k, m in pruner.masks().items()}
        optimizer.step()
        changes += any((m & ~before[k]).any() for k, m in pruner.masks().items())

    assert changes > 0 or pattern == pm.Filter(), "no weight ever came back: the feedback was not tried"
    latent = pruner.state_dict()["latents"]
    weights = dict(ours.named_parameters())
    for name in TARGETS:
        assert torch.equal(latent[name], dense[name])
        assert torch.equal(weights[name], sparse[name])
    pruner.finish()
    others = {k: v for k, v in theirs.state_dict().items() if k not in TARGETS}
    assert all(torch.equal(ours.state_dict()[k], v) for k, v in others.items())
    assert all(torch.equal(weights[name], sparse[name]) for name in TARGETS)
