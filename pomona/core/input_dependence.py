"""Whether the outputs of a pruned model depend on its input, by running it where its forward cannot be traced."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .batch_norm import preserve_modes, run_inputs, select_inputs
from .tracing import cached_trace


def keep_first_batch(model: nn.Module, batches: Iterator[Any]) -> tuple[list[Any], Iterator[Any]]:
    """Return the first batch in a list, and all batches; an empty list where a traced forward makes it superfluous."""
    first = [] if cached_trace(model) is not None else list(itertools.islice(batches, 1))
    return first, itertools.chain(first, batches)


def warn_about_constant_outputs(model: nn.Module, batch: Any, stacklevel: int) -> None:
    """Warn if the model's outputs are the same for both halves of a batch."""
    if has_constant_outputs(model, batch):
        warnings.warn(
            f"the outputs of {type(model).__name__} do not depend on its input: all weights that a layer keeps read "
            "outputs that were removed. Lower the sparsity, use allocation='uniform', or leave layers out with "
            "exclude=[…].",
            stacklevel=stacklevel + 1,
        )


@torch.no_grad()
def has_constant_outputs(model: nn.Module, batch: Any) -> bool:
    """Return whether the model's outputs are the same for both halves of a batch, bit for bit.

    Where that cannot be told, as the halves are the same or the model does not run on them, return False.
    """
    inputs = select_inputs(batch)
    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs  # a tokenizer's mapping is a class of its own
    halves = [tree_map(lambda leaf, side=side: half(leaf, side), inputs) for side in (0, 1)]
    if are_equal(*halves):
        return False
    with preserve_modes(model):
        model.eval()
        try:
            outputs = [run_inputs(model, part) for part in halves]
        except Exception:  # a model may need whole batches, and one without batch norms was never run on them
            return False
    return bool(find_tensors(outputs)) and are_equal(*outputs)


def half(value: Any, side: int) -> Any:
    """Return the first or second half of a tensor of several rows, or any other value as it is."""
    if not isinstance(value, Tensor) or value.ndim == 0 or len(value) < 2:
        return value
    size = len(value) // 2
    return value[side * size : (side + 1) * size]


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two structures hold the same tensors."""
    ours, theirs = find_tensors(one), find_tensors(other)
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def find_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a structure."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
