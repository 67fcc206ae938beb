"""A convolution with a packed weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import PomonaError
from ..conv_geometry import ConvGeometry
from ..cuda.conv2d import supports_convolution
from ..ops import balanced_conv2d, unstructured_conv2d
from ..packed_tensor import PackedTensor
from ..unstructured import BAND_COLUMNS, UnstructuredTensor
from .base import WHOLE_LAYER_DEVICES, PackedWeightLayer, cast_for_autocast, is_channels_last, needs_gradient


class PackedConv2d(PackedWeightLayer):
    """A convolution as the product of a packed weight, out × (in · kh · kw), with shifted views of its input.

    The input is copied once: all images after each other, with a gap of zeros between lines that is wide enough to pad
    the line before it on the right and the line after it on the left. The inputs of every column of the matrix are then
    one contiguous run that starts at the column's own offset, and nothing is unfolded.

    Images may have any memory format, and the output is contiguous along its lines. `dense` returns the layer in the
    memory format of the original weight.
    """

    options = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "padding_mode")
    out_channels: int
    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    padding_mode: str
    channels_last = False  # whether the dense weight is in that memory format

    def __init__(self, layer: nn.Conv2d, weight: PackedTensor) -> None:
        super().__init__(layer, weight)
        self.border = list(layer._reversed_padding_repeated_twice)  # left, right, top, bottom, as `F.pad` takes them
        padding = self.border[2], self.border[0]
        self.geometry = ConvGeometry(self.kernel_size, self.stride, padding, self.dilation)
        self.channels_last = is_channels_last(layer.weight)  # a `torch.memory_format` cannot be in a file of torch.save

    def forward(self, input: Tensor, relu: bool = False) -> Tensor:
        x = cast_for_autocast(input)
        if needs_gradient(x):
            y = F.conv2d(
                self.pad(x), self.unpack_for_autograd("weight", x.dtype), self.bias, self.stride, 0, self.dilation
            )
            return y.relu() if relu else y
        images = x if x.ndim == 4 else x.unsqueeze(0)
        if self.has_whole_operator(images):
            y = self.convolve_whole(images, relu)
        elif self.has_direct_operator(images):
            y = self.convolve_direct(images, relu)
        elif max(self.stride) == 1 or self.kernel_size == (1, 1):
            y = self.convolve_shifted(images, relu)
        else:
            y = self.convolve_unfolded(images, relu)
        return y if x.ndim == 4 else y.squeeze(0)

    def pad(self, x: Tensor) -> Tensor:
        """Return the images with their border."""
        return F.pad(x, self.border, mode="constant" if self.padding_mode == "zeros" else self.padding_mode)

    def has_symmetric_zero_border(self) -> bool:
        """Return whether the border is of zeros and as wide on both sides."""
        left, right, top, bottom = self.border
        return self.padding_mode == "zeros" and left == right and top == bottom

    def has_whole_operator(self, x: Tensor) -> bool:
        """Return whether one kernel computes the whole convolution of these images."""
        if x.device.type not in WHOLE_LAYER_DEVICES or not self.has_symmetric_zero_border():
            return False
        values, block = self.read_buffer("weight_values"), self.blocks.get("weight")
        if block is None:  # not balanced
            return False
        return x.dtype == values.dtype and supports_convolution(x.dtype, values.shape[2], block, self.geometry)

    def convolve_whole(self, x: Tensor, relu: bool) -> Tensor:
        """Return the convolution by the operator that gathers the columns from the images itself."""
        rows, block = self.out_channels, self.blocks["weight"]
        packed = self.read_buffer("weight_values"), self.read_buffer("weight_indices"), self.read_buffer("bias")
        return balanced_conv2d(x, *packed, rows, block, *self.geometry.pairs, relu)

    def has_direct_operator(self, x: Tensor) -> bool:
        """Return whether the CPU's kernel for unstructured weights computes the convolution of these images."""
        columns = self.sizes["weight"][1]
        unstructured = self.formats["weight"] == UnstructuredTensor.format_name and columns <= BAND_COLUMNS
        return unstructured and self.has_symmetric_zero_border() and x.device.type == "cpu"

    def convolve_direct(self, x: Tensor, relu: bool) -> Tensor:
        """Return the convolution by the operator that adds up runs of pixels for each survivor."""
        parts, bias = self.read_parts("weight"), self.read_buffer("bias")
        return unstructured_conv2d(x, *parts, bias, self.out_channels, *self.geometry.pairs, relu)

    def convolve_shifted(self, x: Tensor, relu: bool) -> Tensor:
        """Return the convolution of stride 1, or of a 1×1 kernel: every column is the input at its own offset."""
        (kh, kw), (dh, dw) = self.kernel_size, self.dilation
        if self.has_symmetric_zero_border():
            pw, ph = self.border[0], self.border[2]
        else:
            x, pw, ph = self.pad(x), 0, 0
        if max(self.stride) > 1:  # only for a 1×1 kernel
            x = F.pad(x, (pw, pw, ph, ph))[:, :, :: self.stride[0], :: self.stride[1]]
            pw = ph = 0
        n, channels, height, width = x.shape
        out_height, out_width = height + 2 * ph - dh * (kh - 1), width + 2 * pw - dw * (kw - 1)
        if out_height <= 0 or out_width <= 0:
            raise PomonaError(f"an image of {height}×{width} is too small for a kernel of {kh}×{kw}.")
        pitch, lines = width + pw, height + ph
        plane = (n * lines + ph) * pitch + pw
        padded = x.new_zeros(channels, plane)
        inside = padded.as_strided((channels, n, height, width), (plane, lines * pitch, pitch, 1), ph * pitch + pw)
        inside.copy_(x.transpose(0, 1))
        length = ((n - 1) * lines + out_height - 1) * pitch + out_width if n else 0
        views = padded.as_strided((channels, kh, kw, length), (plane, dh * pitch, dw, 1))
        y = self.multiply_packed("weight", views, self.bias, relu, transposed=True)
        return y.as_strided((n, self.out_channels, out_height, out_width), (lines * pitch, length, pitch, 1))

    def convolve_unfolded(self, x: Tensor, relu: bool) -> Tensor:
        """Return the convolution of any stride, with its columns written to memory."""
        padded = self.pad(x)
        out_height, out_width = (
            (padded.shape[2 + i] - self.dilation[i] * (self.kernel_size[i] - 1) - 1) // self.stride[i] + 1
            for i in range(2)
        )
        columns = F.unfold(padded, self.kernel_size, self.dilation, 0, self.stride)
        columns = columns.transpose(0, 1).flatten(1)
        y = self.multiply_packed("weight", columns, self.bias, relu, transposed=True)
        return y.view(self.out_channels, x.shape[0], out_height, out_width).transpose(0, 1)

    @torch.no_grad()
    def dense(self) -> nn.Module:
        layer = super().dense()
        return layer.to(memory_format=torch.channels_last) if self.channels_last else layer  # type: ignore[call-overload]

    def empty_dense_layer(self) -> nn.Conv2d:
        options = {name: getattr(self, name) for name in self.options}
        return nn.Conv2d(**options, bias=self.bias is not None, device="meta")
