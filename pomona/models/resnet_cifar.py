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


def make_shortcut(inputs: int, outputs: int, stride: int, kind: str, affine: bool) -> nn.Module:
    """Return the shortcut of a block: an identity, or where the number of channels changes one of kind "A" or "B"."""
    if inputs == outputs:
        return nn.Identity()
    if kind == "A":
        return PadShortcut(stride, outputs - inputs)
    return nn.Sequential(make_conv(inputs, outputs, 1, stride), make_norm(outputs, affine=affine))


class ResidualBlock(nn.Module):
    """Base of residual blocks. Subclasses set `expansion`, the factor between their width and their channels."""

    expansion: int
    conv1: nn.Conv2d
    shortcut: nn.Module


class BasicBlock(ResidualBlock):
    """Residual block of two 3×3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, shortcut: str, affine: bool) -> None:
        super().__init__()
        self.conv1, self.norm1 = make_conv(inputs, width, 3, stride), make_norm(width, affine=affine)
        self.conv2, self.norm2 = make_conv(width, width), make_norm(width, affine=affine)
        self.relu = nn.ReLU()
        self.shortcut = make_shortcut(inputs, width, stride, shortcut, affine)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class BottleneckBlock(ResidualBlock):
    """Residual block of 1×1, 3×3 and 1×1 convolutions, the last with four times the channels, and a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, shortcut: str, affine: bool) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.norm1 = make_conv(inputs, width, 1), make_norm(width, affine=affine)
        self.conv2, self.norm2 = make_conv(width, width, 3, stride), make_norm(width, affine=affine)
        self.conv3, self.norm3 = make_conv(width, outputs, 1), make_norm(outputs, affine=affine)
        self.relu = nn.ReLU()
        self.shortcut = make_shortcut(inputs, outputs, stride, shortcut, affine)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.relu(self.norm2(self.conv2(out)))
        return self.relu(self.norm3(self.conv3(out)) + self.shortcut(x))


BLOCKS: dict[str, type[BasicBlock] | type[BottleneckBlock]] = {"basic": BasicBlock, "bottleneck": BottleneckBlock}


class ResNetCifar(nn.Module):
    """(depth − 2) / 6 blocks in each of three stages of 16, 32 and 64 channels, initialized He-normal.

    `shortcut="A"`, which He et al. use for CIFAR, has no parameters; "B" is a 1×1 convolution with batch norm. With
    `block="basic"`, that of He et al., `depth` counts the layers. `block="bottleneck"` has as many blocks, of three
    layers and four times the channels: so are the networks of depth 44 and more in the public code of the first author
    of DPF (Lin et al., 2020), in which shortcuts are of kind "B". The paper states neither, and gives no parameter
    count from which they would follow.
    """

    def __init__(
        self,
        depth: int,
        *,
        num_classes: int = 10,
        in_channels: int = 3,
        shortcut: Literal["A", "B"] = "A",
        affine: bool = True,
        block: Literal["basic", "bottleneck"] = "basic",
    ) -> None:
        super().__init__()
        make_block, channels = BLOCKS[block], 16
        self.stem = nn.Sequential(make_conv(in_channels, channels), make_norm(channels, affine=affine), nn.ReLU())
        layers: list[nn.Module] = []
        for stage, width in enumerate((16, 32, 64)):
            for i in range((depth - 2) // 6):
                stride = 2 if stage > 0 and i == 0 else 1
                layers.append(make_block(channels, width, stride, shortcut, affine))
                channels = make_block.expansion * width
        self.blocks = nn.Sequential(*layers)
        self.head = make_head(channels, num_classes)
        init_he_normal(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)))


for _depth in (20, 32, 44, 56, 110):
    register(f"resnet{_depth}", "He et al., CVPR 2016", (3, 32, 32), ResNetCifar, _depth)
