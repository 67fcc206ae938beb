"""Layers that run on packed weights, and a dense convolution that computes the ReLU after it."""

from __future__ import annotations

from .base import PackedLayer, PackedWeightLayer
from .build import build_packed_layer
from .conv2d import PackedConv2d
from .conv2d_relu import Conv2dReLU
from .linear import PackedLinear
from .lstm import PackedLSTM

__all__ = [
    "Conv2dReLU",
    "PackedConv2d",
    "PackedLSTM",
    "PackedLayer",
    "PackedLinear",
    "PackedWeightLayer",
    "build_packed_layer",
]
