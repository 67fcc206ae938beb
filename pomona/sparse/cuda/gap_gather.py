"""Products of a matrix packed with gaps with a few vectors: gap_gather.cu, which gathers inputs from shared memory."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..gaps import CHUNK, LANES, PART_CHUNKS, SLICE_ROWS
from ..packed_tensor import DTYPE_CODES
from .launcher import CompiledKernel, compile_kernel, prepare_bias
from .tensor_core_common import MAX_SHARED_BYTES

MAX_VECTORS = 16  # with more, the tensor cores are faster even on the dense matrix
MAX_LAUNCH_VECTORS = 8  # of one launch
LOAD_BYTES = 16  # of values that a thread loads at a time


class GapConfig(NamedTuple):
    """The division of the work; the fields are macros of gap_gather.cu."""

    vectors: int
    slices: int  # that a thread block works on at a time
    warps: int  # of a thread block
    min_blocks: int  # thread blocks that a multiprocessor has to hold


def multiply(x: Tensor, values: Tensor, gaps: Tensor, firsts: Tensor, starts: Tensor, lanes: Tensor,
             bias: Tensor | None, y: Tensor, columns: int, relu: bool) -> bool:  # fmt: skip
    """Write x Wᵀ + bias to y, both of any strides; return False for arguments this kernel does not take."""
    (n, rows), dtype = y.shape, values.dtype
    if n > MAX_VECTORS or x.dtype != dtype or values.data_ptr() % LOAD_BYTES:
        return False
    slices, chunks = len(lanes), len(values)
    prepared = prepare_launch(dtype, n, columns, slices, gaps.shape[1] * 32 // CHUNK, x.get_device())
    if prepared is None:
        return False
    config, blocks, kernel = prepared
    if x.stride(1) != 1:
        x = x.contiguous()
    bias, float_bias = prepare_bias(bias, dtype)
    for first in range(0, n, config.vectors):
        some, their_y = x[first : first + config.vectors], y[first : first + config.vectors]
        y_vector, y_row = their_y.stride()
        sizes = rows, columns, slices, chunks, len(some), x.stride(0), y_row, y_vector, float_bias, relu
        kernel((blocks, 1, 1), (values, gaps, firsts, starts, lanes, some, bias, their_y), sizes)
    return True


@cache
def prepare_launch(
    dtype: torch.dtype, n: int, columns: int, slices: int, gap_bits: int, device: int
) -> tuple[GapConfig, int, CompiledKernel] | None:
    """Return the division of the work, the number of thread blocks and the kernel; None where it cannot be used."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    config = choose_config(dtype, n, columns, slices, gap_bits, processors)
    if config is None:
        return None
    macros = {name.upper(): value for name, value in config._asdict().items()}
    macros |= {"VALUE_TYPE": DTYPE_CODES[dtype], "GAP_BITS": gap_bits, "PART_CHUNKS": PART_CHUNKS}
    shared_bytes = input_bytes(dtype, config.vectors, columns, gap_bits)
    kernel = compile_kernel("gap_gather", device, config.warps * LANES, shared_bytes, **macros)
    blocks = min(-(-slices // config.slices), processors * config.min_blocks)
    return None if kernel is None else (config, blocks, kernel)


def choose_config(
    dtype: torch.dtype, n: int, columns: int, slices: int, gap_bits: int, processors: int
) -> GapConfig | None:
    """Return a division of the work among thread blocks; None where not even one vector fits into shared memory."""
    vectors = min(1 << (n - 1).bit_length(), MAX_LAUNCH_VECTORS if dtype.itemsize == 2 else MAX_LAUNCH_VECTORS // 2)
    while vectors:
        for blocks in (2, 1):
            at_a_time = max(1, min(4 // blocks if vectors <= 2 else 2, -(-slices // (processors * blocks))))
            config = GapConfig(vectors, at_a_time, 16, blocks)
            used = input_bytes(dtype, vectors, columns, gap_bits) + static_shared_bytes(config)
            if used * blocks <= MAX_SHARED_BYTES:
                return config
        vectors //= 2
    return None


def input_bytes(dtype: torch.dtype, vectors: int, columns: int, gap_bits: int) -> int:
    """Return the bytes of the inputs in shared memory, with the zeros that follow them."""
    return (columns + (CHUNK << gap_bits)) * vectors * dtype.itemsize


def static_shared_bytes(config: GapConfig) -> int:
    """Return the bytes of the sums that the warps of a thread block keep in shared memory."""
    return (2 * config.warps * config.slices * SLICE_ROWS + 1) * config.vectors * 4
