"""Measurement of a training run: the quantities that the convergence estimates take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ...core.pruner import Pruner
from ...errors import require
from .time_series import Array


class Trace:
    """The measurement of δ_t, ‖w_t‖, ‖g(w̃_t)‖ and γ_t at each step of a run.

        trace = convergence.Trace(optimizer, pruner)    # after pruner.attach
        ...                                             # the training loop, unchanged
        convergence.convex(**trace.measured, L=L, mu=mu)

    Without a pruner it follows plain SGD, where nothing is pruned before the end.
    """

    def __init__(self, optimizer: Optimizer, pruner: Pruner | None = None) -> None:
        wrong = [key for key in ("momentum", "weight_decay") if any(group.get(key) for group in optimizer.param_groups)]
        require(
            isinstance(optimizer, SGD) and not wrong,
            f"the theorems are about steps w − γ g, and {type(optimizer).__name__}"
            f"{f' with {wrong[0]}' if wrong else ''} makes others: use SGD alone, with any penalty in the loss.",
        )
        if pruner is not None:
            require(
                pruner.method.weights == "soft" and bool(pruner.slots),
                f"the theorems are about dense weights moved by gradients at pruned ones, and {pruner} has no such "
                "pair: attach DPF first, or leave the pruner out and give one_shot the model that it prunes.",
            )
        self.slots = pruner.slots + pruner.coupled if pruner else []
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.gammas: list[float] = []
        self.squares: dict[str, list[Tensor]] = {"removed": [], "dense": [], "gradient": []}
        self.handles = [
            optimizer.register_step_pre_hook(self.measure_weights),
            optimizer.register_step_post_hook(self.measure_gradients),
        ]

    @torch.no_grad()
    def measure_weights(self, optimizer: Optimizer, *_: Any) -> None:
        """Measure the weights before a step; of a pruned parameter the dense ones, whatever it holds at the moment."""
        dense = {id(slot.parameter): slot.dense for slot in self.slots}
        self.gammas.append(float(optimizer.param_groups[0]["lr"]))
        self.squares["removed"].append(sum_of_squares(slot.dense - slot.projected() for slot in self.slots))
        self.squares["dense"].append(sum_of_squares(dense.get(id(p), p) for p in self.parameters))

    @torch.no_grad()
    def measure_gradients(self, *_: Any) -> None:
        """Measure the gradients after a step, because a closure computes them only within it."""
        self.squares["gradient"].append(sum_of_squares(p.grad for p in self.parameters if p.grad is not None))

    def stop(self) -> None:
        """Remove the hooks from the optimizer."""
        for handle in self.handles:
            handle.remove()

    @property
    def measured(self) -> dict[str, Any]:
        """`delta`, `norm`, `G` and `T`, as the estimates take them."""
        require(bool(self.gammas), "the run has made no step since it is traced: train first.")
        removed, dense, gradient = (torch.stack(each).cpu().numpy() for each in self.squares.values())
        with np.errstate(invalid="ignore"):  # 0/0 where all weights are 0, and so is their error
            delta = np.nan_to_num(removed / dense)
        return {"delta": delta, "norm": np.sqrt(dense), "G": np.sqrt(gradient), "T": len(removed) - 1}

    @property
    def rates(self) -> Array:
        """γ_t of the run, to compare with `rates(mu, T)`."""
        return np.array(self.gammas)


def curvature(loss: Callable[[], Tensor], parameters: Iterable[Tensor], steps: int = 100, seed: int = 0) -> float:
    """Return the largest |eigenvalue| of the loss's Hessian at the current weights, by power iteration.

    It approaches the eigenvalue from below, and L is the largest over all weights of a run: this estimates L, and does
    not bound it.
    """
    weights = list(parameters)
    gradient = torch.autograd.grad(loss(), weights, create_graph=True)
    generator = torch.Generator().manual_seed(seed)
    v = [torch.randn(w.shape, generator=generator, dtype=w.dtype).to(w.device) for w in weights]
    eigenvalue = 0.0
    for _ in range(steps):
        size = math.sqrt(float(sum_of_squares(v)))
        if not size:  # the Hessian is zero
            break
        v = [x / size for x in v]
        v = list(torch.autograd.grad(gradient, weights, v, retain_graph=True, materialize_grads=True))
        eigenvalue = math.sqrt(float(sum_of_squares(v)))
    return eigenvalue


def sum_of_squares(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of all squared entries, in double precision and without waiting for the device."""
    parts = [tensor.detach().double().square().sum() for tensor in tensors]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)
