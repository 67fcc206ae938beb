"""The operator `torch.ops.pomona.balanced_conv2d`: a convolution whose weight is packed as out × (in · kh · kw)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from ...errors import PomonaError
from ..conv_geometry import ConvGeometry
from ..cuda.conv2d import convolve
from ..format import unpack_matrix, validate_packed_memory, validate_packed_shapes
from .registration import register_operator

Resolved = tuple[ConvGeometry, torch.Size]  # the geometry, and the shape of the output


def compute_conv2d(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, block: int,
                   kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
                   relu: bool = False) -> Tensor:  # fmt: skip
    """Return the convolution by a CUDA kernel, or the dense one in float32 or wider: the definition of the operator."""
    pairs = kernel, stride, padding, dilation
    geometry, shape = resolve_conv2d(cached_output_shape, x, values, indices, bias, rows, block, *pairs)
    y = convolve(x, values, indices, bias, rows, block, geometry, relu) if x.is_cuda and shape.numel() else None
    if y is not None:
        return y
    dtype = torch.promote_types(x.dtype, torch.float32)
    weight = unpack_matrix(values, indices, rows, x.shape[1] * geometry.taps, block).view(rows, -1, *kernel).to(dtype)
    y = conv2d(x.to(dtype), weight, bias if bias is None else bias.to(dtype), stride, padding, dilation)
    return (y.relu() if relu else y).to(x.dtype)


def fake_conv2d(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, block: int,
                kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
                relu: bool = False) -> Tensor:  # fmt: skip
    """Return an empty tensor of the output's shape, for torch.compile and torch.export."""
    pairs = kernel, stride, padding, dilation
    return x.new_empty(resolve_conv2d(output_shape, x, values, indices, bias, rows, block, *pairs)[1])


def resolve_conv2d(resolve_shapes: Callable[..., Resolved], x: Tensor, values: Tensor, indices: Tensor,
                   bias: Tensor | None, rows: int, block: int, *pairs: Sequence[int]) -> Resolved:  # fmt: skip
    """Return the geometry and the output's shape; raise PomonaError where the arguments do not fit together.

    `resolve_shapes` is `output_shape`, or its cached form where shapes are plain numbers.
    """
    dtypes, bias_shape = (x.dtype, values.dtype, indices.dtype), None if bias is None else bias.shape
    resolved = resolve_shapes(x.shape, values.shape, indices.shape, bias_shape, dtypes, rows, block, *map(tuple, pairs))
    validate_packed_memory(values, indices)
    if x.device != values.device:
        raise PomonaError(f"x is on {x.device}, the packed weight on {values.device}: move one of them.")
    return resolved


def output_shape(x: torch.Size, values: torch.Size, indices: torch.Size, bias: torch.Size | None,
                 dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], rows: int, block: int,
                 *pairs: tuple[int, ...]) -> Resolved:  # fmt: skip
    """Return the geometry and the output's shape from shapes and dtypes; raise PomonaError where these do not fit."""
    if len(x) != 4 or not dtypes[0].is_floating_point:
        raise PomonaError(f"x {tuple(x)} of {dtypes[0]} is not a batch of images.")
    geometry = ConvGeometry.from_pairs(*pairs)
    images, channels, height, width = x
    validate_packed_shapes(values, indices, *dtypes[1:], rows, channels * geometry.taps, block)
    if bias is not None and bias != (rows,):
        raise PomonaError(f"the bias has shape {tuple(bias)} where {(rows,)} is needed.")
    out_height, out_width = geometry.output_size((height, width))
    if out_height <= 0 or out_width <= 0:
        kernel = "×".join(map(str, geometry.kernel))
        raise PomonaError(f"an image of {height}×{width} is too small for a kernel of {kernel}.")
    return geometry, torch.Size((images, rows, out_height, out_width))


cached_output_shape = cache(output_shape)  # computed at every call, it would take much of the host's time

balanced_conv2d = register_operator(
    "balanced_conv2d(Tensor x, Tensor values, Tensor indices, Tensor? bias, int rows, int block, int[2] kernel, "
    "int[2] stride, int[2] padding, int[2] dilation, bool relu=False) -> Tensor",
    compute_conv2d,
    fake_conv2d,
)
