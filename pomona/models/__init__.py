"""The networks of the papers, by name.

build("resnet20")                        with the paper's options
build("wrn28_2", num_classes=100)        with others
names("resnet*")                         what there is
info("conv6").options                    what can be chosen
summary(model, (3, 32, 32))              parameters, non-zeros and MACs, layer by layer
"""

from __future__ import annotations

from . import conv, densenet, lstm, mlp, resnet, resnet_cifar, vgg, wide_resnet  # noqa: F401  (they register)
from .registry import ModelInfo, build, info, names
from .summary import Layer, Summary, summary

__all__ = ["Layer", "ModelInfo", "Summary", "build", "info", "names", "summary"]
