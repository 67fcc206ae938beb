"""Triton kernels for convolutions with few channels, for which cuDNN's tiles stay mostly empty.

With channels last, the inputs of neighbouring taps in a row are contiguous in memory. The output pixels are therefore
grouped into patches of neighbouring pixels, each patch reads one window of the input, and a convolution is one matrix
product for each row of the windows: (patches × read size) · (read size × outputs of a patch). The weight is zero for
columns of the window that a pixel of the patch does not see. Two pixels see four columns of 3×3 taps, so the read size
is a power of two, as the products need it. The gradient of the input is such a product too, with the taps reversed;
with a stride of 2, each patch of 2×2 pixels comes from a window of 2×2. Weights are read in float32, as the optimizer
stores them, and rounded in the kernel. Sums are taken in a fixed order: the same numbers give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .convolution_shapes import allocate_outputs, tile_config

# Programs for the gradient of a weight: three for every two multiprocessors of a large GPU. More of them would be
# faster for a single run, but not for concurrent runs.
MAX_GRADIENT_PROGRAMS = 192
MIN_PATCH_BLOCKS = 16  # blocks of patches that each of these programs sums at least


class PatchGeometry(NamedTuple):
    """The position of a product's input windows relative to its patches of output pixels."""

    rows: int  # of a patch, in pixels
    columns: int  # of a patch, in pixels
    row_step: int  # rows from one window to the next
    column_step: int  # columns from one window to the next
    padding: int  # rows and columns of a window before its patch
    first_tap: int  # the tap of the first pixel for the first row or column of the window
    tap_window_step: int  # how the tap changes with the row or column of the window
    tap_pixel_step: int  # how the tap changes with the pixel of the patch
    window_rows: int
    window_columns: int

    @classmethod
    def forward(cls, size: int, stride: int, rows: int, columns: int) -> PatchGeometry:
        """Return the geometry of a convolution: pixel i sees column i · stride + tap."""
        window_rows, window_columns = ((count - 1) * stride + size for count in (rows, columns))
        steps = rows * stride, columns * stride
        return cls(rows, columns, *steps, size // 2, 0, 1, -stride, window_rows, window_columns)

    @classmethod
    def backward(cls, size: int, stride: int, rows: int, columns: int) -> PatchGeometry:
        """Return the geometry of an input gradient: pixel i · stride + tap is seen by column i.

        A patch has the size of the stride, or a multiple of it.
        """
        padding = size // 2 // stride
        window_rows, window_columns = (padding + (count - 1 + size // 2) // stride + 1 for count in (rows, columns))
        first_tap = size // 2 + padding * stride
        steps = rows // stride, columns // stride
        return cls(rows, columns, *steps, padding, first_tap, -stride, 1, window_rows, window_columns)


@triton.jit
def read_windows(
    x, image, row, column, exists,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr,
    READ_COLUMNS: tl.constexpr, READ_SIZE: tl.constexpr,
):  # fmt: skip
    """Read READ_COLUMNS columns of one row of each window, with zeros outside of the image."""
    j = tl.arange(0, READ_SIZE)
    s = column[:, None] + (j // INPUTS)[None, :]
    inside = (exists & (row >= 0) & (row < HEIGHT))[:, None] & (s >= 0) & (s < WIDTH)
    at = ((image * HEIGHT + row) * WIDTH + column) * INPUTS
    return tl.load(x + at[:, None] + j[None, :], mask=inside & (j < READ_COLUMNS * INPUTS)[None, :], other=0.0)


@triton.jit
def product_kernel(
    x, w, y, sums, patches, stride_out, stride_in, stride_tap,
    IN_HEIGHT: tl.constexpr, IN_WIDTH: tl.constexpr, INPUTS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROW_STEP: tl.constexpr, COLUMN_STEP: tl.constexpr, PADDING: tl.constexpr,
    FIRST_TAP: tl.constexpr, TAP_WINDOW_STEP: tl.constexpr, TAP_PIXEL_STEP: tl.constexpr,
    WINDOW_ROWS: tl.constexpr, WINDOW_COLUMNS: tl.constexpr,
    READ_COLUMNS: tl.constexpr, READ_SIZE: tl.constexpr, CHANNEL_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute CHANNEL_BLOCK output channels of BLOCK patches of y (HEIGHT × WIDTH) from x (IN_HEIGHT × IN_WIDTH)."""
    patches_per_row: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    patches_per_image: tl.constexpr = (HEIGHT + ROWS - 1) // ROWS * patches_per_row
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    image = p // patches_per_image
    patch_row, patch_column = p % patches_per_image // patches_per_row, p % patches_per_row
    k = tl.arange(0, ROWS * COLUMNS * CHANNEL_BLOCK)
    output = tl.program_id(1) * CHANNEL_BLOCK + k % CHANNEL_BLOCK
    pixel_row, pixel_column = k // CHANNEL_BLOCK // COLUMNS, k // CHANNEL_BLOCK % COLUMNS  # within the patch
    j = tl.arange(0, READ_SIZE)
    total = tl.zeros([BLOCK, ROWS * COLUMNS * CHANNEL_BLOCK], tl.float32)
    for r in tl.static_range(WINDOW_ROWS):
        for c in tl.static_range(0, WINDOW_COLUMNS, READ_COLUMNS):
            row, column = patch_row * ROW_STEP - PADDING + r, patch_column * COLUMN_STEP - PADDING + c
            tile = read_windows(
                x, image, row, column, p < patches, IN_HEIGHT, IN_WIDTH, INPUTS, READ_COLUMNS, READ_SIZE
            )
            tap_r = (FIRST_TAP + r * TAP_WINDOW_STEP + pixel_row * TAP_PIXEL_STEP)[None, :]
            tap_c = FIRST_TAP + (c + j // INPUTS)[:, None] * TAP_WINDOW_STEP + (pixel_column * TAP_PIXEL_STEP)[None, :]
            seen = (tap_r >= 0) & (tap_r < SIZE) & (tap_c >= 0) & (tap_c < SIZE) & (j < READ_COLUMNS * INPUTS)[:, None]
            at = (
                (j % INPUTS)[:, None] * stride_in + (tap_r * SIZE + tap_c) * stride_tap + (output * stride_out)[None, :]
            )
            weight = tl.load(w + at, mask=seen, other=0.0).to(tile.dtype)
            total = tl.dot(tile, weight, total)
    row = patch_row[:, None] * ROWS + pixel_row[None, :]
    column = patch_column[:, None] * COLUMNS + pixel_column[None, :]
    at = ((image[:, None] * HEIGHT + row) * WIDTH + column) * OUTPUTS + output[None, :]
    inside = (p < patches)[:, None] & (row < HEIGHT) & (column < WIDTH)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)
    if sums is not None:  # over the outputs before rounding; patches beyond the last are zero
        if WIDTH % COLUMNS > 0:
            total = tl.where(inside, total, 0.0)
        at = (tl.program_id(0) * COLUMNS + pixel_column) * OUTPUTS + output
        tl.store(sums + at, tl.sum(total, 0))
        tl.store(sums + tl.num_programs(0) * COLUMNS * OUTPUTS + at, tl.sum(total * total, 0))


@triton.jit
def statistics_kernel(
    parts, mean, scale, running_mean, running_var, batches, rows, count, momentum, eps,
    CHANNELS: tl.constexpr, CHANNEL_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute mean and 1/σ of CHANNEL_BLOCK channels from sums of y and y², and update the running statistics."""
    k = tl.program_id(0) * CHANNEL_BLOCK + tl.arange(0, CHANNEL_BLOCK)
    old_mean, old_var = tl.load(running_mean + k), tl.load(running_var + k)
    r = tl.arange(0, BLOCK)[:, None]
    first = tl.zeros([BLOCK, CHANNEL_BLOCK], tl.float32)
    second = tl.zeros([BLOCK, CHANNEL_BLOCK], tl.float32)
    for start in range(0, rows, BLOCK):
        at = (start + r) * CHANNELS + k[None, :]
        first += tl.load(parts + at, mask=start + r < rows, other=0.0)
        second += tl.load(parts + rows * CHANNELS + at, mask=start + r < rows, other=0.0)
    new_mean = tl.sum(first, 0) / count
    new_var = tl.maximum(tl.sum(second, 0) / count - new_mean * new_mean, 0.0)
    tl.store(mean + k, new_mean)
    tl.store(scale + k, 1 / tl.sqrt(new_var + eps))
    tl.store(running_mean + k, old_mean + (new_mean - old_mean) * momentum)
    tl.store(running_var + k, old_var + (new_var * (count / (count - 1)) - old_var) * momentum)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)


@triton.jit
def read_input_and_gradient(
    x, g, p, end, r, c,
    IN_HEIGHT: tl.constexpr, IN_WIDTH: tl.constexpr, INPUTS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr, READ_COLUMNS: tl.constexpr, READ_SIZE: tl.constexpr,
):  # fmt: skip
    """Read row r of the windows of patches p, from column c on, and the gradients of the patches."""
    patches_per_row: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    image, patch_row, patch_column = p // (patches_per_row * HEIGHT), p // patches_per_row % HEIGHT, p % patches_per_row
    row, column = patch_row * STRIDE - SIZE // 2 + r, patch_column * (COLUMNS * STRIDE) - SIZE // 2 + c
    tile = read_windows(x, image, row, column, p < end, IN_HEIGHT, IN_WIDTH, INPUTS, READ_COLUMNS, READ_SIZE)
    return tile, read_windows(
        g, image, patch_row, patch_column * COLUMNS, p < end, HEIGHT, WIDTH, OUTPUTS, COLUMNS, COLUMNS * OUTPUTS
    )


@triton.jit
def weight_kernel(
    x, g, parts, patches, share,
    IN_HEIGHT: tl.constexpr, IN_WIDTH: tl.constexpr, INPUTS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr, WINDOW_COLUMNS: tl.constexpr, READ_COLUMNS: tl.constexpr, READ_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute what one share of the patches adds to a weight's gradient, for READ_COLUMNS columns of a window row."""
    r, c = tl.program_id(1), tl.program_id(2) * READ_COLUMNS
    start = tl.program_id(0) * share
    end = tl.minimum(start + share, patches)
    p = start + tl.arange(0, BLOCK)
    total = tl.zeros([READ_SIZE, COLUMNS * OUTPUTS], tl.float32)
    tile, gradient = read_input_and_gradient(
        x, g, p, end, r, c,
        IN_HEIGHT, IN_WIDTH, INPUTS, HEIGHT, WIDTH, OUTPUTS, SIZE, STRIDE, COLUMNS, READ_COLUMNS, READ_SIZE,
    )  # fmt: skip
    for _ in range(start, end, BLOCK):
        p += BLOCK  # the next tiles are read while these are multiplied
        next_tile, next_gradient = read_input_and_gradient(
            x, g, p, end, r, c,
            IN_HEIGHT, IN_WIDTH, INPUTS, HEIGHT, WIDTH, OUTPUTS, SIZE, STRIDE, COLUMNS, READ_COLUMNS, READ_SIZE,
        )  # fmt: skip
        total = tl.dot(tl.trans(tile), gradient, total)
        tile, gradient = next_tile, next_gradient
    j, k = tl.arange(0, READ_SIZE), tl.arange(0, COLUMNS * OUTPUTS)
    at = (((tl.program_id(0) * COLUMNS * OUTPUTS + k) * SIZE + r) * WINDOW_COLUMNS + c) * INPUTS
    tl.store(parts + at[:, None] + j[None, :], tl.trans(total), mask=(j < READ_COLUMNS * INPUTS)[None, :])


@triton.jit
def sum_kernel(
    parts, y, shares, count,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr, WINDOW_COLUMNS: tl.constexpr, MAX_SHARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the parts of a weight's gradient over the shares and over the pixels of a patch into y."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.arange(0, MAX_SHARES)[:, None]
    tap_column, output_tap_row = i // INPUTS % SIZE, i // INPUTS // SIZE
    total = tl.zeros([MAX_SHARES, BLOCK], tl.float32)
    for b in tl.static_range(COLUMNS):
        at = ((b * OUTPUTS * SIZE + output_tap_row) * WINDOW_COLUMNS + b * STRIDE + tap_column) * INPUTS + i % INPUTS
        at = s * (COLUMNS * OUTPUTS * SIZE * WINDOW_COLUMNS * INPUTS) + at[None, :]
        total += tl.load(parts + at, mask=(s < shares) & (i < count)[None, :], other=0.0)
    tl.store(y + i, tl.sum(total, 0), mask=i < count)


def forward(x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Return the convolution and its channel sums.

    The warps of a program wait for each other to take the sums, so few of them are faster.
    """
    y, sums = allocate_outputs(x, weight, stride)
    columns, block = tile_config(weight, stride)
    launch_product(x, weight, y, sums, PatchGeometry.forward(weight.shape[2], stride, 1, columns), block, 4)
    return y, sums


def input_gradient(g: Tensor, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Return the gradient of the input."""
    columns = 2 if stride == 2 else tile_config(weight, stride)[0]
    geometry = PatchGeometry.backward(weight.shape[2], stride, stride, columns)
    y = torch.empty_like(x, memory_format=torch.channels_last)
    launch_product(g, weight.transpose(0, 1), y, None, geometry, 128, 4 if max(weight.shape[:2]) < 32 else 8)
    return y


def launch_product(
    x: Tensor, weight: Tensor, y: Tensor, sums: Tensor | None, geometry: PatchGeometry, block: int, warps: int
) -> None:
    """Launch the product kernel with `block` patches and `warps` warps for each program."""
    (count, inputs, *image), (_, outputs, height, width), size = x.shape, y.shape, weight.shape[2]
    read_columns, read_size = read_config(geometry.window_columns, inputs)
    part = min(outputs, 64 // (geometry.rows * geometry.columns))
    patches = count * triton.cdiv(height, geometry.rows) * triton.cdiv(width, geometry.columns)
    grid = triton.cdiv(patches, block), outputs // part
    stride_out, stride_in, _, stride_tap = weight.stride()
    shapes = *image, inputs, height, width, outputs, size, *geometry, read_columns, read_size, part, block
    product_kernel[grid](x, weight, y, sums, patches, stride_out, stride_in, stride_tap, *shapes, num_warps=warps)


def statistics(
    sums: Tensor, count: int, running_mean: Tensor, running_var: Tensor, batches: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Return mean and 1/σ of a batch norm's channels, and update its running statistics."""
    mean, scale = torch.empty_like(running_mean), torch.empty_like(running_mean)
    (_, rows, channels), part = sums.shape, 4
    numbers = rows, count, momentum, eps, channels, part, min(1024, triton.next_power_of_2(rows))
    state = running_mean, running_var, batches
    statistics_kernel[(channels // part,)](sums, mean, scale, *state, *numbers, num_warps=8)
    return mean, scale


def weight_gradient(g: Tensor, x: Tensor, weight: Tensor, stride: int, shares: int | None = None) -> Tensor:
    """Return the gradient of the weight in float32, summed by `shares` programs."""
    (outputs, inputs, size, _), (count, _, height, width) = weight.shape, g.shape
    columns, block = tile_config(weight, stride)[0], 64
    window_columns = (columns - 1) * stride + size
    read_columns, read_size = read_config(window_columns, inputs)
    patches = count * height * triton.cdiv(width, columns)
    shares = shares or min(
        MAX_GRADIENT_PROGRAMS // max(3, size * window_columns // read_columns),
        triton.cdiv(patches, MIN_PATCH_BLOCKS // stride * block),
    )
    share = triton.cdiv(triton.cdiv(patches, shares), block) * block
    shares = triton.cdiv(patches, share)
    parts = weight.new_empty(shares, columns, outputs, size, window_columns, inputs)
    windows = columns, window_columns, read_columns, read_size
    shapes = *x.shape[2:], inputs, height, width, outputs, size, stride, *windows, block
    grid = shares, size, window_columns // read_columns
    # One stage, because a pipeline would bypass the L1 cache, which holds what neighbouring windows have read.
    weight_kernel[grid](x, g, parts, patches, share, *shapes, num_stages=1)
    y, sum_block = weight.new_empty(outputs, size, size, inputs), 64
    shapes = inputs, outputs, size, stride, columns, window_columns, triton.next_power_of_2(shares)
    sum_kernel[(triton.cdiv(y.numel(), sum_block),)](parts, y, shares, y.numel(), *shapes, sum_block)
    return y.permute(0, 3, 1, 2)


def read_config(window_columns: int, inputs: int) -> tuple[int, int]:
    """Return how many columns of a window are read at once, and how many values that is as a power of two."""
    read_columns = window_columns if inputs < 32 or (inputs < 64 and window_columns != 3) else 1
    return read_columns, triton.next_power_of_2(max(16, read_columns * inputs))
