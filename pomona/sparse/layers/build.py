"""Construction of the packed layer that replaces a dense one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..format import BalancedTensor
from .base import PackedLayer
from .conv2d import PackedConv2d
from .linear import PackedLinear
from .lstm import PackedLSTM


def build_packed_layer(layer: nn.Module, weights: Mapping[str, BalancedTensor]) -> PackedLayer:
    """Return the packed form of a Linear, Conv2d or LSTM layer, given its packed weights by parameter name."""
    if isinstance(layer, nn.LSTM):
        return PackedLSTM(layer, weights)
    if isinstance(layer, nn.Linear):
        return PackedLinear(layer, weights["weight"])
    return PackedConv2d(layer, weights["weight"])  # type: ignore[arg-type] # a file may name any layer: it is refused
