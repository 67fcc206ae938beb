"""Affine layers of a certified network: linear layers, convolutions and batch norms, with bounds of their norms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import PomonaError
from .. import spectral
from .paired_value import euclidean_norm

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
AFFINE_LAYERS = (nn.Linear, nn.Conv2d, *BATCH_NORMS)


@dataclass(frozen=True)
class AffineMap:
    """A map x ↦ W x + b, where W is a matrix, a convolution or a diagonal; `module` says which, with its options."""

    weight: Tensor
    bias: Tensor
    module: nn.Module

    @staticmethod
    def of(module: nn.Module) -> AffineMap:
        """Return the map of a layer in evaluation mode."""
        if isinstance(module, BATCH_NORMS):
            return AffineMap(*batch_norm_coefficients(module), module)
        assert isinstance(module, (nn.Linear, nn.Conv2d))
        weight = module.weight.detach()
        bias = weight.new_zeros(len(weight)) if module.bias is None else module.bias.detach()
        return AffineMap(weight, bias, module)

    def then_scale(self, scale: Tensor, shift: Tensor) -> AffineMap:
        """Return the map followed by a batch norm with this scale and shift."""
        return AffineMap(self.weight * view_along(scale, self.weight, 0), self.bias * scale + shift, self.module)

    def __sub__(self, other: AffineMap) -> AffineMap:
        return AffineMap(self.weight - other.weight, self.bias - other.bias, self.module)

    def __bool__(self) -> bool:
        """Return whether the map is not zero."""
        return bool(self.weight.any() or self.bias.any())

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.module, nn.Linear):
            return F.linear(x, self.weight, self.bias)
        if isinstance(self.module, nn.Conv2d):
            return self.module._conv_forward(x, self.weight, self.bias)
        return x * view_along(self.weight, x, 1) + view_along(self.bias, x, 1)

    def norm_bound(self, shape: torch.Size) -> float:
        """Return an upper bound of ‖W‖₂ on inputs of this shape."""
        if isinstance(self.module, nn.Linear):
            return spectral.bound(self.weight)
        if isinstance(self.module, nn.Conv2d):
            return conv_norm_bound(self.module, self.weight, shape)
        return float(self.weight.abs().max())

    def rounding_bound(self, x: Tensor, places: int) -> float:
        """Return an upper bound of the distance between the computed and the exact W x + b.

        `places` is the number of outputs that each entry of the bias is added to.
        """
        taps = self.weight[0, 0].numel() if self.weight.ndim == 4 else 1
        terms = max(1, self.weight[0].numel()) + 4
        eps = torch.finfo(torch.float64).eps
        weight_norm, input_norm = euclidean_norm(self.weight), euclidean_norm(x)
        product = math.sqrt(taps) * weight_norm * input_norm if self.weight.ndim > 1 else input_norm * weight_norm
        return 4 * terms * eps * (product + math.sqrt(places) * euclidean_norm(self.bias))


def conv_norm_bound(conv: nn.Conv2d, weight: Tensor, shape: torch.Size) -> float:
    """Return an upper bound of a convolution's norm on inputs of this shape, for any padding mode."""
    image: tuple[int, int] = (shape[-2], shape[-1])
    options: dict[str, Any] = {"stride": conv.stride, "dilation": conv.dilation, "groups": conv.groups}
    edges = conv._reversed_padding_repeated_twice
    if conv.padding_mode == "zeros":
        return spectral.conv_bound(weight, image, **options)
    if conv.padding_mode == "circular":
        # A pixel that the padding repeats contributes to more outputs, once for each turn around the image.
        padded_size = [n + a + b for n, a, b in zip(image, edges[2::-2], edges[3::-2], strict=True)]
        span = [d * (k - 1) for d, k in zip(conv.dilation, weight.shape[2:], strict=True)]
        turns = [max(1, -(-(r - s) // n)) for r, s, n in zip(padded_size, span, image, strict=True)]
        return spectral.conv_bound(weight, image, padding="circular", **options) * math.sqrt(math.prod(turns))
    # Other padding is a linear map of zeros and ones. A column has as many ones as the padding makes copies of a pixel.
    with torch.enable_grad():
        pixels = torch.ones(1, 1, *image, dtype=torch.float64, requires_grad=True)
        padded = F.pad(pixels, edges, mode=conv.padding_mode)
        (copies,) = torch.autograd.grad(padded.sum(), pixels)
    padded_image: tuple[int, int] = (padded.shape[-2], padded.shape[-1])
    return math.sqrt(float(copies.max())) * spectral.conv_bound(weight, padded_image, **options)


def batch_norm_coefficients(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the scale and the shift of a batch norm in evaluation mode."""
    assert isinstance(norm, BATCH_NORMS)
    mean, variance = norm.running_mean, norm.running_var
    if mean is None or variance is None:
        raise PomonaError("a batch norm without running statistics depends on the batch, and has no certificate.")
    scale = (variance + norm.eps).rsqrt()
    scale = scale if norm.weight is None else scale * norm.weight.detach()
    shift = -mean * scale if norm.bias is None else norm.bias.detach() - mean * scale
    return scale, shift


def view_along(vector: Tensor, like: Tensor, axis: int) -> Tensor:
    """Return a vector reshaped to multiply `like` along one axis."""
    return vector.view(*[1] * axis, -1, *[1] * (like.ndim - axis - 1))
