"""Triton kernels of `layer_gradients` for images of 16 bits with their channels last.

Each program reads and writes one example, so what is computed for an example depends neither on its place in the batch
nor on the other examples. All sums are in float32 and in a fixed order.

A convolution's weight gradient is, for each example and each kernel position, the matrix product of the output gradient
and the shifted inputs over all pixels of all views. The inputs are read at their shifted places, so no copy of them is
made for each kernel position.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..models import weight_standardization

MIN_SQUARES = tl.constexpr(weight_standardization.MIN_SQUARES)
CHANNEL_PIXELS = 8192  # values of a tile of pixels × channels in a group norm


# ---- group norm


def group_norm(
    inputs: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the group norm of inputs, and the mean and 1/σ of each group, of shape (rows, groups)."""
    rows, channels, height, width = inputs.shape
    outputs = torch.empty_like(inputs)
    mean, scale = torch.empty((2, rows, groups), device=inputs.device)
    constants = norm_constants(channels, groups, weight is not None, bias is not None)
    with torch.cuda.device_of(inputs):
        group_norm_kernel[(rows,)](
            inputs, outputs, weight, bias, mean, scale, height * width, eps, **constants, num_warps=8
        )
    return outputs, mean, scale


def group_norm_gradients(
    gradient: Tensor, inputs: Tensor, mean: Tensor, scale: Tensor, groups: int, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a group norm's inputs, and of weight and bias for each row, of shape (rows, channels)."""
    rows, channels, height, width = inputs.shape
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    outputs = torch.empty_like(inputs)
    for_weight, for_bias = torch.empty((2, rows, channels), device=inputs.device)
    places = gradient, inputs, outputs, weight, mean, scale, for_weight, for_bias
    constants = norm_constants(channels, groups, weight is not None, False)
    del constants["HAS_BIAS"]
    with torch.cuda.device_of(inputs):
        group_norm_gradient_kernel[(rows,)](*places, height * width, **constants, num_warps=8)
    return outputs, for_weight, for_bias


def norm_constants(channels: int, groups: int, has_weight: bool, has_bias: bool) -> dict[str, Any]:
    """Return the constants of the group norm kernels; channels and groups are powers of two."""
    return {
        "CHANNELS": channels,
        "GROUP": channels // groups,
        "HAS_WEIGHT": has_weight,
        "HAS_BIAS": has_bias,
        "PIXELS": max(CHANNEL_PIXELS // channels, 1),
    }


@triton.jit
def sum_groups(values, GROUP: tl.constexpr, CHANNELS: tl.constexpr):
    """Return for each channel the sum over its group; groups have GROUP neighbouring channels."""
    groups: tl.constexpr = CHANNELS // GROUP
    sums = tl.sum(tl.reshape(values, (groups, GROUP)), 1)
    return tl.reshape(tl.broadcast_to(sums[:, None], (groups, GROUP)), (CHANNELS,))


@triton.jit
def group_norm_kernel(
    inputs,
    outputs,
    weight,
    bias,
    mean,
    scale,
    pixels,
    eps,
    CHANNELS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """Normalize one image."""
    row = tl.program_id(0).to(tl.int64)
    channel, pixel = tl.arange(0, CHANNELS), tl.arange(0, PIXELS)
    place = row * pixels * CHANNELS + pixel[:, None] * CHANNELS + channel[None, :]
    sums = tl.zeros((CHANNELS,), tl.float32)
    squares = tl.zeros((CHANNELS,), tl.float32)
    for start in range(0, pixels, PIXELS):
        inside = ((start + pixel) < pixels)[:, None]
        x = tl.load(inputs + place + start * CHANNELS, mask=inside, other=0.0).to(tl.float32)
        sums += tl.sum(x, 0)
        squares += tl.sum(x * x, 0)
    count = pixels * GROUP
    centre = sum_groups(sums, GROUP, CHANNELS) / count
    variance = tl.maximum(sum_groups(squares, GROUP, CHANNELS) / count - centre * centre, 0.0)
    factor = 1.0 / tl.sqrt(variance + eps)
    groups = CHANNELS // GROUP
    is_first = channel % GROUP == 0
    tl.store(mean + row * groups + channel // GROUP, centre, mask=is_first)
    tl.store(scale + row * groups + channel // GROUP, factor, mask=is_first)
    shift = -centre * factor
    if HAS_WEIGHT:
        values = tl.load(weight + channel).to(tl.float32)
        factor *= values
        shift *= values
    if HAS_BIAS:
        shift += tl.load(bias + channel).to(tl.float32)
    for start in range(0, pixels, PIXELS):
        inside = ((start + pixel) < pixels)[:, None]
        x = tl.load(inputs + place + start * CHANNELS, mask=inside, other=0.0).to(tl.float32)
        y = x * factor[None, :] + shift[None, :]
        tl.store(outputs + place + start * CHANNELS, y.to(outputs.dtype.element_ty), mask=inside)


@triton.jit
def group_norm_gradient_kernel(
    gradient,
    inputs,
    outputs,
    weight,
    mean,
    scale,
    for_weight,
    for_bias,
    pixels,
    CHANNELS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """Compute the gradients of one image."""
    row = tl.program_id(0).to(tl.int64)
    channel, pixel = tl.arange(0, CHANNELS), tl.arange(0, PIXELS)
    place = row * pixels * CHANNELS + pixel[:, None] * CHANNELS + channel[None, :]
    groups = CHANNELS // GROUP
    centre = tl.load(mean + row * groups + channel // GROUP)
    factor = tl.load(scale + row * groups + channel // GROUP)
    sums = tl.zeros((CHANNELS,), tl.float32)
    products = tl.zeros((CHANNELS,), tl.float32)
    for start in range(0, pixels, PIXELS):
        inside = ((start + pixel) < pixels)[:, None]
        g = tl.load(gradient + place + start * CHANNELS, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(inputs + place + start * CHANNELS, mask=inside, other=0.0).to(tl.float32)
        sums += tl.sum(g, 0)
        products += tl.sum(g * ((x - centre[None, :]) * factor[None, :]), 0)
    tl.store(for_weight + row * CHANNELS + channel, products)
    tl.store(for_bias + row * CHANNELS + channel, sums)
    values = tl.full((CHANNELS,), 1.0, tl.float32)
    if HAS_WEIGHT:
        values = tl.load(weight + channel).to(tl.float32)
    count = pixels * GROUP
    flat = sum_groups(sums * values, GROUP, CHANNELS) / count
    along = sum_groups(products * values, GROUP, CHANNELS) / count
    for start in range(0, pixels, PIXELS):
        inside = ((start + pixel) < pixels)[:, None]
        g = tl.load(gradient + place + start * CHANNELS, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(inputs + place + start * CHANNELS, mask=inside, other=0.0).to(tl.float32)
        x = (x - centre[None, :]) * factor[None, :]
        found = (g * values[None, :] - flat[None, :] - x * along[None, :]) * factor[None, :]
        tl.store(outputs + place + start * CHANNELS, found.to(outputs.dtype.element_ty), mask=inside)


# ---- convolution


def conv2d_weight_gradient(inputs: Tensor, gradient: Tensor, geometry: Any, rows: int) -> Tensor:
    """Return the gradients of a convolution's weight, of shape (rows, outputs, channels, *kernel)."""
    inputs, gradient = (part.contiguous(memory_format=torch.channels_last) for part in (inputs, gradient))
    count, channels, in_height, in_width = inputs.shape
    outputs, height, width = gradient.shape[1:]
    positions = geometry.kernel[0] * geometry.kernel[1]
    found = torch.empty(rows, outputs, positions, channels, dtype=inputs.dtype, device=inputs.device)
    block_outputs, block_channels = (min(max(triton.next_power_of_2(n), 16), 128) for n in (outputs, channels))
    tiles = triton.cdiv(outputs, block_outputs) * triton.cdiv(channels, block_channels)
    sizes = {"HEIGHT": height, "WIDTH": width, "IN_HEIGHT": in_height, "IN_WIDTH": in_width}
    with torch.cuda.device_of(inputs):
        conv2d_weight_gradient_kernel[(positions * tiles, rows)](
            inputs,
            gradient,
            found,
            count // rows * height * width,
            *geometry.stride,
            *geometry.padding,
            *geometry.dilation,
            **sizes,
            CHANNELS=channels,
            OUTPUTS=outputs,
            POSITIONS=positions,
            KERNEL_WIDTH=geometry.kernel[1],
            BLOCK_OUTPUTS=block_outputs,
            BLOCK_CHANNELS=block_channels,
            BLOCK_PIXELS=64,
            num_warps=8 if block_outputs * block_channels > 64 * 128 else 4,
            num_stages=4,
        )
    return found.view(rows, outputs, *geometry.kernel, channels).permute(0, 1, 4, 2, 3)


@triton.jit
def conv2d_weight_gradient_kernel(
    inputs,
    gradient,
    found,
    pixels,
    stride_y,
    stride_x,
    padding_y,
    padding_x,
    dilation_y,
    dilation_x,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    IN_HEIGHT: tl.constexpr,
    IN_WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    POSITIONS: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr,
):
    """Compute one tile of outputs × channels at one kernel position for one example, over `pixels` of all views."""
    row = tl.program_id(1).to(tl.int64)
    position = tl.program_id(0) % POSITIONS
    tile = tl.program_id(0) // POSITIONS
    channel_tiles: tl.constexpr = (CHANNELS + BLOCK_CHANNELS - 1) // BLOCK_CHANNELS
    output = tile // channel_tiles * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    channel = tile % channel_tiles * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    offset_y = position // KERNEL_WIDTH * dilation_y - padding_y
    offset_x = position % KERNEL_WIDTH * dilation_x - padding_x
    of_image: tl.constexpr = HEIGHT * WIDTH
    own_gradient = gradient + row * pixels * OUTPUTS
    own_inputs = inputs + row * (pixels // of_image) * IN_HEIGHT * IN_WIDTH * CHANNELS
    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_CHANNELS), tl.float32)
    for start in range(0, pixels, BLOCK_PIXELS):
        pixel = start + tl.arange(0, BLOCK_PIXELS)
        within = pixel % of_image
        y = within // WIDTH * stride_y + offset_y
        x = within % WIDTH * stride_x + offset_x
        source = (pixel // of_image * IN_HEIGHT + y) * IN_WIDTH + x
        is_inside = (pixel < pixels) & (y >= 0) & (y < IN_HEIGHT) & (x >= 0) & (x < IN_WIDTH)
        g = tl.load(
            own_gradient + pixel[:, None] * OUTPUTS + output[None, :],
            mask=(pixel < pixels)[:, None] & (output < OUTPUTS)[None, :],
            other=0.0,
        )
        v = tl.load(
            own_inputs + source[:, None] * CHANNELS + channel[None, :],
            mask=is_inside[:, None] & (channel < CHANNELS)[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(g), v, total)
    place = ((row * OUTPUTS + output[:, None]) * POSITIONS + position) * CHANNELS + channel[None, :]
    mask = (output < OUTPUTS)[:, None] & (channel < CHANNELS)[None, :]
    tl.store(found + place, total.to(found.dtype.element_ty), mask=mask)


# ---- weight standardization


def pull_back_standardization(gradients: Tensor, standardized: Tensor, norms: Tensor) -> Tensor:
    """Return the gradients of a weight from those of the standardized weight, contiguous, in the same dtype.

    The channels of the gradients may lie last in memory.
    """
    rows, outputs, channels, *kernel = gradients.shape
    positions = kernel[0] * kernel[1]
    last_gradients, last_standardized = gradients.permute(0, 1, 3, 4, 2), standardized.permute(0, 2, 3, 1)
    found = torch.empty(gradients.shape, dtype=gradients.dtype, device=gradients.device)
    with torch.cuda.device_of(gradients):
        pull_back_kernel[(outputs, rows)](
            last_gradients.contiguous(),
            last_standardized.contiguous(),
            norms,
            found,
            outputs,
            CHANNELS=channels,
            POSITIONS=positions,
            BLOCK_CHANNELS=triton.next_power_of_2(channels),
            BLOCK_POSITIONS=triton.next_power_of_2(positions),
            num_warps=4 if channels * positions <= 1024 else 8,
        )
    return found


@triton.jit
def pull_back_kernel(
    gradients,
    standardized,
    norms,
    found,
    outputs,
    CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_POSITIONS: tl.constexpr,
):
    """Pull back the gradient of one filter in one example, and put its channels first."""
    output, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position, channel = tl.arange(0, BLOCK_POSITIONS), tl.arange(0, BLOCK_CHANNELS)
    inside = (position < POSITIONS)[:, None] & (channel < CHANNELS)[None, :]
    source = position[:, None] * CHANNELS + channel[None, :]
    size: tl.constexpr = CHANNELS * POSITIONS
    start = (row * outputs + output) * size
    g = tl.load(gradients + start + source, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(standardized + output * size + source, mask=inside, other=0.0)
    norm = tl.load(norms + output)
    along = tl.sum(tl.sum(g * u, 1), 0)
    along = tl.where(norm * norm > MIN_SQUARES, along, 0.0)
    centre = tl.sum(tl.sum(g, 1), 0) / size
    value = ((g - centre - u * along) / norm).to(found.dtype.element_ty)
    target = channel[:, None] * POSITIONS + position[None, :]
    mask = (channel < CHANNELS)[:, None] & (position < POSITIONS)[None, :]
    tl.store(found + start + target, tl.trans(value), mask=mask)
