"""Plain convolutional networks: Conv2, Conv4, Conv6, and a small network for scikit-learn's digits."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from ..errors import require
from .layers import init_he_normal, init_he_uniform, make_conv, make_head, make_norm, scale_width
from .registry import register


class ConvNet(nn.Module):
    """Pairs of 3×3 convolutions with a max-pool after each pair, then layers of 256ρ, 256ρ and `num_classes` outputs.

    As in the code of IteRand, there is no batch norm, every layer has a bias, and the last three layers are 1×1
    convolutions. Weights are uniform in ±√(6/fan_in), biases zero.
    """

    def __init__(
        self,
        pairs: int,
        *,
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int = 32,
        rho: float = 1.0,
    ) -> None:
        super().__init__()
        side = image_size // 2**pairs
        require(side >= 1, f"image_size={image_size} is too small for {pairs} poolings: give {2**pairs} or more.")
        widths = [scale_width(64 * 2**i, rho) for i in range(pairs)]
        features: list[nn.Module] = []
        for inputs, width in pairwise((in_channels, *widths)):
            features += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
            features += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*features)
        hidden = scale_width(256, rho)
        self.classifier = nn.Sequential(
            nn.Conv2d(widths[-1] * side**2, hidden, 1),
            nn.ReLU(),
            nn.Conv2d(hidden, hidden, 1),
            nn.ReLU(),
            nn.Conv2d(hidden, num_classes, 1),
        )
        init_he_uniform(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x).flatten(1)
        return self.classifier(x[:, :, None, None]).flatten(1)


class DigitsCNN(nn.Module):
    """Four 3×3 convolutions with batch norm for 8×8 images: 33 thousand parameters, initialized He-normal."""

    def __init__(self, *, num_classes: int = 10, in_channels: int = 1, rho: float = 1.0, affine: bool = True) -> None:
        super().__init__()
        widths = [scale_width(width, rho) for width in (16, 32, 32, 64)]
        layers: list[nn.Module] = []
        for stride, (inputs, outputs) in zip((1, 1, 2, 1), pairwise((in_channels, *widths)), strict=True):
            layers += [make_conv(inputs, outputs, 3, stride), make_norm(outputs, affine=affine), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.head = make_head(widths[-1], num_classes)
        init_he_normal(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


for _pairs in (1, 2, 3):
    register(f"conv{2 * _pairs}", "Frankle & Carbin, ICLR 2019", (3, 32, 32), ConvNet, _pairs)
register("digits_cnn", "a small network for scikit-learn's digits", (1, 8, 8), DigitsCNN)
