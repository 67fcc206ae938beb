"""The gradients of each example that a backward pass finds, kept by the weight that they belong to.

Gradients are tensors of shape (rows, *weight.shape). Where asked for, those of linear layers and convolutions are
kept as `OuterProducts` of what the layer got and the gradient of its outputs, if these cost less (`gradient_costs`). A
weight that is computed from parameters, or that is used more than once, has gradients of each example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..models.weight_standardization import Standardize
from . import layer_gradients as layers
from .gradient_costs import are_products_cheaper
from .outer_products import MixedGradients, OuterProducts, RowGradients, as_tensor
from .product_sums import ProductShape

STANDARDIZATION = Standardize._backward_cls.__name__  # the name of its node in autograd's graph


class UnrecordedUse(NotImplementedError):
    """A parameter or a batch is used in a way that is not recorded."""


class Recorder:
    """The gradients of each example that a backward pass finds, by the weight that they belong to."""

    def __init__(
        self, parameters: Mapping[str, Tensor], rows: int, dtype: torch.dtype | None, products: bool = False
    ) -> None:
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.parameters, self.rows, self.dtype, self.products = parameters, rows, dtype, products
        first = next(iter(parameters.values()))
        self.anchor = torch.zeros((), device=first.device, requires_grad=True)  # makes outputs require a gradient
        self.found: dict[int, tuple[Tensor, RowGradients]] = {}  # by the identity of the weight, which is kept alive

    def is_recorded(self, weight: Tensor | None) -> bool:
        """Return whether a weight is a parameter that is trained, or computed with autograd."""
        return weight is not None and (id(weight) in self.names or (weight.requires_grad and not weight.is_leaf))

    def add(self, weight: Tensor | None, gradient: Callable[[], RowGradients]) -> None:
        """Add a gradient of each example, of shape (rows, *weight.shape), to those of a weight that is recorded."""
        if weight is None or not self.is_recorded(weight):
            return
        value, before = gradient(), self.found.get(id(weight))
        self.found[id(weight)] = (weight, value if before is None else self.add_up(weight, before[1], value))

    def add_up(self, weight: Tensor, *gradients: RowGradients) -> Tensor:
        """Return the sum of gradients of a weight that is used more than once."""
        first, *others = (as_tensor(gradient).reshape(self.rows, *weight.shape) for gradient in gradients)
        return sum(others, start=first)

    def prefers_products(self, weight: Tensor | None, shape: ProductShape, like: Tensor, is_conv: bool = False) -> bool:
        """Return whether the gradients of a weight are kept as outer products: of a parameter, where they cost less."""
        return (
            self.products
            and id(weight) in self.names
            and id(weight) not in self.found
            and are_products_cheaper(self.rows, shape, like.dtype, like.device, is_convolution=is_conv)
        )

    def split_rows(self, tensor: Tensor) -> Tensor:
        """Return a tensor as (rows, parts of a row, …)."""
        if not tensor.dim() or len(tensor) % self.rows:
            raise UnrecordedUse(f"a layer gets {tuple(tensor.shape)[:1]} rows for {self.rows} examples")
        return tensor.unflatten(0, (self.rows, -1))

    @torch.no_grad()
    def gradients(self) -> MixedGradients:
        """Return the gradients of each example by parameter name, zeros for parameters that were not used."""
        total: dict[str, RowGradients] = {}
        for weight, gradient in self.found.values():
            for name, part in self.pull_back(weight, gradient).items():
                before = total.get(name)
                total[name] = part if before is None else self.add_up(self.parameters[name], before, part)
        for name, parameter in self.parameters.items():
            if name not in total:
                total[name] = parameter.new_zeros(self.rows, *parameter.shape)
        return {name: total[name] for name in self.parameters}

    def pull_back(self, weight: Tensor, gradient: RowGradients) -> MixedGradients:
        """Return the gradients of the parameters that a weight is computed from, or those of the weight itself."""
        if isinstance(gradient, OuterProducts) or id(weight) in self.names:
            return {self.names[id(weight)]: gradient}
        function: Any = weight.grad_fn
        if function.name() == STANDARDIZATION:
            name = self.names.get(id(getattr(function.next_functions[0][0], "variable", None)))
            if name is not None:
                return {name: layers.pull_back_standardization(gradient, *function.saved_tensors)}
        parts = torch.autograd.grad(
            weight,
            list(self.parameters.values()),
            gradient.to(weight.dtype),
            is_grads_batched=True,
            allow_unused=True,
            retain_graph=True,
        )
        return {name: part for name, part in zip(self.parameters, parts, strict=True) if part is not None}
