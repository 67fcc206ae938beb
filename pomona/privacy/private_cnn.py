"""A small network for private training.

It has few parameters because noise grows with their number, and group norm because it does not mix examples.
"""

from __future__ import annotations

import torch
from torch import nn

from ..models.layers import make_conv, make_head, make_norm, scale_width
from ..models.registry import register


class PrivateCNN(nn.Module):
    """Four 3×3 convolutions with group norm, the first and the third with stride 2: 66 thousand parameters."""

    def __init__(self, *, num_classes: int = 10, in_channels: int = 3, rho: float = 1.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for width, stride in ((32, 2), (32, 1), (64, 2), (64, 1)):
            outputs = scale_width(width, rho)
            layers += [make_conv(channels, outputs, 3, stride), make_norm(outputs, "group"), nn.ReLU()]
            channels = outputs
        self.features = nn.Sequential(*layers)
        self.head = make_head(channels, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


register("private_cnn", "after Tramèr & Boneh, ICLR 2021", (3, 32, 32), PrivateCNN)
