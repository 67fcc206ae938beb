"""What the tests of the baselines share: a network to prune on paper, and selection apart from the package's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from kit import Net, loss_at, sgd
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from pomona import scores

Array = NDArray[Any]
Masks = dict[str, Array]


class Tiny(nn.Module):
    """Linear layers a, b, … with the weights that are given, and a head."""

    def __init__(self, **weights: list[list[float]]) -> None:
        super().__init__()
        for name, rows in weights.items():
            layer = nn.Linear(len(rows[0]), len(rows), bias=False, dtype=torch.float64)
            layer.weight.data.copy_(torch.tensor(rows))
            self.add_module(name, layer)
        self.head = nn.Linear(1, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def pull(model: Tiny, **gradients: list[list[float]]) -> Tensor:
    """A loss whose gradient is the one given, whatever the weights are."""
    return sum((model.get_submodule(k).weight * torch.tensor(g)).sum() for k, g in gradients.items())  # type: ignore[misc,operator]


def step(model: Tiny, optimizer: Optimizer, **gradients: list[list[float]]) -> None:
    """One step of the user's loop under these gradients."""
    optimizer.zero_grad()
    pull(model, **gradients).backward()
    optimizer.step()


def still(model: nn.Module, **options: Any) -> torch.optim.SGD:
    """An optimizer that moves nothing but its momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, **options)


def bits(pruner: Any, name: str = "a") -> list[list[int]]:
    """A layer's mask as it is written on paper."""
    return pruner.masks()[f"{name}.weight"].int().tolist()


def values(model: nn.Module, name: str = "a") -> list[list[float]]:
    return model.get_parameter(f"{name}.weight").tolist()


# ---- selection


def largest(score: Array, count: int) -> Array:
    """True for the `count` largest entries; of equal ones the earlier."""
    order = np.argsort(-score.ravel(), kind="stable")
    mask = np.zeros(score.size, dtype=bool)
    mask[order[:count]] = True
    return mask.reshape(score.shape)


def largest_of_all(parts: Masks, count: int) -> Masks:
    """The same over several tensors at once."""
    flat = largest(np.concatenate([s.ravel() for s in parts.values()]), count)
    ends = np.cumsum([s.size for s in parts.values()])[:-1]
    return {n: m.reshape(s.shape) for (n, s), m in zip(parts.items(), np.split(flat, ends), strict=True)}


def draws(weights: Mapping[str, Array], seed: int) -> Masks:
    """The package's random scores, which are its own business; what is made of them is not."""
    return {
        n: s.numpy()
        for n, s in scores.random_scores({n: torch.from_numpy(w) for n, w in weights.items()}, seed).items()
    }


def started(model: nn.Module, names: Iterable[str], seed: int, sparsity: float) -> Masks:
    """Random masks, each layer as sparse."""
    drawn = draws({name: weight(model, name) for name in names}, seed)
    return {name: largest(s, s.size - round(sparsity * s.size)) for name, s in drawn.items()}


def weight(model: nn.Module, name: str) -> Array:
    """A view of a weight, not a copy."""
    return model.get_parameter(name).detach().numpy()


# ---- training without the package


class Reference:
    """Plain torch training of `kit.Net` under masks that this file applies, step for step as the authors do.

    An update is called as `update(reference, t)` and changes `masks` (and weights) itself.
    """

    def __init__(self, make: Callable[..., Optimizer] = sgd, dense_momentum: bool = False) -> None:
        self.model = Net().double()
        self.optimizer = make(self.model)
        self.dense_momentum = dense_momentum
        self.masks: Masks = {}

    def weight(self, name: str) -> Array:
        return weight(self.model, name)

    def gradient(self, name: str) -> Array:
        return self.model.get_parameter(name).grad.numpy()  # type: ignore[union-attr]

    def states(self, name: str) -> list[Array]:
        """All that the optimizer remembers of each weight."""
        parameter = self.model.get_parameter(name)
        kept = self.optimizer.state.get(parameter, {}).values()
        return [v.numpy() for v in kept if isinstance(v, Tensor) and v.shape == parameter.shape]

    def cut(self) -> None:
        for name, mask in self.masks.items():
            self.weight(name)[~mask] = 0
            for state in self.states(name) if not self.dense_momentum else ():
                state[~mask] = 0

    def run(
        self,
        steps: int,
        update: Callable[[Reference, int], None],
        due: Callable[[int], bool],
        replaces: bool = False,
    ) -> Iterator[Masks]:
        """Train, and yield the masks in force after each step. An update after step t, or in place of step t + 1."""
        self.cut()
        for t in range(steps):
            self.optimizer.zero_grad()
            loss_at(self.model, t).backward()
            if replaces and due(t):
                update(self, t)
            else:
                for name, mask in self.masks.items() if not self.dense_momentum else ():
                    self.gradient(name)[~mask] = 0
                self.optimizer.step()
                self.cut()
                if not replaces and due(t + 1):
                    update(self, t + 1)
            self.cut()
            yield {name: mask.copy() for name, mask in self.masks.items()}


def agrees(pruner: Any, masks: Masks) -> bool:
    """Whether ours are exactly those masks."""
    ours = pruner.masks()
    return ours.keys() == masks.keys() and all(np.array_equal(ours[n].numpy(), m) for n, m in masks.items())


def follow(pruner: Any, reference: Reference, steps: Iterator[Masks]) -> int:
    """Train ours beside a reference; masks are equal after every step, weights to the last bit. Counts the updates."""
    model = pruner.model
    optimizer = pruner.optimizers[0]
    for t, masks in enumerate(steps):
        optimizer.zero_grad()
        loss_at(model, t).backward()
        optimizer.step()
        assert agrees(pruner, masks), f"the masks differ after step {t + 1}"
    theirs = dict(reference.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, theirs[name]), f"{name} was trained otherwise"
    return len([record for record in pruner.history if record["step"]])
