"""Layers that run on packed weights, and a dense convolution that computes the ReLU after it."""

from __future__ import annotations

from .base import PackedLayer, PackedWeightLayer
from .build import PACKABLE_LAYERS, build_packed_layer, is_packable, read_weights
from .conv2d import PackedConv2d
from .conv2d_relu import Conv2dReLU
from .linear import PackedConv1D, PackedLinear
from .lstm import PackedLSTM
from .sequential import FusedSequential
from .shared_input import share_inputs

__all__ = [
    "PACKABLE_LAYERS",
    "Conv2dReLU",
    "FusedSequential",
    "PackedConv1D",
    "PackedConv2d",
    "PackedLSTM",
    "PackedLayer",
    "PackedLinear",
    "PackedWeightLayer",
    "build_packed_layer",
    "is_packable",
    "read_weights",
    "share_inputs",
]
