"""Residual networks of He et al. (2016) for CIFAR: ResNet-20, 32, 44, 56 and 110."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from .layers import init_he_normal, make_conv, make_head, make_norm
from .registry import register


class PadShortcut(nn.Module):
    """Shortcut A of He et al.: subsample the image by `stride`, and pad with `channels` channels of zeros."""

    def __init__(self, stride: int, channels: int) -> None:
        super().__init__()
        self.stride, self.channels = stride, channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.channels // 2, self.channels - self.channels // 2))


class ResidualBlock(nn.Module):
    """Residual block of two 3×3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, shortcut: str, affine: bool) -> None:
        super().__init__()
        self.conv1, self.norm1 = make_conv(inputs, outputs, 3, stride), make_norm(outputs, affine=affine)
        self.conv2, self.norm2 = make_conv(outputs, outputs), make_norm(outputs, affine=affine)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs and shortcut == "A":
            self.shortcut = PadShortcut(stride, outputs - inputs)
        elif inputs != outputs:
            self.shortcut = nn.Sequential(make_conv(inputs, outputs, 1, stride), make_norm(outputs, affine=affine))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class ResNetCifar(nn.Module):
    """6n+2 layers in three stages of 16, 32 and 64 channels, initialized He-normal.

    `shortcut="A"`, which He et al. use for CIFAR, has no parameters; "B" is a 1×1 convolution with batch norm. Lin et
    al. (2020) do not state which they used, and give no parameter count from which it would follow.
    """

    def __init__(
        self,
        depth: int,
        *,
        num_classes: int = 10,
        in_channels: int = 3,
        shortcut: Literal["A", "B"] = "A",
        affine: bool = True,
    ) -> None:
        super().__init__()
        blocks, channels = (depth - 2) // 6, 16
        self.stem = nn.Sequential(make_conv(in_channels, channels), make_norm(channels, affine=affine), nn.ReLU())
        layers: list[nn.Module] = []
        for width in (16, 32, 64):
            for _ in range(blocks):
                stride = 1 if width == channels else 2
                layers.append(ResidualBlock(channels, width, stride, shortcut, affine))
                channels = width
        self.blocks = nn.Sequential(*layers)
        self.head = make_head(channels, num_classes)
        init_he_normal(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)))


for _depth in (20, 32, 44, 56, 110):
    register(f"resnet{_depth}", "He et al., CVPR 2016", (3, 32, 32), ResNetCifar, _depth)
