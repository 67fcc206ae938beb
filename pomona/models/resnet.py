"""Residual networks of He et al. (2016) for ImageNet, with a stem for small images and a width factor ρ."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from .layers import init_he_normal, init_he_uniform, make_conv, make_head, make_norm, scale_width
from .registry import register


def conv_norm(inputs: int, outputs: int, size: int, stride: int, affine: bool) -> nn.Sequential:
    """Return a convolution and its batch norm."""
    return nn.Sequential(make_conv(inputs, outputs, size, stride), make_norm(outputs, affine=affine))


class ResidualBlock(nn.Module):
    """Base of residual blocks: the shortcut, a 1×1 convolution where the shape changes. Subclasses set `path`."""

    expansion: int
    path: nn.Sequential

    def __init__(self, inputs: int, outputs: int, stride: int, affine: bool) -> None:
        super().__init__()
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else conv_norm(inputs, outputs, 1, stride, affine)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.path(x) + self.shortcut(x))


class BasicBlock(ResidualBlock):
    """Residual block of two 3×3 convolutions."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, inner: int, affine: bool) -> None:
        super().__init__(inputs, width, stride, affine)
        self.path = nn.Sequential(
            conv_norm(inputs, inner * width, 3, stride, affine),
            nn.ReLU(),
            conv_norm(inner * width, width, 3, 1, affine),
        )


class BottleneckBlock(ResidualBlock):
    """Residual block of 1×1, 3×3 and 1×1 convolutions, with the stride at the 3×3 as in torchvision."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, inner: int, affine: bool) -> None:
        super().__init__(inputs, 4 * width, stride, affine)
        self.path = nn.Sequential(
            conv_norm(inputs, inner * width, 1, 1, affine),
            nn.ReLU(),
            conv_norm(inner * width, inner * width, 3, stride, affine),
            nn.ReLU(),
            conv_norm(inner * width, 4 * width, 1, 1, affine),
        )


class ResNet(nn.Module):
    """Four stages of 64ρ, 128ρ, 256ρ and 512ρ channels (times 4 with bottlenecks).

    The stem has 64 channels for every ρ: a 7×7 convolution of stride 2 and a max-pool for "imagenet", a 3×3
    convolution for "cifar". ResNet-18 and 34 default to "cifar" and 10 classes, the deeper networks to "imagenet" and
    1000. `inner` widens only the inside of the blocks, which turns ResNet-50 into WideResNet-50-2. Weights are
    initialized He-normal, or with `init="uniform"` as in IteRand: uniform in ±√(6/fan_in), with a zero bias in the
    classifier.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[BottleneckBlock],
        depths: tuple[int, ...],
        inner: int = 1,
        *,
        num_classes: int = 10,
        in_channels: int = 3,
        stem: Literal["cifar", "imagenet"] = "cifar",
        rho: float = 1.0,
        affine: bool = True,
        init: Literal["normal", "uniform"] = "normal",
    ) -> None:
        super().__init__()
        channels = 64
        if stem == "cifar":
            self.stem = nn.Sequential(conv_norm(in_channels, channels, 3, 1, affine), nn.ReLU())
        else:
            pool = nn.MaxPool2d(3, 2, padding=1)
            self.stem = nn.Sequential(conv_norm(in_channels, channels, 7, 2, affine), nn.ReLU(), pool)
        blocks: list[nn.Module] = []
        for stage, depth in enumerate(depths):
            width = scale_width(64 * 2**stage, rho)
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(block(channels, width, stride, inner, affine))
                channels = block.expansion * width
        self.blocks = nn.Sequential(*blocks)
        self.head = make_head(channels, num_classes)
        (init_he_normal if init == "normal" else init_he_uniform)(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)))


_he, _wide = "He et al., CVPR 2016", "Zagoruyko & Komodakis, BMVC 2016"
_large: dict[str, Any] = {"num_classes": 1000, "stem": "imagenet"}
register("resnet18", _he, (3, 32, 32), ResNet, BasicBlock, (2, 2, 2, 2))
register("resnet34", _he, (3, 32, 32), ResNet, BasicBlock, (3, 4, 6, 3))
register("resnet50", _he, (3, 224, 224), ResNet, BottleneckBlock, (3, 4, 6, 3), **_large)
register("resnet101", _he, (3, 224, 224), ResNet, BottleneckBlock, (3, 4, 23, 3), **_large)
register("wrn50_2", _wide, (3, 224, 224), ResNet, BottleneckBlock, (3, 4, 6, 3), 2, **_large)
