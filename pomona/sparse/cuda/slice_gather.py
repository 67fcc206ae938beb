"""Products of an unstructured matrix with a few vectors: slice_gather.cu, which gathers inputs from shared memory."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..packed_tensor import DTYPE_CODES
from ..unstructured import BAND_COLUMNS, SLICE_ROWS
from .launcher import CompiledKernel, compile_kernel, prepare_bias
from .tensor_core_common import MAX_SHARED_BYTES, read_shared_limit

MAX_VECTORS = 16  # with more, the tensor cores are faster even on the dense matrix
MAX_LAUNCH_VECTORS = 8  # of one launch
WARP_THREADS = 32
WARPS = 16  # of a thread block
LOAD_BYTES = 16  # of values that a thread loads at a time


class GatherConfig(NamedTuple):
    """The division of the work; the fields are macros of slice_gather.cu."""

    vectors: int
    slice_warps: int
    unroll: int
    min_blocks: int


def multiply(x: Tensor, values: Tensor, indices: Tensor, starts: Tensor, lanes: Tensor, bias: Tensor | None, y: Tensor,
             columns: int, relu: bool) -> bool:  # fmt: skip
    """Write x Wᵀ + bias to y, both of any strides; return False for arguments this kernel does not take."""
    (n, rows), dtype = y.shape, values.dtype
    aligned = values.data_ptr() % LOAD_BYTES == 0 and indices.data_ptr() % LOAD_BYTES == 0
    if n > MAX_VECTORS or columns > BAND_COLUMNS or x.dtype != dtype or not aligned:
        return False
    slices, steps = len(lanes), len(values)
    prepared = prepare_launch(dtype, n, columns, slices, x.get_device())
    if prepared is None:
        return False
    config, blocks, kernel = prepared
    if x.stride(1) != 1:
        x = x.contiguous()
    bias, float_bias = prepare_bias(bias, dtype)
    for first in range(0, n, config.vectors):
        some, their_y = x[first : first + config.vectors], y[first : first + config.vectors]
        y_vector, y_row = their_y.stride()
        sizes = rows, columns, slices, steps, len(some), x.stride(0), y_row, y_vector, float_bias, relu
        kernel((blocks, 1, 1), (values, indices, starts, lanes, some, bias, their_y), sizes)
    return True


@cache
def prepare_launch(
    dtype: torch.dtype, n: int, columns: int, slices: int, device: int
) -> tuple[GatherConfig, int, CompiledKernel] | None:
    """Return the division of the work, the number of thread blocks and the kernel; None where it cannot be used."""
    vectors = choose_vectors(dtype, n, columns, read_shared_limit(device))
    if vectors is None:
        return None
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    config = choose_config(vectors, slices, processors)
    macros = {name.upper(): value for name, value in config._asdict().items()}
    shared_bytes = columns * vectors * dtype.itemsize
    kernel = compile_kernel(
        "slice_gather", device, WARPS * WARP_THREADS, shared_bytes, VALUE_TYPE=DTYPE_CODES[dtype], WARPS=WARPS, **macros
    )
    teams = WARPS // config.slice_warps
    blocks = min(-(-slices // teams), processors * config.min_blocks)
    return None if kernel is None else (config, blocks, kernel)


def choose_vectors(dtype: torch.dtype, n: int, columns: int, limit: int = MAX_SHARED_BYTES) -> int | None:
    """Return the power of two of vectors that one launch takes; None where not even one fits into shared memory."""
    wanted = min(1 << (n - 1).bit_length(), MAX_LAUNCH_VECTORS if dtype.itemsize == 2 else MAX_LAUNCH_VECTORS // 2)
    room = (limit - static_shared_bytes(wanted)) // (columns * dtype.itemsize)
    return min(wanted, 1 << room.bit_length() - 1) if room else None


def static_shared_bytes(vectors: int) -> int:
    """Return the bytes of the sums that the warps of a thread block keep in shared memory."""
    return 2 * WARPS * SLICE_ROWS * vectors * 4 + vectors * 4


def choose_config(vectors: int, slices: int, processors: int) -> GatherConfig:
    """Return a division of the work that gives all warps of the GPU a part of a slice; not tuned by measurements."""
    min_blocks = 2 if vectors <= 2 else 1
    share = max(1, processors * min_blocks * WARPS // max(1, slices))
    slice_warps = min(WARPS, 1 << share.bit_length() - 1)
    return GatherConfig(vectors, slice_warps, 4 if vectors <= 2 else 2, min_blocks)
