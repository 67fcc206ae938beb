"""What several families share: convolutions, norms, widths and initial weights."""

from __future__ import annotations

from torch import nn

from ..errors import require

GROUP_NORM_GROUPS = 16  # of group norm, as De et al. (2022) have it for private training


def make_conv(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias that keeps the image's size at stride 1."""
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def make_norm(channels: int, kind: str = "batch", affine: bool = True) -> nn.Module:
    """Batch norm, or group norm where samples must not see each other."""
    if kind == "batch":
        return nn.BatchNorm2d(channels, affine=affine)
    return nn.GroupNorm(GROUP_NORM_GROUPS, channels, affine=affine)


def make_head(channels: int, num_classes: int) -> nn.Sequential:
    """Global average pool and a linear classifier."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


def scale_width(width: int, rho: float) -> int:
    """⌊ρ·width⌋, which must leave a channel."""
    require(rho * width >= 1, f"rho={rho} leaves no channel of {width}: give at least {1 / width}.")
    return int(rho * width)


def make_dropout(rate: float) -> nn.Module:
    """Dropout, or nothing at rate 0."""
    require(0 <= rate < 1, f"dropout must lie in [0, 1), got {rate}.")
    return nn.Dropout(rate) if rate else nn.Identity()


def init_he_normal(model: nn.Module) -> None:
    """N(0, 2/fan_out) for every convolution; norms and linear layers keep PyTorch's initial values."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def init_he_uniform(model: nn.Module) -> None:
    """Uniform in ±√(6/fan_in) for every convolution and linear layer, biases zero: IteRand's "KU"."""
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
