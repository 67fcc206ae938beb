"""Pruners, optimizers and copies of state, shared by the tests of the engine."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from engine_helpers import compute_loss
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import pomona as pm

TOTAL = 40


def make_soft(**options: Any) -> pm.Pruner:
    """Return a pruner with soft weights that updates its masks every four steps."""
    return pm.DPF(**{"sparsity": 0.8, "every": 4, "schedule": "constant", **options})


def make_hard(**options: Any) -> pm.Pruner:
    """Return a pruner with hard weights that updates its masks every four steps."""
    return pm.Incremental(**{"sparsity": 0.8, "every": 4, "schedule": "constant", **options})


soft_and_hard = pytest.mark.parametrize("kind", [make_soft, make_hard])


@contextmanager
def ignore_warnings() -> Iterator[None]:
    """Ignore all warnings in a with-block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def copy_latents(pruner: pm.Pruner) -> dict[str, Tensor]:
    """Return a copy of the latents; hard methods have none."""
    return copy.deepcopy(pruner.state_dict()["latents"])


def copy_state(pruner: pm.Pruner) -> dict[str, Any]:
    """Return a copy of all tensors that a step changes, apart from the optimizer's."""
    return copy.deepcopy({"state": pruner.state_dict(), "model": pruner.model.state_dict()})


def make_closure(
    model: nn.Module, optimizer: Optimizer, step: int, seen: list[Any] | None = None
) -> Callable[[], Tensor]:
    """Return a closure that computes the loss of a step; `seen` collects the model's states at its calls."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = compute_loss(model, step)
        loss.backward()
        if seen is not None:
            seen.append(copy.deepcopy(model.state_dict()))
        return loss

    return closure


def make_factory(cls: type[Optimizer]) -> Callable[[nn.Module], Optimizer]:
    """Return a function that makes an optimizer of a class for a model."""
    return lambda model: cls(model.parameters(), lr=0.05, momentum=0.9)  # type: ignore[call-arg]


class DecaysAfterStep(SGD):
    """SGD that decays the weights after super().step()."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.999)
        return loss
