"""The networks of the papers, by name.

build("resnet20")                        build a network with the options of its paper
build("wrn28_2", num_classes=100)        build a network with other options
names("resnet*")                         list the names of networks
info("conv6").options                    list the options of a network and their defaults
summary(model, (3, 32, 32))              count parameters, non-zeros and MACs, layer by layer
"""

from __future__ import annotations

from . import (  # noqa: F401  (importing them registers them)
    conv,
    densenet,
    image_sequences,
    lstm,
    mlp,
    resnet,
    resnet_cifar,
    vgg,
    wide_resnet,
)
from .registry import ModelInfo, build, build_for_state, build_on_meta, info, names
from .summary import Layer, Summary, summary

__all__ = ["Layer", "ModelInfo", "Summary", "build", "build_for_state", "build_on_meta", "info", "names", "summary"]
