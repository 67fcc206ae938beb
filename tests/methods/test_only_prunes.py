"""Hard methods with `regrows = False` only prune: a pruned weight is never kept again, whatever `update` returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from slow_cases import slow_after
from torch import Tensor, nn

import pomona as pm
from pomona.core.method import Masks, Targets
from pomona.core.pruner import Pruner
from pomona.methods import METHODS, make_pruner
from pomona.methods.incremental import Incremental
from pomona.patterns import Pattern

TOTAL = 30
ONLY_PRUNING = [name for name in METHODS if METHODS[name].weights == "hard" and not METHODS[name].regrows]
PATTERNS = {
    "unstructured": pm.Unstructured(),
    "balanced": pm.Balanced(block=4),
    "nm": pm.NM(2, 4),
    "block": pm.Block((2, 2)),
    "kernel": pm.Kernel(),
    "filter": pm.Filter(),
    "filter of filters": pm.Filter(of="filters"),
}
every_pattern = pytest.mark.parametrize("pattern", PATTERNS.values(), ids=list(PATTERNS))


def make_network(seed: int) -> nn.Module:
    """Return a network whose layers have filters of 4, 24, 72 and 12 weights and kernels of 1, 4 and 9.

    The smallest filters come first: pruned filters rank in order of position, so that a pruned filter of 4 weights
    could make up for a large filter that was pruned.
    """
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(4, 6, 1),
        nn.ReLU(),
        nn.Conv2d(6, 8, 2),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 8),
        nn.ReLU(),
        nn.Linear(8, 4),
    )


class NestedMasks:
    """The masks of the last check, to which every following mask is compared."""

    def __init__(self, masks: dict[str, Tensor]) -> None:
        self.before = {name: mask.clone() for name, mask in masks.items()}

    def check(self, masks: dict[str, Tensor], moment: str) -> None:
        """Assert that no weight is kept that was pruned at the last check."""
        for name, mask in masks.items():
            revived = int((mask & ~self.before[name]).sum())
            assert not revived, f"{revived} pruned weights of {name} are kept again {moment}"
            self.before[name] = mask.clone()

    def count_pruned(self) -> int:
        """Return the number of pruned weights at the last check."""
        return sum(int((~mask).sum()) for mask in self.before.values())


def train_and_check(model: nn.Module, pruner: pm.Pruner, seed: int, nested: NestedMasks | None = None) -> NestedMasks:
    """Train with large random gradients and check after every step and after `finish` that masks are nested.

    Some kept weights are set to zero before each step, so that they rank no higher than the pruned ones.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner.attach(model, optimizer, total_steps=TOTAL)
    if nested is None:
        nested = NestedMasks(pruner.masks())
    nested.check(pruner.masks(), "at attach")
    for step in range(TOTAL):
        with torch.no_grad():
            for name in nested.before:
                parameter = model.get_parameter(name)
                parameter *= torch.rand(parameter.shape, generator=generator) > 0.3
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 5
        optimizer.step()
        nested.check(pruner.masks(), f"after step {step + 1}")
    pruner.finish()
    nested.check(pruner.masks(), "after finish")
    return nested


def make_options(name: str, pattern: Pattern, allocation: str) -> dict[str, Any]:
    """Return options for many mask updates in a short training; options that the method lacks are left out."""
    options = {
        "sparsity": 0.8 if pattern.sparsity is None else None,
        "pattern": pattern,
        "allocation": allocation,
        "every": 1,
        "at": 0.5,
        "retrainings": 3,
    }
    known = {f.name for f in fields(METHODS[name]) if f.init}
    return {key: value for key, value in options.items() if key in known}


def test_the_methods_that_only_prune() -> None:
    assert ONLY_PRUNING == ["finetune", "incremental", "lottery", "oneshot", "random", "snip"]


@every_pattern
@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("seed", slow_after(1, range(3)))
@pytest.mark.parametrize("name", ONLY_PRUNING)
def test_masks_are_nested_over_training(name: str, pattern: Pattern, allocation: str, seed: int) -> None:
    model = make_network(seed)
    if name == "finetune":  # it keeps the zeros that it finds
        with torch.no_grad():
            model[0].weight[::2] = 0
    pruner = make_pruner({"name": name, **make_options(name, pattern, allocation)})
    if name == "lottery":
        nested: NestedMasks | None = None

        def train_round(model: nn.Module, pruner: pm.Pruner, index: int) -> None:
            nonlocal nested
            nested = train_and_check(model, pruner, seed + index, nested)

        pruner.rounds(model, train_round)
    else:
        nested = train_and_check(model, pruner, seed)
    assert nested is not None
    assert nested.count_pruned() > 0, "nothing was pruned"


# ---- methods whose `update` tries to revive pruned weights


def count_revived(targets: Targets, masks: Masks) -> None:
    """Add the number of pruned weights that an update keeps again to the method's memory."""
    revived = sum(int((mask & ~targets.masks[name]).sum()) for name, mask in masks.items())
    targets.memory["revived"] = targets.memory.get("revived", 0) + revived


@dataclass(frozen=True, kw_only=True)
class RandomMasks(Incremental):
    """Gradual pruning that draws new random masks at every update, without `select`."""

    def update(self, targets: Targets, sparsity: float) -> Masks:
        """Return random masks, drawn from the global generator that `make_network` seeds."""
        masks = {name: torch.rand(mask.shape) >= sparsity for name, mask in targets.masks.items()}
        count_revived(targets, masks)
        return masks


def score_by_lamp(weight: Tensor) -> Tensor:
    """Return the LAMP score of every entry of a weight (Lee et al., 2021, equation 4)."""
    square = weight.flatten().square()
    order = square.argsort(descending=True, stable=True)
    score = square.clone()
    score[order] = square[order] / square[order].cumsum(0)
    return score.view_as(weight).nan_to_num()


@dataclass(frozen=True, kw_only=True)
class Lamp(Incremental):
    """Gradual pruning by layer-adaptive magnitude."""

    def update(self, targets: Targets, sparsity: float) -> Masks:
        """Return the masks of the highest LAMP scores."""
        scores = {name: score_by_lamp(weight) for name, weight in targets.latent.items()}
        masks = self.select(targets, scores, sparsity)
        count_revived(targets, masks)
        return masks


def count_attempts(make: Callable[..., Incremental], seed: int, pattern: Pattern) -> int:
    """Train with nested masks and return how many pruned weights the method tried to keep again."""
    pruner = Pruner(make(sparsity=0.8, every=1, pattern=pattern, allocation="global", schedule=pm.Linear(until=1.0)))
    train_and_check(make_network(seed), pruner, seed)
    return pruner.memory["revived"]


@pytest.mark.parametrize("seed", range(3))
def test_random_masks_cannot_revive_weights(seed: int) -> None:
    assert count_attempts(RandomMasks, seed, pm.Unstructured()) > 0, "the method did not try"


def test_lamp_cannot_revive_filters_of_different_sizes() -> None:
    attempts = [count_attempts(Lamp, seed, pm.Filter()) for seed in range(30)]
    assert any(attempts), "no update selected a pruned filter"
