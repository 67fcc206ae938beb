"""Layers and initializers that several families of networks share."""

from __future__ import annotations

from torch import nn

from ..errors import require

GROUP_NORM_GROUPS = 16  # as in De et al. (2022) for private training


def make_conv(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Conv2d:
    """Return a convolution without bias that preserves the image size at stride 1."""
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def make_norm(channels: int, kind: str = "batch", affine: bool = True) -> nn.Module:
    """Return a batch norm, or for kind "group" a group norm, which does not mix samples."""
    if kind == "batch":
        return nn.BatchNorm2d(channels, affine=affine)
    return nn.GroupNorm(GROUP_NORM_GROUPS, channels, affine=affine)


def make_head(channels: int, num_classes: int) -> nn.Sequential:
    """Return a global average pool followed by a linear classifier."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


def scale_width(width: int, rho: float) -> int:
    """Return ⌊ρ·width⌋; raise PomonaError if that leaves no channel."""
    require(rho * width >= 1, f"rho={rho} leaves no channel of {width}: give at least {1 / width}.")
    return int(rho * width)


def make_dropout(rate: float) -> nn.Module:
    """Return a dropout layer, or an identity at rate 0."""
    require(0 <= rate < 1, f"dropout must lie in [0, 1), got {rate}.")
    return nn.Dropout(rate) if rate else nn.Identity()


def init_he_normal(model: nn.Module) -> None:
    """Initialize every convolution from N(0, 2/fan_out); norms and linear layers keep PyTorch's initial values."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def init_he_uniform(model: nn.Module) -> None:
    """Initialize every convolution and linear layer uniformly in ±√(6/fan_in) with zero biases: IteRand's "KU"."""
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
