"""Gradients of each example of a batch, by `vmap` of `grad`, and their sum by one backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from .batchable_ops import BatchableOps

Loss = Callable[[Tensor, Tensor], Tensor]
Gradients = dict[str, Tensor]


def compute_per_example_gradients(
    model: nn.Module, loss: Loss, parameters: Mapping[str, Tensor], inputs: Tensor, targets: Tensor, views: int = 1
) -> tuple[Gradients, Tensor]:
    """Return the gradients by parameter name, each of shape (rows, …), and the losses of shape (rows,).

    With several views the inputs are (rows, views, …), and the gradient of a row is the mean over its views.
    """

    def row_loss(weights: Mapping[str, Tensor], row: Tensor, target: Tensor) -> Tensor:
        batch = row if views > 1 else row[None]
        return loss(functional_call(model, dict(weights), (batch,)), target.expand(len(batch), *target.shape))

    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    with BatchableOps():
        return vmap(grad_and_value(row_loss), (None, 0, 0), randomness="different")(weights, inputs, targets)


def compute_summed_gradients(
    model: nn.Module, loss: Loss, parameters: Mapping[str, Tensor], inputs: Tensor, targets: Tensor, views: int = 1
) -> Gradients:
    """Return the sum of the per-example gradients by parameter name, by one ordinary backward pass."""
    if views > 1:
        inputs, targets = inputs.flatten(0, 1), targets.repeat_interleave(views, 0)
    mean = loss(model(inputs), targets)
    gradients = torch.autograd.grad(mean * (len(inputs) / views), list(parameters.values()), materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))
