"""VGG networks with batch norm for CIFAR."""

from __future__ import annotations

import torch
from torch import nn

from .layers import init_he_normal, make_conv, make_norm
from .registry import register


class VGG(nn.Module):
    """Five stages of 3×3 convolutions with batch norm, each with a max-pool, and a classifier; initialized He-normal.

    `hidden=(512, 512)` adds two layers before the classifier, as in the code of SNIP and of Sparse Momentum. DPF
    describes convolutions and a single last layer, which is the default here.
    """

    def __init__(
        self,
        depths: tuple[int, ...],
        *,
        num_classes: int = 10,
        in_channels: int = 3,
        hidden: tuple[int, ...] = (),
        affine: bool = True,
    ) -> None:
        super().__init__()
        features: list[nn.Module] = []
        for width, depth in zip((64, 128, 256, 512, 512), depths, strict=True):
            for _ in range(depth):
                features += [make_conv(in_channels, width), make_norm(width, affine=affine), nn.ReLU()]
                in_channels = width
            features.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        classifier: list[nn.Module] = []
        for width in hidden:
            classifier += [nn.Linear(in_channels, width), nn.ReLU(), nn.BatchNorm1d(width, affine=affine)]
            in_channels = width
        self.classifier = nn.Sequential(*classifier, nn.Linear(in_channels, num_classes))
        init_he_normal(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


_paper = "Simonyan & Zisserman, ICLR 2015"
register("vgg11", _paper, (3, 32, 32), VGG, (1, 1, 2, 2, 2))
register("vgg16_d", _paper, (3, 32, 32), VGG, (2, 2, 3, 3, 3))
