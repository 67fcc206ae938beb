"""The example input of an export: one tensor, positional arguments, or keyword arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import PomonaError, require
from ..models.example_inputs import ModelInputs

BATCH = "batch"  # the name of the dynamic dimension


class Example(ModelInputs):
    """The arguments of one call of a network, which can be resized to any number of samples."""

    @classmethod
    def create(cls, example: Any, model: nn.Module) -> Example:
        """Return the example of a tensor, a tuple of arguments, a mapping of keyword arguments or a sample's shape."""
        if isinstance(example, Example):
            return example
        if not isinstance(example, (Tensor, Mapping, Sequence)) or isinstance(example, str):
            raise PomonaError(
                "example takes a tensor, a tuple of arguments, a dict of keyword arguments or the shape of one sample, "
                f"got {type(example).__name__}."
            )
        made = cls.from_example(model, example)
        require(any(tensor.ndim for tensor in made.tensors), "the example has no tensor with a batch dimension.")
        return made

    def map(self, change: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda value: value) -> Example:
        """Return the example with every tensor changed by a function, and other arguments by `other`."""

        def convert(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) else other(value)

        return Example(tuple(map(convert, self.args)), {name: convert(value) for name, value in self.kwargs.items()})

    def to(self, device: torch.device | str) -> Example:
        """Return the example on a device."""
        return self.map(lambda tensor: tensor.to(device))

    def has_batch(self, tensor: Tensor) -> bool:
        """Return whether the first dimension of a tensor counts samples."""
        return tensor.ndim > 0 and len(tensor) == self.batch

    def resize(self, batch: int) -> Example:
        """Return the example with another number of samples, which repeat."""
        index = torch.arange(batch) % self.batch
        return self.map(lambda tensor: tensor[index.to(tensor.device)] if self.has_batch(tensor) else tensor)

    def dynamic_shapes(self) -> tuple[Any, ...] | dict[str, Any]:
        """Return the `dynamic_shapes` of `torch.export` with a dynamic batch; the arguments are of one kind."""
        dimension = torch.export.Dim(BATCH, min=1)
        shapes = self.map(lambda t: {0: dimension} if self.has_batch(t) else None, lambda _: None)
        return shapes.kwargs if shapes.kwargs else shapes.args


def flatten_outputs(outputs: Any) -> dict[str, Tensor]:
    """Return the tensors of a network's output by name: the keys of a mapping, else "output" with a number."""
    if isinstance(outputs, Mapping):
        parts = [(name, leaf) for name, value in outputs.items() for leaf in pytree.tree_leaves(value)]
    else:
        parts = [("output", leaf) for leaf in pytree.tree_leaves(outputs)]
    tensors = [(name, leaf) for name, leaf in parts if isinstance(leaf, Tensor)]
    counts: dict[str, int] = {}
    named = {}
    for name, tensor in tensors:
        number = counts[name] = counts.get(name, -1) + 1
        repeated = sum(other == name for other, _ in tensors) > 1
        named[f"{name}_{number}" if repeated else name] = tensor
    return named
