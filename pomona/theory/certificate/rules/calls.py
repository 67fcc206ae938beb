"""Calls of a step's operation on tensors of the caller's choice, and its transpose on rows of coefficients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..steps import Step, Value, Weight, is_reference
from .registry import unsupported


def call(step: Step, values: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return the step's operation on these values and weights, in the order of `step.inputs` and `step.weights`."""
    remaining = iter(values), iter(weights)

    def replace(leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return next(remaining[0])
        return next(remaining[1]) if isinstance(leaf, Weight) else leaf

    args, kwargs = tree_map(replace, (step.args, step.kwargs), is_leaf=is_reference)
    result = step.function(*args, **kwargs)
    return result if step.item is None else result[step.item]


def side_weights(step: Step, side: int) -> list[Tensor]:
    """Return the weights of a step in one network."""
    return [weight.of(side) for weight in step.weights]


def weight_differences(step: Step) -> list[Tensor]:
    """Return dense − pruned of each weight of a step; integers and truth values, which must be equal, as they are."""
    return [difference(step, weight) for weight in step.weights]


def difference(step: Step, weight: Weight) -> Tensor:
    """Return dense − pruned of a weight."""
    if weight.dense.is_floating_point():
        return weight.dense - weight.pruned
    if not torch.equal(weight.dense, weight.pruned):
        raise unsupported(step, f"'{weight.name}' differs between the networks")
    return weight.dense


def transpose(function: Callable[..., Tensor], inputs: Sequence[Tensor], rows: Tensor) -> tuple[Tensor, ...]:
    """Return the transpose of an affine function of tensors like `inputs`, applied to rows of coefficients."""
    pull_back = torch.func.vjp(function, *[torch.zeros_like(x) for x in inputs])[1]
    return torch.func.vmap(pull_back)(rows)
