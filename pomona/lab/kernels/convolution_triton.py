"""Triton kernels for convolutions of few channels, where cuDNN's tiles stay mostly empty.

With channels last, what neighbouring taps read in a row is a single piece of memory. So the outputs are taken in
patches of some neighbouring pixels, each patch reads a window of the input, and a convolution is one product for each
row of the windows: (patches × piece) · (piece × outputs of a patch), where the weight is zero for columns that a
pixel of the patch does not see. Two pixels see four columns of 3×3 taps, and so a piece is a power of two, as
products want it. The gradient of the input is such a product too, with the taps in reverse; of a stride of 2, each
patch of 2×2 pixels comes from a window of 2×2. Weights are read in float32, as the optimizer keeps them, and rounded
on the way. Sums are taken in a fixed order: the same numbers give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .convolution import allocate_outputs, tile_config

# For a weight's gradient at most so many programs, three for every two multiprocessors of a large GPU, and at least so
# many blocks of patches for each. Alone it would be quicker with more of them, among packed runs it is not.
MAX_GRADIENT_PROGRAMS = 192
MIN_PATCH_BLOCKS = 16


class Windows(NamedTuple):
    """How the windows of a product lie to its patches."""

    rows: int  # of a patch, in pixels
    columns: int
    down: int  # from one window to the next
    across: int
    before: int  # rows and columns of a window before its patch
    tap: int  # that the first pixel has for the first column; both counts go on by:
    by_window: int
    by_pixel: int
    high: int  # a window's rows
    wide: int  # a window's columns

    @classmethod
    def forward(cls, size: int, stride: int, rows: int, columns: int) -> Windows:
        """Pixel i sees column i · stride + tap."""
        high, wide = ((count - 1) * stride + size for count in (rows, columns))
        return cls(rows, columns, rows * stride, columns * stride, size // 2, 0, 1, -stride, high, wide)

    @classmethod
    def backward(cls, size: int, stride: int, rows: int, columns: int) -> Windows:
        """Pixel i · stride + tap is seen by column i; a patch is as large as the stride, or a multiple of it."""
        before = size // 2 // stride
        high, wide = (before + (count - 1 + size // 2) // stride + 1 for count in (rows, columns))
        tap = size // 2 + before * stride
        return cls(rows, columns, rows // stride, columns // stride, before, tap, -stride, 1, high, wide)


@triton.jit
def read_windows(
    x, image, row, column, exists,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr, JOINT: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """JOINT columns of one row, for each window; zeros outside of the image."""
    j = tl.arange(0, PIECE)
    s = column[:, None] + (j // INPUTS)[None, :]
    inside = (exists & (row >= 0) & (row < HEIGHT))[:, None] & (s >= 0) & (s < WIDTH)
    at = ((image * HEIGHT + row) * WIDTH + column) * INPUTS
    return tl.load(x + at[:, None] + j[None, :], mask=inside & (j < JOINT * INPUTS)[None, :], other=0.0)


@triton.jit
def product_kernel(
    x, w, y, sums, patches, w_out, w_in, w_tap,
    TALL: tl.constexpr, BROAD: tl.constexpr, INPUTS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, BEFORE: tl.constexpr,
    TAP: tl.constexpr, BY_WINDOW: tl.constexpr, BY_PIXEL: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    JOINT: tl.constexpr, PIECE: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """PART of the outputs y (HEIGHT × WIDTH) of some patches, from x (TALL × BROAD)."""
    in_row: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    in_image: tl.constexpr = (HEIGHT + ROWS - 1) // ROWS * in_row
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    image, down, across = p // in_image, p % in_image // in_row, p % in_row
    k = tl.arange(0, ROWS * COLUMNS * PART)
    output = tl.program_id(1) * PART + k % PART
    below, beside = k // PART // COLUMNS, k // PART % COLUMNS  # the pixel within its patch
    j = tl.arange(0, PIECE)
    total = tl.zeros([BLOCK, ROWS * COLUMNS * PART], tl.float32)
    for r in tl.static_range(HIGH):
        for c in tl.static_range(0, WIDE, JOINT):
            row, column = down * DOWN - BEFORE + r, across * ACROSS - BEFORE + c
            tile = read_windows(x, image, row, column, p < patches, TALL, BROAD, INPUTS, JOINT, PIECE)
            tap_r = (TAP + r * BY_WINDOW + below * BY_PIXEL)[None, :]
            tap_c = TAP + (c + j // INPUTS)[:, None] * BY_WINDOW + (beside * BY_PIXEL)[None, :]
            seen = (tap_r >= 0) & (tap_r < SIZE) & (tap_c >= 0) & (tap_c < SIZE) & (j < JOINT * INPUTS)[:, None]
            at = (j % INPUTS)[:, None] * w_in + (tap_r * SIZE + tap_c) * w_tap + (output * w_out)[None, :]
            weight = tl.load(w + at, mask=seen, other=0.0).to(tile.dtype)
            total = tl.dot(tile, weight, total)
    row, column = down[:, None] * ROWS + below[None, :], across[:, None] * COLUMNS + beside[None, :]
    at = ((image[:, None] * HEIGHT + row) * WIDTH + column) * OUTPUTS + output[None, :]
    inside = (p < patches)[:, None] & (row < HEIGHT) & (column < WIDTH)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)
    if sums is not None:  # of what is not yet rounded; beyond the last patch all is zero
        if WIDTH % COLUMNS > 0:
            total = tl.where(inside, total, 0.0)
        at = (tl.program_id(0) * COLUMNS + beside) * OUTPUTS + output
        tl.store(sums + at, tl.sum(total, 0))
        tl.store(sums + tl.num_programs(0) * COLUMNS * OUTPUTS + at, tl.sum(total * total, 0))


@triton.jit
def statistics_kernel(
    parts, mean, scale, running_mean, running_var, batches, rows, count, momentum, eps,
    CHANNELS: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean and 1/σ of some channels from the sums of y and y², and the running ones moved on."""
    k = tl.program_id(0) * PART + tl.arange(0, PART)
    old_mean, old_var = tl.load(running_mean + k), tl.load(running_var + k)
    r = tl.arange(0, BLOCK)[:, None]
    first = tl.zeros([BLOCK, PART], tl.float32)
    second = tl.zeros([BLOCK, PART], tl.float32)
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
    TALL: tl.constexpr, BROAD: tl.constexpr, INPUTS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr, JOINT: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Row r of the windows of patches p from column c on, and the gradients of the patches."""
    in_row: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    image, down, across = p // (in_row * HEIGHT), p // in_row % HEIGHT, p % in_row
    row, column = down * STRIDE - SIZE // 2 + r, across * (COLUMNS * STRIDE) - SIZE // 2 + c
    tile = read_windows(x, image, row, column, p < end, TALL, BROAD, INPUTS, JOINT, PIECE)
    return tile, read_windows(
        g, image, down, across * COLUMNS, p < end, HEIGHT, WIDTH, OUTPUTS, COLUMNS, COLUMNS * OUTPUTS
    )


@triton.jit
def weight_kernel(
    x, g, parts, patches, share,
    TALL: tl.constexpr, BROAD: tl.constexpr, INPUTS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr, WIDE: tl.constexpr, JOINT: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What a share of the patches adds to the weight's gradient, for JOINT columns of a row of the windows."""
    r, c = tl.program_id(1), tl.program_id(2) * JOINT
    start = tl.program_id(0) * share
    end = tl.minimum(start + share, patches)
    p = start + tl.arange(0, BLOCK)
    total = tl.zeros([PIECE, COLUMNS * OUTPUTS], tl.float32)
    tile, gradient = read_input_and_gradient(
        x, g, p, end, r, c, TALL, BROAD, INPUTS, HEIGHT, WIDTH, OUTPUTS, SIZE, STRIDE, COLUMNS, JOINT, PIECE
    )
    for _ in range(start, end, BLOCK):
        p += BLOCK  # the next are read while these are multiplied
        further, gradients = read_input_and_gradient(
            x, g, p, end, r, c, TALL, BROAD, INPUTS, HEIGHT, WIDTH, OUTPUTS, SIZE, STRIDE, COLUMNS, JOINT, PIECE
        )
        total = tl.dot(tl.trans(tile), gradient, total)
        tile, gradient = further, gradients
    j, k = tl.arange(0, PIECE), tl.arange(0, COLUMNS * OUTPUTS)
    at = (((tl.program_id(0) * COLUMNS * OUTPUTS + k) * SIZE + r) * WIDE + c) * INPUTS
    tl.store(parts + at[:, None] + j[None, :], tl.trans(total), mask=(j < JOINT * INPUTS)[None, :])


@triton.jit
def sum_kernel(
    parts, y, shares, count,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr, WIDE: tl.constexpr, SHARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The weight's gradient y, the sum of its parts over the shares and over the pixels of a patch."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.arange(0, SHARES)[:, None]
    tap, above = i // INPUTS % SIZE, i // INPUTS // SIZE
    total = tl.zeros([SHARES, BLOCK], tl.float32)
    for b in tl.static_range(COLUMNS):
        at = ((b * OUTPUTS * SIZE + above) * WIDE + b * STRIDE + tap) * INPUTS + i % INPUTS
        at = s * (COLUMNS * OUTPUTS * SIZE * WIDE * INPUTS) + at[None, :]
        total += tl.load(parts + at, mask=(s < shares) & (i < count)[None, :], other=0.0)
    tl.store(y + i, tl.sum(total, 0), mask=i < count)


def forward(x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """The convolution, and the sums over it, for which warps wait for each other: the fewer, the better."""
    y, sums = allocate_outputs(x, weight, stride)
    columns, block = tile_config(weight, stride)
    launch_product(x, weight, y, sums, Windows.forward(weight.shape[2], stride, 1, columns), block, 4)
    return y, sums


def input_gradient(g: Tensor, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """The gradient of the input."""
    columns = 2 if stride == 2 else tile_config(weight, stride)[0]
    plan = Windows.backward(weight.shape[2], stride, stride, columns)
    y = torch.empty_like(x, memory_format=torch.channels_last)
    launch_product(g, weight.transpose(0, 1), y, None, plan, 128, 4 if max(weight.shape[:2]) < 32 else 8)
    return y


def launch_product(
    x: Tensor, weight: Tensor, y: Tensor, sums: Tensor | None, plan: Windows, block: int, warps: int
) -> None:
    """Run the product kernel, for so many patches a program."""
    (count, inputs, *image), (_, outputs, height, width), size = x.shape, y.shape, weight.shape[2]
    joint, piece = piece_size(plan.wide, inputs)
    part = min(outputs, 64 // (plan.rows * plan.columns))
    patches = count * triton.cdiv(height, plan.rows) * triton.cdiv(width, plan.columns)
    grid = triton.cdiv(patches, block), outputs // part
    out, into, _, tap = weight.stride()
    shapes = *image, inputs, height, width, outputs, size, *plan, joint, piece, part, block
    product_kernel[grid](x, weight, y, sums, patches, out, into, tap, *shapes, num_warps=warps)


def statistics(
    sums: Tensor, count: int, running_mean: Tensor, running_var: Tensor, batches: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Mean and 1/σ of a batch norm's channels."""
    mean, scale = torch.empty_like(running_mean), torch.empty_like(running_mean)
    (_, rows, channels), part = sums.shape, 4
    numbers = rows, count, momentum, eps, channels, part, min(1024, triton.next_power_of_2(rows))
    state = running_mean, running_var, batches
    statistics_kernel[(channels // part,)](sums, mean, scale, *state, *numbers, num_warps=8)
    return mean, scale


def weight_gradient(g: Tensor, x: Tensor, weight: Tensor, stride: int, shares: int | None = None) -> Tensor:
    """The gradient of the weight, in float32."""
    (outputs, inputs, size, _), (count, _, height, width) = weight.shape, g.shape
    columns, block = tile_config(weight, stride)[0], 64
    wide = (columns - 1) * stride + size
    joint, piece = piece_size(wide, inputs)
    patches = count * height * triton.cdiv(width, columns)
    shares = shares or min(
        MAX_GRADIENT_PROGRAMS // max(3, size * wide // joint), triton.cdiv(patches, MIN_PATCH_BLOCKS // stride * block)
    )
    share = triton.cdiv(triton.cdiv(patches, shares), block) * block
    shares = triton.cdiv(patches, share)
    parts = weight.new_empty(shares, columns, outputs, size, wide, inputs)
    shapes = *x.shape[2:], inputs, height, width, outputs, size, stride, columns, wide, joint, piece, block
    grid = shares, size, wide // joint
    # In one stage: a pipeline would read past the first cache, which has what other windows have read.
    weight_kernel[grid](x, g, parts, patches, share, *shapes, num_stages=1)
    y, cut = weight.new_empty(outputs, size, size, inputs), 64
    shapes = inputs, outputs, size, stride, columns, wide, triton.next_power_of_2(shares)
    sum_kernel[(triton.cdiv(y.numel(), cut),)](parts, y, shares, y.numel(), *shapes, cut)
    return y.permute(0, 3, 1, 2)


def piece_size(wide: int, inputs: int) -> tuple[int, int]:
    """How many columns of a window are read as one, and how long that is as a power of two."""
    joint = wide if inputs < 32 or (inputs < 64 and wide != 3) else 1
    return joint, triton.next_power_of_2(max(16, joint * inputs))
