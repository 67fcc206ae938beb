"""Wide residual networks for CIFAR: WideResNet-depth-k."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from .layers import init_he_normal, make_conv, make_dropout, make_head, make_norm
from .registry import register
from .weight_standardization import add_weight_standardization


class PreactivationBlock(nn.Module):
    """Residual block of two convolutions, each after norm and ReLU; a 1×1 shortcut starts after the first ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int, rate: float, kind: str, affine: bool) -> None:
        super().__init__()
        self.norm1, self.conv1 = make_norm(inputs, kind, affine), make_conv(inputs, outputs, 3, stride)
        self.norm2, self.conv2 = make_norm(outputs, kind, affine), make_conv(outputs, outputs)
        self.relu, self.dropout = nn.ReLU(), make_dropout(rate)
        self.shortcut = make_conv(inputs, outputs, 1, stride) if inputs != outputs else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.norm1(x))
        if self.shortcut is not None:
            x = self.shortcut(out)
        out = self.dropout(self.relu(self.norm2(self.conv1(out))))
        return x + self.conv2(out)


class WideResNet(nn.Module):
    """6n+4 layers in three stages of 16k, 32k and 64k channels, initialized He-normal.

    `norm="group"` does not mix samples, as training under differential privacy requires; De et al. (2022) combine it
    with `weight_standardization`.
    """

    def __init__(
        self,
        depth: int,
        width: int,
        *,
        num_classes: int = 10,
        in_channels: int = 3,
        dropout: float = 0.0,
        norm: Literal["batch", "group"] = "batch",
        affine: bool = True,
        weight_standardization: bool = False,
    ) -> None:
        super().__init__()
        channels = 16
        self.stem = make_conv(in_channels, channels)
        blocks: list[nn.Module] = []
        for stage in range(3):
            for block in range((depth - 4) // 6):
                stride = 2 if stage > 0 and block == 0 else 1
                outputs = 16 * width * 2**stage
                blocks.append(PreactivationBlock(channels, outputs, stride, dropout, norm, affine))
                channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.final = nn.Sequential(make_norm(channels, norm, affine), nn.ReLU())
        self.head = make_head(channels, num_classes)
        init_he_normal(self)
        if weight_standardization:
            add_weight_standardization(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.final(self.blocks(self.stem(x))))


for _depth, _width in ((16, 1), (16, 2), (16, 4), (28, 2), (28, 4), (28, 8), (28, 10), (40, 4)):
    _name = f"wrn{_depth}_{_width}"
    register(_name, "Zagoruyko & Komodakis, BMVC 2016", (3, 32, 32), WideResNet, _depth, _width)
