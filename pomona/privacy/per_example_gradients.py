"""Gradients of each example, by `vmap` of `grad` or one after another, and their sum by one backward pass."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils import _pytree as pytree

from ..errors import PomonaError
from .batchable_ops import BatchableOps
from .example_batches import Batch, call_model, map_tensors, model_arguments

Loss = Callable[[Any, Any], Tensor]
Gradients = dict[str, Tensor]


def compute_per_example_gradients(
    model: nn.Module, loss: Loss, parameters: Mapping[str, Tensor], inputs: Batch, targets: Batch, views: int = 1
) -> tuple[Gradients, Tensor]:
    """Return the gradients by parameter name, each of shape (rows, …), and the losses of shape (rows,).

    With several views the inputs are (rows, views, …), and the gradient of a row is the mean over its views.
    """

    def row_loss(weights: Mapping[str, Tensor], row: Batch, target: Batch) -> Tensor:
        batch, targets = as_small_batch(row, target, views)
        arguments, named = model_arguments(batch)
        return loss(functional_call(model, dict(weights), arguments, named), targets)

    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    with BatchableOps():
        return vmap(grad_and_value(row_loss), (None, 0, 0), randomness="different")(weights, inputs, targets)


def compute_gradients_one_by_one(
    model: nn.Module, loss: Loss, parameters: Mapping[str, Tensor], inputs: Batch, targets: Batch, views: int = 1
) -> tuple[Gradients, Tensor]:
    """Return the same as `compute_per_example_gradients` by a backward pass for each row, which any model allows.

    Gradients that parameters of the model have are cleared.
    """
    rows, losses = [], []
    for k in range(len(pytree.tree_leaves(targets)[0])):
        row, target = map_tensors(
            lambda part, k=k: part[k].detach().requires_grad_(part.requires_grad),  # type: ignore[misc]
            (inputs, targets),
        )
        batch, small_targets = as_small_batch(row, target, views)
        value = loss(call_model(model, batch), small_targets)
        model.zero_grad()
        value.backward()  # and not autograd.grad, which passes over activation checkpoints of the older kind
        rows.append([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters.values()])
        losses.append(value.detach())
    model.zero_grad()
    stacked = [torch.stack(parts) for parts in zip(*rows, strict=True)]
    return dict(zip(parameters, stacked, strict=True)), torch.stack(losses)


def as_small_batch(row: Batch, target: Batch, views: int) -> tuple[Batch, Batch]:
    """Return a row and its target as a batch of one, or of the row's views."""
    batch = row if views > 1 else map_tensors(lambda part: part[None], row)
    return batch, map_tensors(lambda part: part.expand(views, *part.shape), target)


def compute_summed_gradients(
    model: nn.Module, loss: Loss, parameters: Mapping[str, Tensor], inputs: Batch, targets: Batch, views: int = 1
) -> Gradients:
    """Return the sum of the per-example gradients by parameter name, by one ordinary backward pass."""
    if views > 1:
        inputs = map_tensors(lambda part: part.flatten(0, 1), inputs)
        targets = map_tensors(lambda part: part.repeat_interleave(views, 0), targets)
    mean = loss(call_model(model, inputs), targets)
    rows = len(pytree.tree_leaves(targets)[0]) / views
    gradients = torch.autograd.grad(mean * rows, list(parameters.values()), materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))


def forked_random_state(device: torch.device) -> AbstractContextManager[None]:
    """Return a context after which torch's generators are as they were."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def choose_gradients(
    model: nn.Module, loss: Loss, parameters: Mapping[str, Tensor], inputs: Batch, targets: Batch, views: int
) -> Callable[..., tuple[Gradients, Tensor]]:
    """Return the function that computes the gradients of a model: batched over examples if the model allows it.

    It is tried on the first row, and draws none of the random numbers of the step.
    """
    inputs, targets = map_tensors(operator.itemgetter(slice(1)), (inputs, targets))
    arguments = model, loss, parameters, inputs, targets, views
    try:
        with forked_random_state(next(iter(parameters.values())).device), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*performance drop")  # by torch, before it fails
            compute_per_example_gradients(*arguments)
        return compute_per_example_gradients
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        try:
            with forked_random_state(next(iter(parameters.values())).device):
                compute_gradients_one_by_one(*arguments)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as second:
            reason = str(second).strip().split("\n")[0]
            raise PomonaError(
                f"the gradients of single examples of {type(model).__name__} cannot be computed ({reason}): change the "
                "part that needs a whole batch."
            ) from second
        reason = str(error).strip().split("\n")[0]
        warnings.warn(
            f"{type(model).__name__} is trained one example at a time, which is slow, because it cannot be batched "
            f"over examples ({reason}).",
            stacklevel=2,
        )
        return compute_gradients_one_by_one
