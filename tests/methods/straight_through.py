"""A reference of training with straight-through thresholds, written with plain tensors and no pruner."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from engine_helpers import TARGETS, Net, compute_loss, make_sgd
from torch import Tensor

Shrink = Callable[[Tensor, Tensor, float], Tensor]  # weights, mask, threshold → what the model runs on


def cubic_sparsity(step: int, total: int, final: float, until: float) -> float:
    """Return the sparsity of Zhu & Gupta (2017) after a step."""
    return final * (1 - (1 - min(step / (until * total), 1.0)) ** 3)


def prune_globally(weights: dict[str, Tensor], sparsity: float) -> dict[str, Tensor]:
    """Return masks without the smallest magnitudes of all tensors; of equal ones the later is pruned."""
    magnitudes = np.concatenate([w.abs().numpy().ravel() for w in weights.values()])
    order = np.argsort(-magnitudes, kind="stable")
    kept = np.zeros(len(order), dtype=bool)
    kept[order[: len(order) - round(sparsity * len(order))]] = True
    parts = np.split(kept, np.cumsum([w.numel() for w in weights.values()])[:-1])
    return {name: torch.from_numpy(part).view(w.shape) for (name, w), part in zip(weights.items(), parts, strict=True)}


def train_reference(shrink: Shrink, final: float, until: float, total: int, theta: float = 1.0) -> Net:
    """Train dense weights by gradients taken at the shrunk ones; those of pruned weights are scaled by theta."""
    model = Net().double()
    optimizer = make_sgd(model)
    parameters = {name: model.get_parameter(name) for name in TARGETS}
    dense = {name: p.detach().clone() for name, p in parameters.items()}
    masks = {name: torch.ones_like(w, dtype=torch.bool) for name, w in dense.items()}

    current = {name: w.clone() for name, w in dense.items()}  # what the model runs on
    for step in range(1, total + 1):
        set_values(parameters, current)
        optimizer.zero_grad()
        compute_loss(model, step - 1).backward()
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(dense[name])
                p.grad = torch.where(masks[name], p.grad, theta * p.grad)
        optimizer.step()
        dense = {name: p.detach().clone() for name, p in parameters.items()}
        masks = prune_globally(dense, final if step == total else cubic_sparsity(step, total, final, until))
        for name, w in dense.items():
            pruned = w.abs()[~masks[name]]
            current[name] = shrink(w, masks[name], float(pruned.max()) if len(pruned) else 0.0)
    set_values(parameters, current)
    return model


@torch.no_grad()
def set_values(parameters: dict[str, torch.nn.Parameter], values: dict[str, Tensor]) -> None:
    """Write values into parameters."""
    for name, parameter in parameters.items():
        parameter.copy_(values[name])
