"""The operator `torch.ops.pomona.unstructured_conv2d`: a convolution whose weight has survivors anywhere.

The weight is an `UnstructuredTensor` of rows × (channels · kernel height · kernel width) with at most 65,536 columns. A
batch norm in evaluation mode and a ReLU may follow, in this order.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from ...errors import PomonaError
from ..conv_geometry import ConvGeometry
from ..cpu import backend as cpu
from ..unstructured import BAND_COLUMNS, validate_unstructured
from .dense_product import choose_dense_dtype, explain_missing_kernel, warn_about_dense_product
from .registration import register_operator
from .unstructured_product import unpack_unstructured_once


def compute_unstructured_conv2d(x: Tensor, values: Tensor, indices: Tensor, starts: Tensor, lanes: Tensor,
                                bias: Tensor | None, rows: int, kernel: Sequence[int], stride: Sequence[int],
                                padding: Sequence[int], dilation: Sequence[int], relu: bool = False,
                                norm_weight: Tensor | None = None, norm_bias: Tensor | None = None,
                                mean: Tensor | None = None, variance: Tensor | None = None, eps: float = 0.0,
                                ) -> Tensor:  # fmt: skip
    """Return the convolution by the CPU's kernel, or the dense one in float32 or wider where it has none."""
    parts, norm = (values, indices, starts, lanes), (norm_weight, norm_bias, mean, variance)
    geometry = ConvGeometry.from_pairs(kernel, stride, padding, dilation)
    shape = resolve_output_shape(x, *parts, bias, rows, geometry, norm)
    if x.device.type == "cpu" and x.numel() and rows:
        y = cpu.convolve_unstructured(x, *parts, bias, rows, geometry, relu, norm, eps)
        if y is not None:
            return y
        warn_about_dense_product(explain_missing_kernel(x))
    dtype, columns = choose_dense_dtype(x), x.shape[1] * geometry.taps
    weight = unpack_unstructured_once(*parts, rows, columns, dtype).view(rows, x.shape[1], *geometry.kernel)
    dense_bias = None if bias is None else bias.to(dtype)
    y = F.conv2d(x.to(dtype), weight, dense_bias, geometry.stride, geometry.padding, geometry.dilation)
    if mean is not None:
        scale, shift, center, spread = (None if p is None else p.to(dtype) for p in norm)
        y = F.batch_norm(y, center, spread, scale, shift, eps=eps)
    return (y.relu() if relu else y).to(x.dtype).contiguous().view(shape)


def fake_unstructured_conv2d(x: Tensor, values: Tensor, indices: Tensor, starts: Tensor, lanes: Tensor,
                             bias: Tensor | None, rows: int, kernel: Sequence[int], stride: Sequence[int],
                             padding: Sequence[int], dilation: Sequence[int], relu: bool = False,
                             norm_weight: Tensor | None = None, norm_bias: Tensor | None = None,
                             mean: Tensor | None = None, variance: Tensor | None = None, eps: float = 0.0,
                             ) -> Tensor:  # fmt: skip
    """Return an empty tensor of the output's shape, for torch.compile and torch.export."""
    geometry = ConvGeometry.from_pairs(kernel, stride, padding, dilation)
    norm = norm_weight, norm_bias, mean, variance
    return x.new_empty(resolve_output_shape(x, values, indices, starts, lanes, bias, rows, geometry, norm))


def resolve_output_shape(x: Tensor, values: Tensor, indices: Tensor, starts: Tensor, lanes: Tensor,
                         bias: Tensor | None, rows: int, geometry: ConvGeometry, norm: Sequence[Tensor | None],
                         ) -> tuple[int, int, int, int]:  # fmt: skip
    """Return the output's shape; raise PomonaError where the arguments do not fit together."""
    if x.ndim != 4 or not x.is_floating_point():
        raise PomonaError(f"x {tuple(x.shape)} of {x.dtype} is not a batch of images.")
    kernel, stride, padding, dilation = geometry.pairs
    if min(*kernel, *stride, *dilation) < 1 or min(padding) < 0:
        given = f"{kernel}, {stride}, {dilation} and {padding}"
        raise PomonaError(f"kernel, stride and dilation are at least 1 and padding at least 0, got {given}.")
    images, channels, height, width = x.shape
    columns = channels * geometry.taps
    if columns > BAND_COLUMNS:
        raise PomonaError(f"a convolution takes at most {BAND_COLUMNS:,} columns, got {columns:,}: unfold its input.")
    validate_unstructured(values, indices, starts, lanes, rows, columns)
    for parameter in (bias, *norm):
        if parameter is not None and parameter.shape != (rows,):
            raise PomonaError(f"the bias or norm has shape {tuple(parameter.shape)} where {(rows,)} is needed.")
        if parameter is not None and parameter.device != values.device:
            raise PomonaError(f"the bias or norm is on {parameter.device}, the packed weight on {values.device}.")
    if (norm[2] is None) != (norm[3] is None):
        raise PomonaError("a batch norm has a mean and a variance, got one of them.")
    if x.device != values.device:
        raise PomonaError(f"x is on {x.device}, the packed weight on {values.device}: move one of them.")
    out_height, out_width = geometry.output_size((height, width))
    if out_height <= 0 or out_width <= 0:
        size = "×".join(map(str, kernel))
        raise PomonaError(f"an image of {height}×{width} is too small for a kernel of {size}.")
    return images, rows, out_height, out_width


unstructured_conv2d = register_operator(
    "unstructured_conv2d(Tensor x, Tensor values, Tensor indices, Tensor starts, Tensor lanes, Tensor? bias, int rows, "
    "int[2] kernel, int[2] stride, int[2] padding, int[2] dilation, bool relu=False, Tensor? norm_weight=None, "
    "Tensor? norm_bias=None, Tensor? mean=None, Tensor? variance=None, float eps=0.0) -> Tensor",
    compute_unstructured_conv2d,
    fake_unstructured_conv2d,
)
