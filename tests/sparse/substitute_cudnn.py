"""A substitute for cuDNN's convolution with ReLU, for tests on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Cudnn:
    """A substitute for cuDNN's operator that counts its calls, and refuses them where `supported` is false."""

    def __init__(self) -> None:
        self.calls = 0
        self.supported = True

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        self.calls += 1
        if not self.supported:
            raise RuntimeError("GET was unable to find an engine to execute this computation")
        return torch.conv2d(x, weight, bias, *options).clamp_min(0)


def convolution(**options: Any) -> nn.Conv2d:
    """Return a small convolution in evaluation mode, with the same weights at every call."""
    torch.manual_seed(0)
    return nn.Conv2d(4, 6, 3, **options).eval()


def images() -> Tensor:
    """Return two random images for `convolution`, the same at every call."""
    return torch.randn(2, 4, 9, 8, generator=torch.Generator().manual_seed(1))


def child_types(model: nn.Module) -> list[type[nn.Module]]:
    """Return the types of the direct children of a model."""
    return [type(m) for m in model.children()]
