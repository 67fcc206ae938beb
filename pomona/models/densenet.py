"""Densely connected networks for CIFAR: DenseNet-40-12 and DenseNet-BC-100-12."""

from __future__ import annotations

import torch
from torch import nn

from .layers import init_he_normal, make_conv, make_dropout, make_head, make_norm
from .registry import register


def norm_relu_conv(inputs: int, outputs: int, size: int, rate: float, affine: bool) -> list[nn.Module]:
    """Return a batch norm, ReLU, convolution and dropout."""
    return [make_norm(inputs, affine=affine), nn.ReLU(), make_conv(inputs, outputs, size), make_dropout(rate)]


class DenseLayer(nn.Module):
    """Append `growth` channels to the input; a bottleneck first reduces the input to 4·growth channels."""

    def __init__(self, inputs: int, growth: int, bottleneck: bool, rate: float, affine: bool) -> None:
        super().__init__()
        inner = 4 * growth if bottleneck else inputs
        narrow = norm_relu_conv(inputs, inner, 1, rate, affine) if bottleneck else []
        self.path = nn.Sequential(*narrow, *norm_relu_conv(inner, growth, 3, rate, affine))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, self.path(x)), 1)


class DenseNet(nn.Module):
    """Three dense blocks with transitions between them, initialized He-normal.

    With `compress` (the BC variant) the dense layers have bottlenecks and a transition halves the channels.
    """

    def __init__(
        self,
        depth: int,
        growth: int,
        compress: bool,
        *,
        num_classes: int = 10,
        in_channels: int = 3,
        dropout: float = 0.0,
        affine: bool = True,
    ) -> None:
        super().__init__()
        channels = 2 * growth if compress else 16
        blocks: list[nn.Module] = [make_conv(in_channels, channels)]
        for block in range(3):
            if block > 0:
                outputs = channels // 2 if compress else channels
                blocks += [*norm_relu_conv(channels, outputs, 1, dropout, affine), nn.AvgPool2d(2)]
                channels = outputs
            for _ in range((depth - 4) // (6 if compress else 3)):
                blocks.append(DenseLayer(channels, growth, compress, dropout, affine))
                channels += growth
        self.blocks = nn.Sequential(*blocks, make_norm(channels, affine=affine), nn.ReLU())
        self.head = make_head(channels, num_classes)
        init_he_normal(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


_paper = "Huang et al., CVPR 2017"
register("densenet40", _paper, (3, 32, 32), DenseNet, 40, 12, False)
register("densenet100", _paper, (3, 32, 32), DenseNet, 100, 12, True)
