"""Gradients of each example, by `vmap` of `grad` or one after another, and their sum by one backward pass.

`choose_gradients` chooses between these and `recorded_gradients`.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils import _pytree as pytree

from ..errors import PomonaError, require
from .batchable_ops import BatchableOps
from .example_batches import Batch, call_model, map_tensors, model_arguments, pad_rows
from .model_state import copy_model
from .outer_products import Gradients, MixedGradients
from .recorded_gradients import Loss, compute_recorded_gradients, compute_recorded_products

RELATIVE_ERROR = 1e-2  # of recorded gradients; those that are wrong differ by far more
MODEL_ERRORS = (RuntimeError, ValueError, TypeError, NotImplementedError)  # of models that cannot be batched


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
        rows.append([torch.zeros_like(p) if p.grad is None else as_dense(p.grad) for p in parameters.values()])
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
    return dict(zip(parameters, map(as_dense, gradients), strict=True))


def as_dense(gradient: Tensor) -> Tensor:
    """Return a gradient, which embeddings with sparse=True have as a sparse tensor, as a dense one."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def forked_random_state(device: torch.device) -> AbstractContextManager[None]:
    """Return a context after which torch's generators are as they were."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def choose_gradients(
    model: nn.Module,
    loss: Loss,
    parameters: Mapping[str, Tensor],
    inputs: Batch,
    targets: Batch,
    views: int,
    dtype: torch.dtype | None = None,
    *,
    products: bool = False,
) -> Callable[..., tuple[MixedGradients, Tensor]]:
    """Return the function that computes the gradients of a model: the first that the model allows of three.

    They are recorded layer by layer, with `products` as outer products where these cost less, or batched over examples
    by `vmap`, or computed one example at a time. With a `dtype` they are recorded. They are tried on the first row, and
    draw none of the random numbers of a step.
    """
    inputs, targets = map_tensors(operator.itemgetter(slice(1)), (inputs, targets))
    arguments = model, loss, parameters, inputs, targets, views
    obstacle = recording_obstacle(*arguments)
    if obstacle is None:
        return partial(compute_recorded_products if products else compute_recorded_gradients, dtype=dtype)
    require(
        dtype is None,
        f'{type(model).__name__} cannot be trained with precision="bfloat16" ({obstacle}): leave the precision out.',
    )
    device = next(iter(parameters.values())).device
    try:
        with forked_random_state(device), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*performance drop")  # by torch, before it fails
            compute_per_example_gradients(*arguments)
        return compute_per_example_gradients
    except torch.OutOfMemoryError:
        raise
    except MODEL_ERRORS as error:
        try:
            with forked_random_state(device):
                compute_gradients_one_by_one(*arguments)
        except MODEL_ERRORS as second:
            raise PomonaError(
                f"the gradients of single examples of {type(model).__name__} cannot be computed ({describe(second)}): "
                "change the part that needs a whole batch."
            ) from second
        warnings.warn(
            f"{type(model).__name__} is trained one example at a time, which is slow, because it cannot be batched "
            f"over examples ({describe(error)}).",
            stacklevel=2,
        )
        return compute_gradients_one_by_one


def recording_obstacle(
    model: nn.Module, loss: Loss, parameters: Mapping[str, Tensor], inputs: Batch, targets: Batch, views: int
) -> str | None:
    """Return why `compute_recorded_gradients` cannot be used for a model, or None if it can.

    On a copy in evaluation mode, where nothing is random, its gradients of a row and of a row of zeros are compared
    with those of a backward pass for each.
    """
    trial = copy_model(model).eval()
    own = {name: parameter for name, parameter in trial.named_parameters() if name in parameters}
    inputs, targets = pad_rows((inputs, targets), 2)
    try:
        with forked_random_state(next(iter(own.values())).device):
            found, _ = compute_recorded_gradients(trial, loss, own, inputs, targets, views)
            expected, _ = compute_gradients_one_by_one(trial, loss, own, inputs, targets, views)
    except torch.OutOfMemoryError:
        raise
    except MODEL_ERRORS as error:
        return describe(error)
    difference = sum(float((found[name] - expected[name]).double().square().sum()) for name in own) ** 0.5
    size = sum(float(part.double().square().sum()) for part in expected.values()) ** 0.5
    is_equal = difference <= RELATIVE_ERROR * size or not math.isfinite(size)
    return None if is_equal else f"its recorded gradients differ by {difference:.1g}"


def describe(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().split("\n")[0]
