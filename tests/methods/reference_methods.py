"""A network with given weights and a reference training loop without pomona, shared by the tests of the methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from engine_helpers import Net, compute_loss, make_sgd
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from pomona import scores

Array = NDArray[Any]
Masks = dict[str, Array]


class LinearStack(nn.Module):
    """Linear layers a, b, … with the given weights, and a last layer."""

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


def make_linear_loss(model: LinearStack, **gradients: list[list[float]]) -> Tensor:
    """Return a loss whose gradients are the given ones for all values of the weights."""
    return sum((model.get_submodule(k).weight * torch.tensor(g)).sum() for k, g in gradients.items())  # type: ignore[misc,operator]


def step_with_gradients(model: LinearStack, optimizer: Optimizer, **gradients: list[list[float]]) -> None:
    """Take one optimizer step with the given gradients."""
    optimizer.zero_grad()
    make_linear_loss(model, **gradients).backward()
    optimizer.step()


def make_zero_lr_sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    """Return SGD that accumulates momentum and leaves the weights unchanged."""
    return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, **options)


def get_mask_rows(pruner: Any, name: str = "a") -> list[list[int]]:
    """Return the mask of a layer as rows of 0 and 1."""
    return pruner.masks()[f"{name}.weight"].int().tolist()


def get_weight_rows(model: nn.Module, name: str = "a") -> list[list[float]]:
    """Return the weights of a layer as rows."""
    return model.get_parameter(f"{name}.weight").tolist()


# ---- selection


def keep_largest(score: Array, count: int) -> Array:
    """Return a mask of the `count` largest entries; ties go to the earlier entry."""
    order = np.argsort(-score.ravel(), kind="stable")
    mask = np.zeros(score.size, dtype=bool)
    mask[order[:count]] = True
    return mask.reshape(score.shape)


def keep_largest_globally(scores: Masks, count: int) -> Masks:
    """Return masks of the `count` largest entries of several arrays together; ties go to the earlier entry."""
    flat = keep_largest(np.concatenate([s.ravel() for s in scores.values()]), count)
    ends = np.cumsum([s.size for s in scores.values()])[:-1]
    return {n: m.reshape(s.shape) for (n, s), m in zip(scores.items(), np.split(flat, ends), strict=True)}


def draw_random_scores(weights: Mapping[str, Array], seed: int) -> Masks:
    """Return pomona's random scores; what a method does with them is computed without pomona."""
    return {
        n: s.numpy()
        for n, s in scores.random_scores({n: torch.from_numpy(w) for n, w in weights.items()}, seed).items()
    }


def draw_random_masks(model: nn.Module, names: Iterable[str], seed: int, sparsity: float) -> Masks:
    """Return random masks of the same sparsity in each layer."""
    drawn = draw_random_scores({name: view_weight(model, name) for name in names}, seed)
    return {name: keep_largest(s, s.size - round(sparsity * s.size)) for name, s in drawn.items()}


def view_weight(model: nn.Module, name: str) -> Array:
    """Return a NumPy view of a weight, which shares its memory."""
    return model.get_parameter(name).detach().numpy()


# ---- training without the package


class ReferenceTraining:
    """Plain torch training of `engine_helpers.Net` under masks, step by step as the authors of the methods do it.

    An update is called as `update(reference, t)`; it changes `masks` and, where needed, the weights.
    """

    def __init__(self, make: Callable[..., Optimizer] = make_sgd, dense_momentum: bool = False) -> None:
        self.model = Net().double()
        self.optimizer = make(self.model)
        self.dense_momentum = dense_momentum
        self.masks: Masks = {}

    def weight(self, name: str) -> Array:
        """Return a view of a weight."""
        return view_weight(self.model, name)

    def gradient(self, name: str) -> Array:
        """Return a view of the gradient of a weight."""
        return self.model.get_parameter(name).grad.numpy()  # type: ignore[union-attr]

    def optimizer_state(self, name: str) -> list[Array]:
        """Return views of the optimizer state of a weight that has its shape."""
        parameter = self.model.get_parameter(name)
        state = self.optimizer.state.get(parameter, {}).values()
        return [v.numpy() for v in state if isinstance(v, Tensor) and v.shape == parameter.shape]

    def apply_masks(self) -> None:
        """Set pruned weights and their optimizer state to zero."""
        for name, mask in self.masks.items():
            self.weight(name)[~mask] = 0
            for state in self.optimizer_state(name) if not self.dense_momentum else ():
                state[~mask] = 0

    def run(
        self,
        steps: int,
        update: Callable[[ReferenceTraining, int], None],
        due: Callable[[int], bool],
        replaces: bool = False,
    ) -> Iterator[Masks]:
        """Train and yield the masks after each step; an update follows step t, or replaces step t + 1."""
        self.apply_masks()
        for t in range(steps):
            self.optimizer.zero_grad()
            compute_loss(self.model, t).backward()
            if replaces and due(t):
                update(self, t)
            else:
                for name, mask in self.masks.items() if not self.dense_momentum else ():
                    self.gradient(name)[~mask] = 0
                self.optimizer.step()
                self.apply_masks()
                if not replaces and due(t + 1):
                    update(self, t + 1)
            self.apply_masks()
            yield {name: mask.copy() for name, mask in self.masks.items()}


def has_masks(pruner: Any, masks: Masks) -> bool:
    """Return whether the masks of a pruner are exactly the given ones."""
    actual = pruner.masks()
    return actual.keys() == masks.keys() and all(np.array_equal(actual[n].numpy(), m) for n, m in masks.items())


def train_beside_reference(pruner: Any, reference: ReferenceTraining, steps: Iterator[Masks]) -> int:
    """Train a pruner's model beside a reference and return the number of mask updates.

    Assert that the masks are equal after every step and the weights at the end, to the last bit.
    """
    model = pruner.model
    optimizer = pruner.optimizers[0]
    for t, masks in enumerate(steps):
        optimizer.zero_grad()
        compute_loss(model, t).backward()
        optimizer.step()
        assert has_masks(pruner, masks), f"the masks differ after step {t + 1}"
    expected = dict(reference.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), f"{name} differs from the reference"
    return len([entry for entry in pruner.history if entry["step"]])
