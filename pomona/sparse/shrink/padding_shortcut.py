"""Shortcuts that pad channels with zeros (option A of He et al., 2016), in a form whose channels can be removed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...models.resnet_cifar import PadShortcut, ResidualBlock


class TraceableShortcut(nn.Module):
    """A zero-padding shortcut whose new channels come from 1×1 convolutions with zero weights.

    The dependency graph cannot follow padded channels, but it can follow a concatenation of convolutions.
    """

    def __init__(self, pad: PadShortcut, channels: int, like: Tensor) -> None:
        super().__init__()
        self.pad, left = pad, pad.channels // 2
        self.left, self.right = (
            nn.Conv2d(channels, new, 1, bias=False, device=like.device, dtype=like.dtype)
            for new in (left, pad.channels - left)
        )
        for side in (self.left, self.right):
            nn.init.zeros_(side.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.pad.stride, :: self.pad.stride]
        return torch.cat((self.left(x), x, self.right(x)), 1)

    def to_padding(self) -> nn.Module:
        """Return a shortcut without parameters that pads as many channels as are left here."""
        sides = self.left.out_channels, self.right.out_channels
        old = self.pad.channels // 2
        if sides == (old, self.pad.channels - old):
            return self.pad
        return UnevenPad(self.pad.stride, *sides)


class UnevenPad(nn.Module):
    """A zero-padding shortcut with any number of new channels on either side, and a stride."""

    def __init__(self, stride: int, left: int, right: int) -> None:
        super().__init__()
        self.stride, self.left, self.right = stride, left, right

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.left, self.right))


def make_shortcuts_traceable(model: nn.Module) -> None:
    """Replace the zero-padding shortcuts of a model, in place, by ones that the dependency graph can follow."""
    for block in model.modules():
        if isinstance(block, ResidualBlock) and isinstance(block.shortcut, PadShortcut):
            block.shortcut = TraceableShortcut(block.shortcut, block.conv1.in_channels, block.conv1.weight)


def restore_padding_shortcuts(model: nn.Module) -> None:
    """Undo `make_shortcuts_traceable` in place, with the number of channels that are left."""
    for block in model.modules():
        if isinstance(block, ResidualBlock) and isinstance(block.shortcut, TraceableShortcut):
            block.shortcut = block.shortcut.to_padding()
