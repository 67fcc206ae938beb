"""Packed linear layers that read one input, as one product: queries, keys and values, or the two halves of SwiGLU.

For one vector, as when text is decoded token by token, a product of its own for each of these layers costs a launch on
a GPU, and its own reading of the input. Their packed parts are therefore views of stacked tensors. The first layer that
is called multiplies for all, and the others take their part when they are called with the same tensor.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..format import LANES, BalancedTensor
from ..formats import FORMATS
from .linear import PackedLinear


class Product(NamedTuple):
    """The outputs of one product that wait for their layers."""

    source: weakref.ref[Tensor]  # the input
    version: int  # of the input when it was multiplied
    waiting: dict[int, Tensor]  # the outputs by the places of their layers

    def has_output(self, place: int, x: Tensor) -> bool:
        """Return whether the output of a layer for x is here, and x is as it was."""
        return self.source() is x and self.version == x._version and place in self.waiting


class LastProduct(threading.local):
    """The product that each thread computed last. A copy, also one that is pickled, begins without one."""

    product: Product | None = None

    def __reduce__(self) -> tuple[type[LastProduct], tuple[()]]:
        return LastProduct, ()


class SharedInput:
    """The stacked weights of packed linear layers, and the outputs that wait for the layers still to be called.

    Without their stacked tensors, as after a move to another device, the layers multiply one by one.
    """

    def __init__(self, layers: Sequence[PackedLinear]) -> None:
        self.layers = tuple(layers)
        self.stacked = [torch.cat(parts) for parts in zip(*(read_tensors(layer) for layer in layers), strict=True)]
        self.rows = [layer.sizes["weight"][0] for layer in layers]
        for name, stacked in zip(tensor_names(layers[0]), self.stacked, strict=True):
            sizes = [len(layer.read_buffer(name)) for layer in layers]
            for layer, view in zip(layers, stacked.split(sizes), strict=True):
                layer._buffers[name] = view
        self.views = [tensor for layer in layers for tensor in read_tensors(layer)]
        for layer in layers:
            layer.shared = self
        self.last = LastProduct()

    def is_intact(self) -> bool:
        """Return whether every layer still has its part of the stacked tensors."""
        held = [tensor for layer in self.layers for tensor in read_tensors(layer)]
        return len(held) == len(self.views) and all(map(operator.is_, held, self.views))

    def take_output(self, layer: PackedLinear, x: Tensor) -> Tensor | None:
        """Return the output of a layer for one vector, or None where the layers must multiply one by one."""
        if x.numel() != layer.in_features or x.is_inference():  # changes of an inference tensor are not counted
            return None
        place = next(i for i, one in enumerate(self.layers) if one is layer)
        product = self.last.product
        if product is None or not product.has_output(place, x):
            if not self.is_intact():
                return None
            waiting = dict(enumerate(self.multiply(x).split(self.rows, 1)))
            product = self.last.product = Product(weakref.ref(x), x._version, waiting)
        return product.waiting.pop(place).view(*x.shape[:-1], -1)

    def multiply(self, x: Tensor) -> Tensor:
        """Return the outputs of all layers for one vector, side by side."""
        first = self.layers[0]
        *parts, bias = self.stacked if first.bias is not None else (*self.stacked, None)
        product, (_, *sizes) = FORMATS[first.formats["weight"]].product, first.sizes["weight"]
        return product(x.reshape(1, -1), *parts, bias, sum(self.rows), *sizes)


def tensor_names(layer: PackedLinear) -> tuple[str, ...]:
    """Return the names of a layer's buffers: the parts of its weight, and its bias where it has one."""
    return (*layer.part_buffers["weight"], *(["bias"] if layer.bias is not None else []))


def read_tensors(layer: PackedLinear) -> list[Tensor]:
    """Return the buffers of a layer."""
    return [layer.read_buffer(name) for name in tensor_names(layer)]


def share_inputs(model: nn.Module, groups: Mapping[Any, Sequence[str]]) -> nn.Module:
    """Stack the layers of each group, given by names, that can run as one product; return the model.

    The layers of a group receive the same tensor. Those of balanced formats with equal sizes but for their rows are
    stacked; all but the last need rows in whole groups of 32.
    """
    for names in groups.values():
        alike: dict[Any, list[PackedLinear]] = {}
        for name in names:
            layer = model.get_submodule(name)
            if isinstance(layer, PackedLinear) and is_stackable(layer):
                alike.setdefault(describe_sizes(layer), []).append(layer)
        for layers in alike.values():
            if len(layers) > 1 and all(layer.out_features % LANES == 0 for layer in layers[:-1]):
                SharedInput(layers)
    return model


def is_stackable(layer: PackedLinear) -> bool:
    """Return whether a layer has balanced weights and shares no input yet."""
    balanced = issubclass(FORMATS[layer.formats["weight"]], BalancedTensor)
    return balanced and layer.shared is None


def describe_sizes(layer: PackedLinear) -> tuple[Any, ...]:
    """Return what layers that are stacked have in common."""
    tensors = tuple((t.shape[1:], t.dtype, t.device) for t in read_tensors(layer))
    return layer.formats["weight"], layer.sizes["weight"][1:], tensors
