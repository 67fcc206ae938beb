"""The weight gradients of each example in the layers that `recorded_gradients` records.

Everything is computed for each example by itself: by batched matrix products with one entry for each example, or by
Triton kernels on a GPU whose programs read one example.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.grad import conv2d_weight

from ..models.weight_standardization import pull_back
from .batchable_ops import as_pair, extract_patches

HALVES = (torch.bfloat16, torch.float16)
MAX_NORM_CHANNELS = 2048  # that a program of the Triton kernels holds


@dataclass(frozen=True)
class Geometry:
    """The kernel size, stride, padding, dilation and groups of a convolution."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @classmethod
    def of(cls, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Geometry:
        """Return the geometry of the arguments of conv2d."""
        kernel = (weight.shape[2], weight.shape[3])
        return cls(kernel, as_pair(stride), as_pair(padding), as_pair(dilation), groups)

    @property
    def options(self) -> tuple[Any, ...]:
        """Return the arguments of conv2d after its bias."""
        return self.stride, self.padding, self.dilation, self.groups


def conv2d_input_gradient(inputs: Tensor, weight: Tensor, gradient: Tensor, geometry: Geometry) -> Tensor:
    """Return the gradient of the inputs of a convolution."""
    places = list(geometry.stride), list(geometry.padding), list(geometry.dilation)
    found = torch.ops.aten.convolution_backward(
        gradient, inputs, weight, None, *places, False, [0, 0], geometry.groups, [True, False, False]
    )
    return found[0]


def conv2d_weight_gradient(inputs: Tensor, gradient: Tensor, geometry: Geometry, rows: int) -> Tensor:
    """Return the gradients of a convolution's weight, (rows, outputs, inputs of a group, *kernel).

    On a GPU the memory of each gradient has the input channels last.
    """
    kernels = triton_kernels() if inputs.is_cuda and inputs.dtype in HALVES and geometry.groups == 1 else None
    if kernels is not None:
        return kernels.conv2d_weight_gradient(inputs, gradient, geometry, rows)
    if inputs.is_cuda:
        return multiply_patches(inputs, gradient, geometry, rows)
    # One convolution with a group for each example, over the views
    inputs, gradient = (part.unflatten(0, (rows, -1)).transpose(0, 1).flatten(1, 2) for part in (inputs, gradient))
    size = (gradient.shape[1], inputs.shape[1] // rows // geometry.groups, *geometry.kernel)
    *places, groups = geometry.options
    return conv2d_weight(inputs, size, gradient, *places, rows * groups).unflatten(0, (rows, -1))


def multiply_patches(inputs: Tensor, gradient: Tensor, geometry: Geometry, rows: int) -> Tensor:
    """Return the gradients of a convolution's weight by a matrix product with input patches for each example."""
    views, groups = len(inputs) // rows, geometry.groups
    size = geometry.kernel, gradient.shape[2:]
    patches = extract_patches(inputs, *size, geometry.stride, geometry.padding, geometry.dilation)
    # (rows, views, groups, channels, positions)
    ours = gradient.reshape(rows, views, groups, gradient.shape[1] // groups, -1)
    theirs = patches.reshape(rows, views, groups, inputs.shape[1] // groups * patches.shape[2], -1)
    found = ours.permute(0, 2, 3, 1, 4).flatten(3) @ theirs.permute(0, 2, 1, 4, 3).flatten(2, 3)
    return found.reshape(rows, gradient.shape[1], -1, *geometry.kernel)


def group_norm(
    inputs: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the group norm of inputs, and the mean and 1/σ of each group, of shape (rows, groups)."""
    kernels = triton_kernels() if has_norm_kernels(inputs, groups) else None
    if kernels is not None:
        return kernels.group_norm(inputs, groups, weight, bias, eps)
    sizes = len(inputs), inputs.shape[1], inputs[0, 0].numel()
    wide = widen(inputs).contiguous()
    outputs, mean, scale = torch.ops.aten.native_group_norm(wide, weight, bias, *sizes, groups, eps)
    return outputs.to(inputs.dtype), mean, scale


def group_norm_gradients(
    gradient: Tensor, inputs: Tensor, mean: Tensor, scale: Tensor, groups: int, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a group norm's inputs, and of weight and bias for each row, of shape (rows, channels)."""
    kernels = triton_kernels() if has_norm_kernels(inputs, groups) else None
    if kernels is not None:
        return kernels.group_norm_gradients(gradient, inputs, mean, scale, groups, weight)
    count, channels = inputs.shape[:2]
    each = channels // groups
    x, g = (widen(part).reshape(count, groups, each, -1) for part in (inputs, gradient))
    x_hat = (x - mean.view(count, groups, 1, 1)) * scale.view(count, groups, 1, 1)
    for_weight, for_bias = (g * x_hat).sum(3), g.sum(3)
    factors = torch.ones_like(for_bias[0]) if weight is None else weight.view(groups, each)
    size = each * x.shape[3]
    along = ((for_weight * factors).sum(2) / size).view(count, groups, 1, 1)
    mean_gradient = ((for_bias * factors).sum(2) / size).view(count, groups, 1, 1)
    for_inputs = (g * factors[..., None] - mean_gradient - x_hat * along) * scale.view(count, groups, 1, 1)
    return for_inputs.reshape(inputs.shape).to(inputs.dtype), for_weight.flatten(1), for_bias.flatten(1)


def widen(values: Tensor) -> Tensor:
    """Return values of 16 bits in float32, and others as they are."""
    return values.float() if values.dtype in HALVES else values


def has_norm_kernels(inputs: Tensor, groups: int) -> bool:
    """Return whether the kernels support inputs: images of 16 bits on a GPU with their channels last in memory."""
    is_image = inputs.dim() == 4 and inputs.is_cuda and inputs.dtype in HALVES
    are_powers = all(n & (n - 1) == 0 for n in (inputs.shape[1], groups)) and inputs.shape[1] <= MAX_NORM_CHANNELS
    return is_image and are_powers and inputs.is_contiguous(memory_format=torch.channels_last)


def embedding_gradient(indices: Tensor, gradient: Tensor, count: int, padding_idx: int | None) -> Tensor:
    """Return the gradients of an embedding's weight, (rows, count, size), from indices of shape (rows, places)."""
    if padding_idx is not None:
        gradient = gradient * (indices != padding_idx)[..., None]
    found = gradient.new_zeros(len(indices), count, gradient.shape[2])
    return found.scatter_add_(1, indices[..., None].expand_as(gradient), gradient)


def pull_back_standardization(gradients: Tensor, standardized: Tensor, norms: Tensor) -> Tensor:
    """Return the gradients of a weight from those of the standardized weight, of shape (rows, *weight.shape)."""
    kernels = triton_kernels() if gradients.is_cuda else None
    if kernels is not None:
        return kernels.pull_back_standardization(gradients, standardized, norms)
    return pull_back(gradients, standardized, norms)


@cache
def triton_kernels() -> ModuleType | None:
    """Return the module of the Triton kernels, or None where Triton is not installed."""
    try:
        from . import layer_gradients_triton
    except ImportError:
        return None
    return layer_gradients_triton
