"""A small network, its training loop, and comparisons of states, shared by the tests of the engine and the methods."""

from __future__ import annotations

import gc
import io
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from pomona.compressors import Threshold


class Net(nn.Module):
    """Two convolutions, batch norm, a hidden and a last linear layer; the size of every row is a multiple of four."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv1 = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 12, 3, stride=2)
        self.hidden = nn.Linear(12, 16)
        self.head = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv1(x)))
        x = F.relu(self.conv2(x)).mean((2, 3))
        return self.head(F.relu(self.hidden(x)))


TARGETS = ("conv1.weight", "conv2.weight", "hidden.weight")


def make_batch(step: int, size: int = 6) -> tuple[Tensor, Tensor]:
    """Return the batch of a step, which is the same in every run."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(size, 4, 5, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(6, (size,), generator=generator)


def compute_loss(model: nn.Module, step: int) -> Tensor:
    """Return the loss on the batch of a step."""
    x, y = make_batch(step)
    return F.cross_entropy(model(x.to(next(model.parameters()).dtype)), y)


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    """Train with the loop of a user who knows nothing of the pruner."""
    for step in steps:
        optimizer.zero_grad()
        compute_loss(model, step).backward()
        optimizer.step()


def make_sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    """Return SGD with Nesterov momentum and weight decay."""
    return torch.optim.SGD(
        model.parameters(), **{"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-3, **options}
    )


def make_adam(model: nn.Module, **options: Any) -> torch.optim.Adam:
    """Return Adam with weight decay."""
    return torch.optim.Adam(model.parameters(), **{"lr": 0.01, "weight_decay": 5e-3, **options})


def attach_to_network(pruner: Any, total: int = 40, make: Any = make_sgd, seed: int = 0) -> tuple[Net, Optimizer, Any]:
    """Return a network in float64, its optimizer, and the pruner attached to both."""
    model = Net(seed).double()
    optimizer = make(model)
    pruner.attach(model, optimizer, total_steps=total)
    return model, optimizer, pruner


def save_and_load(state: Any) -> Any:
    """Return a state after it was saved and loaded with weights_only=True."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def is_identical(one: Any, other: Any) -> bool:
    """Return whether two nested states are equal to the last bit."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_identical(v, other[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_identical, one, other))
    return one == other


def obeys_masks(model: nn.Module, pruner: Any, grown: bool = False) -> bool:
    """Return whether pruned weights are zero, without −0.0, and kept weights are not zero.

    Kept weights may be zero with `grown=True`, since a weight that has just grown starts at zero, and under thresholds,
    since a kept weight may fall below the threshold of the last mask update.
    """
    grown = grown or isinstance(getattr(pruner.method, "compressor", None), Threshold)
    weights = dict(model.named_parameters())
    return all(
        not weights[name][~mask].any()
        and not weights[name][~mask].signbit().any()
        and (grown or bool(weights[name][mask].all()))
        for name, mask in pruner.masks().items()
    )


def count_hooks(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Return the number of hooks on each module, on each parameter and on the optimizer."""
    holders = {
        "optimizer": optimizer,
        **{f"module {name}": module for name, module in model.named_modules()},
        **{f"parameter {name}": parameter for name, parameter in model.named_parameters()},
    }
    names = {"_backward_hooks", "_post_accumulate_grad_hooks"}
    return {
        f"{holder}.{key}": len(getattr(value, key) or ())
        for holder, value in holders.items()
        for key in names | {k for k in vars(value) if k.endswith("hooks")}
        if hasattr(value, key)
    }


def count_global_hooks() -> int:
    """Return the number of global optimizer step hooks, after the hooks of deleted pruners are collected."""
    gc.collect()
    module = sys.modules[Optimizer.__module__]  # torch.optim.optimizer, a name that torch deletes
    return len(module._global_optimizer_pre_hooks) + len(module._global_optimizer_post_hooks)
