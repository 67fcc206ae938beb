"""Construction of the packed layer that replaces a dense one: which layers have a packed form, and their weights."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ...core.layer_kind import stores_outputs_second
from ..packed_tensor import PackedTensor
from .base import PackedLayer
from .conv2d import PackedConv2d
from .linear import PackedConv1D, PackedLinear
from .lstm import PackedLSTM

PACKABLE_LAYERS = (nn.Linear, nn.Conv2d, nn.LSTM)


def is_packable(layer: nn.Module) -> bool:
    """Return whether a layer is of a class with a packed form; not a subclass, which may use its weight otherwise."""
    return type(layer) in PACKABLE_LAYERS or is_conv1d_of_hugging_face(layer)


def is_conv1d_of_hugging_face(layer: nn.Module) -> bool:
    """Return whether a layer is the `Conv1D` of transformers, which is not imported for that."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils"


def read_weights(layer: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a packable layer by parameter name, with the output dimension first."""
    weights = {leaf: p.detach() for leaf, p in layer.named_parameters() if leaf.startswith("weight")}
    return {leaf: w.T for leaf, w in weights.items()} if stores_outputs_second(layer) else weights


def build_packed_layer(layer: nn.Module, weights: Mapping[str, PackedTensor]) -> PackedLayer:
    """Return the packed form of a packable layer, given its packed weights by parameter name."""
    if isinstance(layer, nn.LSTM):
        return PackedLSTM(layer, weights)
    if is_conv1d_of_hugging_face(layer):
        return PackedConv1D(layer, weights["weight"])
    if isinstance(layer, nn.Linear):
        return PackedLinear(layer, weights["weight"])
    return PackedConv2d(layer, weights["weight"])  # type: ignore[arg-type] # a file may name any layer: it is refused
