"""Batches of examples: a tensor, or a tuple or mapping of tensors, with a row for each example."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from ..errors import PomonaError, require

Batch = Any  # a tensor, or a nested tuple or dict of tensors


def as_batch(values: Any) -> Batch:
    """Return values with mappings as plain dicts; raise PomonaError for something that has no rows."""
    if isinstance(values, PackedSequence):
        raise PomonaError(
            "a packed sequence has no row for each example: pass the padded tensor and the lengths, and pack it inside "
            "the model."
        )
    if isinstance(values, Mapping):
        return {key: as_batch(value) for key, value in values.items() if value is not None}
    if isinstance(values, tuple | list):
        return tuple(as_batch(value) for value in values)
    if not (isinstance(values, Tensor) and values.dim() > 0):
        raise PomonaError(f"inputs and targets are tensors with a row for each example, got {type(values).__name__}.")
    return values


def count_rows(*batches: Batch) -> int:
    """Return the number of rows of batches; raise PomonaError if their tensors disagree."""
    counts = {len(tensor) for tensor in pytree.tree_leaves(batches)}
    require(len(counts) == 1, f"inputs and targets must have the same number of rows, got {sorted(counts)}.")
    return counts.pop()


def map_tensors(change: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Return a batch with a function applied to each of its tensors."""
    return pytree.tree_map(change, batch)


def split_rows(batch: Batch, count: int) -> list[Batch]:
    """Return a batch in parts of so many rows, the last of which may have fewer."""
    starts = range(0, count_rows(batch), count)
    return [map_tensors(operator.itemgetter(slice(start, start + count)), batch) for start in starts]


def pad_rows(batch: Batch, count: int) -> Batch:
    """Return a batch with rows of zeros added at its end, up to a count."""
    if count_rows(batch) == count:
        return batch
    return map_tensors(lambda part: F.pad(part, (0, 0) * (part.dim() - 1) + (0, count - len(part))), batch)


def are_equal(one: Batch, other: Batch) -> bool:
    """Return whether two batches have the same tensors, bit for bit."""
    (tensors, kind), (others, other_kind) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    return kind == other_kind and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.to(a.device))
        for a, b in zip(tensors, others, strict=True)
    )


def model_arguments(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and named arguments with which a model is called on a batch."""
    if isinstance(batch, dict):
        return (), batch
    return (batch if isinstance(batch, tuple) else (batch,)), {}


def call_model(model: nn.Module, batch: Batch) -> Any:
    """Return a model's output: mappings are passed by name, tuples as several arguments."""
    arguments, named = model_arguments(batch)
    return model(*arguments, **named)
