"""Triton kernels for convolutions of few channels, where cuDNN's tiles stay mostly empty.

With channels last, what a row of taps reads for one pixel is a single piece of memory: taps × channels numbers in a
row. So a convolution is one product (pixels × piece) · (piece × outputs) for each row of taps, each piece read from
the cache after the first time. Weights are read in float32, as the optimizer keeps them, and rounded on the way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def product_kernel(
    x, w, y, pixels, w_out, w_tap, w_in,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, FLIP: tl.constexpr,
    PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y (HEIGHT × WIDTH) from x (TALL × WIDE); with the taps flipped, the gradient of x from that of y."""
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = (p % WIDTH) * STRIDE - SIZE // 2
    row = (p // WIDTH % HEIGHT) * STRIDE - SIZE // 2
    image = p // (WIDTH * HEIGHT)
    j = tl.arange(0, PIECE)
    k = tl.arange(0, OUTPUTS)
    s = column[:, None] + (j // INPUTS)[None, :]
    fits = (p < pixels)[:, None] & (j < SIZE * INPUTS)[None, :] & (s >= 0) & (s < WIDE)
    total = tl.zeros([BLOCK, OUTPUTS], tl.float32)
    for q in tl.static_range(SIZE):
        r = row + q
        at = ((image * TALL + r) * WIDE + column) * INPUTS
        tile = tl.load(x + at[:, None] + j[None, :], mask=fits & ((r >= 0) & (r < TALL))[:, None], other=0.0)
        tap = q * SIZE + j // INPUTS
        if FLIP:
            tap = SIZE * SIZE - 1 - tap
        at = (j % INPUTS) * w_in + tap * w_tap
        weight = tl.load(w + at[:, None] + k[None, :] * w_out, mask=(j < SIZE * INPUTS)[:, None], other=0.0)
        total = tl.dot(tile, weight.to(tile.dtype), total)
    tl.store(y + p[:, None] * OUTPUTS + k[None, :], total.to(y.dtype.element_ty), mask=(p < pixels)[:, None])


@triton.jit
def weight_kernel(
    x, g, parts, pixels, share,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What a share of the pixels adds to the weight's gradient, for one row of taps."""
    q = tl.program_id(1)
    j = tl.arange(0, PIECE)
    k = tl.arange(0, OUTPUTS)
    total = tl.zeros([OUTPUTS, PIECE], tl.float32)
    first = tl.program_id(0) * share
    for start in range(first, first + share, BLOCK):
        p = start + tl.arange(0, BLOCK)
        column = (p % WIDTH) * STRIDE - SIZE // 2
        r = (p // WIDTH % HEIGHT) * STRIDE - SIZE // 2 + q
        s = column[:, None] + (j // INPUTS)[None, :]
        here = ((p < pixels) & (r >= 0) & (r < TALL))[:, None]
        fits = here & (j < SIZE * INPUTS)[None, :] & (s >= 0) & (s < WIDE)
        at = ((p // (WIDTH * HEIGHT) * TALL + r) * WIDE + column) * INPUTS
        tile = tl.load(x + at[:, None] + j[None, :], mask=fits, other=0.0)
        gradient = tl.load(g + p[:, None] * OUTPUTS + k[None, :], mask=(p < pixels)[:, None], other=0.0)
        total = tl.dot(tl.trans(gradient), tile, total)
    # parts is (share, output, tap, input), as a weight with channels last lies in memory
    at = ((tl.program_id(0) * OUTPUTS + k[:, None]) * SIZE + q) * SIZE * INPUTS + j[None, :]
    tl.store(parts + at, total, mask=(j < SIZE * INPUTS)[None, :])


def forward(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """The convolution."""
    outputs, inputs, size, _ = weight.shape
    count, _, tall, wide = x.shape
    height, width = -(-tall // stride), -(-wide // stride)
    y = torch.empty(count, outputs, height, width, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    strides = weight.stride(0), weight.stride(3), weight.stride(1)
    shapes = height, width, tall, wide, inputs, outputs, size, stride, False
    product(x, weight, y, strides, shapes)
    return y


def input_gradient(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the input of a convolution of stride 1."""
    outputs, inputs, size, _ = weight.shape
    _, _, tall, wide = x.shape
    y = torch.empty_like(x, memory_format=torch.channels_last)
    strides = weight.stride(1), weight.stride(3), weight.stride(0)
    product(g, weight, y, strides, (tall, wide, tall, wide, outputs, inputs, size, 1, True))
    return y


def product(x: Tensor, weight: Tensor, y: Tensor, strides: tuple[int, ...], shapes: tuple[int, ...]) -> None:
    """Run the product kernel."""
    piece = triton.next_power_of_2(max(16, shapes[4] * shapes[6]))
    block = 128 if piece <= 128 else 64
    pixels = y.numel() // y.shape[1]
    grid = (triton.cdiv(pixels, block),)
    product_kernel[grid](x, weight, y, pixels, *strides, *shapes, piece, block, num_warps=4)


def weight_gradient(g: Tensor, x: Tensor, weight: Tensor, stride: int, shares: int = 88) -> Tensor:
    """The gradient of the weight, in float32."""
    outputs, inputs, size, _ = weight.shape
    _, _, tall, wide = x.shape
    count, _, height, width = g.shape
    piece = triton.next_power_of_2(max(16, inputs * size))
    pixels, block = count * height * width, 64
    share = triton.cdiv(triton.cdiv(pixels, shares), block) * block
    shares = triton.cdiv(pixels, share)
    parts = torch.empty(shares, outputs, size, size, inputs, device=x.device)
    shapes = height, width, tall, wide, inputs, outputs, size, stride, piece, block
    weight_kernel[shares, size](x, g, parts, pixels, share, *shapes, num_warps=4 if piece <= 128 else 8)
    return parts.sum(0).permute(0, 3, 1, 2)
