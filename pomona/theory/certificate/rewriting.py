"""Replacement of steps of a graph by other steps with the same result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .steps import Step, Value, is_reference


@dataclass(frozen=True)
class Operation:
    """An operation of this package, with the schema of its arguments; PyTorch's transforms see what it computes."""

    name: str
    compute: Callable[..., Tensor]
    _schema: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.compute(*args, **kwargs)


def operation(schema: str, compute: Callable[..., Tensor]) -> Operation:
    """Return an operation of this package from the text of its schema, such as "name(Tensor x) -> Tensor"."""
    parsed = torch._C.parse_schema(f"pomona::{schema}")
    return Operation(parsed.name.split("::")[1], compute, parsed)


class Rewriting:
    """The new steps of a graph, and where the result of each old step is among them."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.old = steps
        self.steps: list[Step] = []
        self.place: list[Value] = []
        self.device = next((w.dense.device for step in steps for w in step.weights), torch.device("cpu"))

    def copy(self, step: Step) -> None:
        """Add an old step as it is."""
        args, kwargs = tree_map(self.move, (step.args, step.kwargs), is_leaf=is_reference)
        self.steps.append(replace(step, args=args, kwargs=kwargs))

    def move(self, leaf: Any) -> Any:
        """Return a reference to an old step as one to a new step."""
        return self.place[leaf.index] if isinstance(leaf, Value) else leaf

    def add(self, name: str, function: Any, args: tuple[Any, ...], shape: Sequence[int], **settings: Any) -> Value:
        """Add a new step, whose arguments refer to new steps, and return its place."""
        op = function.name if isinstance(function, Operation) else function.overloadpacket.__name__
        self.steps.append(Step(name, op, function, args, settings, None, torch.Size(shape)))
        return Value(len(self.steps) - 1)

    def shape(self, value: Value) -> torch.Size:
        """Return the shape of a new step's result."""
        return self.steps[value.index].shape


def live_steps(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the input and the steps that the last one depends on, with references in their new order."""
    needed = {0, len(steps) - 1}
    for index in range(len(steps) - 1, 0, -1):
        if index in needed:
            needed.update(steps[index].inputs)
    place = {old: new for new, old in enumerate(sorted(needed))}

    def move(leaf: Any) -> Any:
        return Value(place[leaf.index]) if isinstance(leaf, Value) else leaf

    kept = [steps[index] for index in sorted(needed)]
    moved = [tree_map(move, (step.args, step.kwargs), is_leaf=is_reference) for step in kept]
    return tuple(replace(step, args=args, kwargs=kwargs) for step, (args, kwargs) in zip(kept, moved, strict=True))
