"""Convolutions: hopper_wgmma.cu or tensor_core.cu, where threads gather the input of each position themselves."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..conv_geometry import ConvGeometry
from ..format import LANES
from . import hopper_wgmma, tensor_core
from .launcher import MAX_WARP_BLOCK, CompiledKernel, prepare_bias
from .tensor_core import MAX_REGISTER_SURVIVORS, MmaConfig, compile_config, max_vector_tiles
from .tensor_core_common import (
    MAX_SHARED_BYTES,
    STEP_BLOCKS,
    VECTOR_TILE,
    WARP_ROWS,
    TensorCoreConfig,
    padded_block_width,
    read_shared_limit,
)

MAX_TAPS = 31  # positions of a convolution's kernel: one bit each
MAX_INDEX = 1 << 30  # entries of the input, and of the output, that 32-bit offsets in the kernels address
WARPS = 8  # of a thread block
BUSY_SHARE = 0.6  # of the multiprocessors with work, from which on a thread block may have more positions
MAX_CLUSTER = 8  # thread blocks
MIN_STAGE_STEPS = 4  # steps of x that are staged at a time, at least


class PreparedConvolution(NamedTuple):
    """Everything about a convolution that follows from its shapes."""

    config: TensorCoreConfig
    kernel: CompiledKernel
    grid: tuple[int, int, int]
    taps: Tensor
    output_shape: tuple[int, int, int, int]
    sizes: tuple[int, ...]  # integer arguments of the kernel


def convolve(
    x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, block: int, geometry: ConvGeometry,
    relu: bool,
) -> Tensor | None:  # fmt: skip
    """Return the convolution of images (n, channels, height, width); None where no kernel takes the arguments."""
    device = x.get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return convolve(x, values, indices, bias, rows, block, geometry, relu)
    dtype = values.dtype
    matches = x.dtype == dtype
    prepared = prepare_launch(dtype, x.shape, values.shape, rows, block, geometry, device) if matches else None
    if prepared is None:
        return None
    bias, float_bias = prepare_bias(bias, dtype)
    y = x.new_empty(prepared.output_shape)
    exchange = prepared.config.allocate_exchange(prepared.grid, x.device)
    tensors = values, indices, x.contiguous(), bias, y, *exchange, prepared.taps
    prepared.kernel(prepared.grid, tensors, (*prepared.sizes, float_bias, relu))
    return y


@cache
def prepare_launch(
    dtype: torch.dtype, images: torch.Size, packed: torch.Size, rows: int, block: int, geometry: ConvGeometry,
    device: int,
) -> PreparedConvolution | None:  # fmt: skip
    """Return everything that a convolution of images of this shape needs on this device; None without a kernel."""
    (count, channels, height, width), (groups, blocks, kept, _) = images, packed
    out_height, out_width = geometry.output_size((height, width))
    n = count * out_height * out_width
    if max(images.numel(), n * rows) >= MAX_INDEX or not supports_convolution(dtype, kept, block, geometry):
        return None
    chosen = choose_kernel(dtype, n, kept, block, groups, blocks, geometry, device)
    if chosen is None:
        return None
    config, kernel = chosen
    place = torch.device("cuda", device) if device >= 0 else torch.device("cpu")
    padded_blocks = blocks + STEP_BLOCKS * max(MIN_STAGE_STEPS, WARPS)
    taps = find_column_taps(channels, height, width, geometry, block, config.width, padded_blocks, place)
    sizes = rows, blocks, n, channels * height * width, height, width, out_width, out_height * out_width
    shape = count, rows, out_height, out_width
    return PreparedConvolution(config, kernel, config.grid(n, groups), taps, shape, sizes)


@cache
def find_column_taps(
    channels: int, height: int, width: int, geometry: ConvGeometry, block: int, padded_block: int, blocks: int,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """Return, for each column of the matrix, its offset in an image in bytes and its tap of the kernel as a bit.

    Blocks are padded with zeros to `padded_block` columns, and there are at least `blocks` of them.
    """
    (_, kernel_width), (down, right) = geometry.kernel, geometry.dilation
    column = torch.arange(channels * geometry.taps)
    channel, tap = column // geometry.taps, column % geometry.taps
    offset = 2 * ((channel * height + tap // kernel_width * down) * width + tap % kernel_width * right)
    taps = torch.zeros(-(-blocks // STEP_BLOCKS) * STEP_BLOCKS, padded_block, 2, dtype=torch.int32)
    taps[column // block, column % block] = torch.stack([offset, 1 << tap], 1).int()
    return taps.to(device)


def choose_kernel(
    dtype: torch.dtype, n: int, kept: int, block: int, groups: int, blocks: int, geometry: ConvGeometry, device: int
) -> tuple[TensorCoreConfig, CompiledKernel] | None:
    """Return the division of the work on this device, and the kernel; None where there is none."""
    properties = torch.cuda.get_device_properties(device)
    if properties.major < tensor_core.MIN_MAJOR:
        return None
    macros = geometry_macros(geometry)
    hopper = hopper_wgmma.prepare_launch(dtype, n, kept, block, groups, blocks, device, **macros)
    if hopper is not None:
        return hopper
    clusters = properties.major >= tensor_core.CLUSTER_MAJOR
    limit = read_shared_limit(device)
    config = choose_config(n, kept, block, groups, blocks, properties.multi_processor_count, clusters, limit)
    return compile_config(config, dtype, kept, device, **macros)


def geometry_macros(geometry: ConvGeometry) -> dict[str, int]:
    """Return the macros by which a kernel for tensor cores computes a convolution of this geometry."""
    names = [f"{name}_{side}" for name in ("KERNEL", "STRIDE", "PADDING", "DILATION") for side in "HW"]
    return {"CONV": 1, **dict(zip(names, [number for pair in geometry.pairs for number in pair], strict=True))}


def supports_convolution(dtype: torch.dtype, kept: int, block: int, geometry: ConvGeometry) -> bool:
    """Return whether the kernels compute a convolution of this geometry with a matrix packed in this way."""
    fits = block <= MAX_WARP_BLOCK and geometry.taps <= MAX_TAPS
    return dtype != torch.float32 and fits and max_vector_tiles(kept) >= 1


def choose_config(
    n: int,
    kept: int,
    block: int,
    groups: int,
    blocks: int,
    processors: int,
    clusters: bool,
    limit: int = MAX_SHARED_BYTES,
) -> MmaConfig:
    """Return the division of the work of tensor_core.cu for a convolution.

    A thread block has as many rows as possible, since all share the input gathered for a position, then as many
    positions as leave most multiprocessors busy. The thread blocks of a cluster share the columns.
    """
    width, row_tiles = padded_block_width(block), 4 if kept <= MAX_REGISTER_SURVIVORS else 2
    slabs, steps = -(-groups * LANES // WARP_ROWS), -(-blocks // STEP_BLOCKS)
    slice_k = next(k for k in (8, 4, 2, 1) if k == 1 or slabs * k <= WARPS)
    best, most = None, 0
    for vector_tiles in (tiles for tiles in (4, 2, 1) if tiles <= max_vector_tiles(kept)):
        thread_blocks = -(-slabs * slice_k // WARPS) * -(-n // (VECTOR_TILE * vector_tiles))
        room = min(MAX_CLUSTER, max(1, processors // thread_blocks), max(1, steps // slice_k))
        split_k = 1 << room.bit_length() - 1
        stage_steps, cluster = max(slice_k, MIN_STAGE_STEPS), split_k if clusters else 1
        config = MmaConfig(width, vector_tiles, WARPS, slice_k, split_k, row_tiles, stage_steps, 2, cluster)
        if thread_blocks * split_k > most and config.shared_bytes(kept) <= limit:
            best, most = config, thread_blocks * split_k
        if most >= BUSY_SHARE * processors:
            break
    assert best is not None, "one tile of vectors always fits into shared memory"
    return best
