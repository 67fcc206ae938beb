"""https://github.com/TimDettmers/sparse_learning/issues/22: the final sparsity is smaller than the preset one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from engine_helpers import TARGETS, attach_to_network, train
from torch import Tensor

import pomona as pm
from pomona.core.method import Targets
from pomona.methods.rigl import RigL
from pomona.methods.sparse_momentum import SparseMomentum

KEPT = 0.1


@dataclass(frozen=True, kw_only=True)
class SmallestGradient(RigL):
    """RigL that grows where the gradient is smallest, as the user's ablation did with momentum."""

    def growth_score(self, name: str, targets: Targets) -> Tensor:
        return -targets.grads[name].abs()


@dataclass(frozen=True, kw_only=True)
class SmallestMomentum(SparseMomentum):
    """Sparse momentum that grows where the momentum is smallest: the ablation of the complaint."""

    def update(self, targets: Targets, sparsity: float) -> dict[str, Tensor]:
        for momentum in targets.momentum.values():
            momentum.copy_(momentum.abs().add(1e-12).reciprocal())
        return super().update(targets, sparsity)


@pytest.mark.parametrize(
    "pruner",
    [
        lambda: pm.SparseMomentum(sparsity=0.9, every=2, include=list(TARGETS)),
        lambda: pm.Pruner(SmallestMomentum(sparsity=0.9, every=2, include=TARGETS)),
        lambda: pm.Pruner(SmallestGradient(sparsity=0.9, every=2, until=1.0, include=TARGETS)),
        lambda: pm.SET(sparsity=0.9, every=2, include=list(TARGETS)),
        lambda: pm.DSR(sparsity=0.9, every=2, threshold=0.05, include=list(TARGETS)),
    ],
    ids=["sparse momentum", "smallest momentum", "smallest gradient", "set", "dsr"],
)
def test_the_number_of_weights_is_exact_at_every_update(pruner) -> None:
    """Growth counted entries that were kept already, and the density fell from 0.1 to 0.073."""
    model, optimizer, pruner = attach_to_network(pruner(), total=16)
    masks = pruner.masks()
    expected = sum(int(mask.sum()) for mask in masks.values())
    total = sum(mask.numel() for mask in masks.values())
    assert abs(expected - KEPT * total) <= len(TARGETS)  # where each layer has a count, each of them is rounded
    changed = 0
    for step in range(16):
        previous = {name: mask.clone() for name, mask in pruner.masks().items()}
        train(model, optimizer, [step])
        assert sum(int(mask.sum()) for mask in pruner.masks().values()) == expected
        changed += any(bool((mask != previous[name]).any()) for name, mask in pruner.masks().items())
    assert changed > 1
    pruner.finish()
    assert sum(int(torch.count_nonzero(model.get_parameter(name))) for name in TARGETS) <= expected
