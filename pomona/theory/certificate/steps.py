"""The operations of two networks: values, weights and the steps between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

DENSE, PRUNED = 0, 1


@dataclass(frozen=True)
class Value:
    """A reference to the result of an earlier step, by its position in the graph."""

    index: int


@dataclass(frozen=True, eq=False)
class Weight:
    """A tensor that does not depend on the input: a parameter, a buffer or what is computed from them.

    Floating-point weights are float64; others, such as positions and masks, are equal in both networks.
    """

    name: str
    dense: Tensor = field(repr=False)
    pruned: Tensor = field(repr=False)

    def of(self, side: int) -> Tensor:
        """Return the tensor of one network: DENSE or PRUNED."""
        return self.pruned if side else self.dense


@dataclass(frozen=True, eq=False)
class Step:
    """One operation of both networks on the results of earlier steps; the first step of a graph is the input.

    `op` is the name of the ATen operation without its overload, such as "linear"; `function` is the operation itself.
    Tensors in `args` and `kwargs` are a Value or a Weight. `item` selects one of several results.
    """

    name: str
    op: str
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    item: int | None
    shape: torch.Size

    @property
    def inputs(self) -> list[int]:
        """The positions of the steps that this one reads, each as often as it is read."""
        return [leaf.index for leaf in self.leaves() if isinstance(leaf, Value)]

    @property
    def weights(self) -> list[Weight]:
        """The weights that this step reads."""
        return [leaf for leaf in self.leaves() if isinstance(leaf, Weight)]

    def leaves(self) -> list[Any]:
        """Return the arguments, those in lists and tuples too."""
        return tree_leaves((self.args, self.kwargs), is_leaf=is_reference)

    @property
    def settings(self) -> dict[str, Any]:
        """All arguments of the operation by their names, with the defaults of those that are left out."""
        schema = self.function._schema.arguments
        defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
        given = {argument.name: value for argument, value in zip(schema, self.args, strict=False)}
        return defaults | given | self.kwargs

    def evaluate(self, side: int, values: Sequence[Tensor]) -> Tensor:
        """Return the step's result in one network, from the results of all earlier steps in it."""
        return self.call(side, [values[index] for index in self.inputs])

    def call(self, side: int, operands: Sequence[Tensor]) -> Tensor:
        """Return the step's result with the weights of one network, for other operands in the order of `inputs`."""
        remaining = iter(operands)

        def look_up(leaf: Any) -> Any:
            if isinstance(leaf, Value):
                return next(remaining)
            return leaf.of(side) if isinstance(leaf, Weight) else leaf

        args, kwargs = tree_map(look_up, (self.args, self.kwargs), is_leaf=is_reference)
        result = self.function(*args, **kwargs)
        return result if self.item is None else result[self.item]

    def describe(self) -> str:
        """Return the operation with its settings and shape, for a message."""
        settings = [repr(leaf) for leaf in self.leaves() if not is_reference(leaf)]
        return f"{self.op}({', '.join(settings)}) of shape {tuple(self.shape)}"


def is_reference(leaf: Any) -> bool:
    """Return whether an argument is a Value or a Weight."""
    return isinstance(leaf, (Value, Weight))
