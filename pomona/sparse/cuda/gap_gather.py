"""Products of a matrix packed with gaps with a few vectors: gap_gather.cu, which gathers inputs from shared memory."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..gaps import CHUNK, LANES, PART_CHUNKS
from ..packed_tensor import DTYPE_CODES
from .arrival_counters import arrival_counters
from .launcher import CompiledKernel, compile_kernel, prepare_bias
from .tensor_core_common import MAX_SHARED_BYTES, read_shared_limit

MAX_VECTORS = 16  # with more, the tensor cores are faster even on the dense matrix
MAX_LAUNCH_VECTORS = 8  # of one launch
LOAD_BYTES = 16  # of values that a thread loads at a time
SLICE_WORDS = 4  # of a slice
RUNS = 2  # of the kernel over all parts, where an input is infinite or NaN


class GapConfig(NamedTuple):
    """The division of the work; the fields are macros of gap_gather.cu."""

    vectors: int
    warps: int  # of a thread block
    min_blocks: int  # thread blocks that a multiprocessor has to hold
    prefetched_parts: int = 1  # that a warp has loaded or is loading


def multiply(x: Tensor, values: Tensor, gaps: Tensor, firsts: Tensor, starts: Tensor, owners: Tensor, lanes: Tensor,
             bias: Tensor | None, y: Tensor, columns: int, relu: bool) -> bool:  # fmt: skip
    """Write x Wᵀ + bias to y, both of any strides; return False for arguments this kernel does not take."""
    (n, rows), dtype = y.shape, values.dtype
    if n > MAX_VECTORS or x.dtype != dtype or values.data_ptr() % LOAD_BYTES:
        return False
    slices, parts = len(lanes), len(values)
    prepared = prepare_launch(dtype, n, columns, parts, gaps.shape[2] * 32 // CHUNK, x.get_device())
    if prepared is None:
        return False
    config, blocks, kernel = prepared
    if x.stride(1) != 1:
        x = x.contiguous()
    bias, float_bias = prepare_bias(bias, dtype)
    exchange = torch.empty(RUNS * blocks * 2 * LANES * config.vectors, device=x.device, dtype=torch.float32)
    arrivals = arrival_counters(RUNS * blocks, x.device)
    for first in range(0, n, config.vectors):
        some, their_y = x[first : first + config.vectors], y[first : first + config.vectors]
        y_vector, y_row = their_y.stride()
        tensors = values, gaps, firsts, starts, owners, lanes, some, bias, their_y, exchange, arrivals
        sizes = rows, columns, slices, *divmod(parts, blocks), len(some), x.stride(0), y_row, y_vector, float_bias, relu
        kernel((blocks, 1, 1), tensors, sizes)
    return True


@cache
def prepare_launch(
    dtype: torch.dtype, n: int, columns: int, parts: int, gap_bits: int, device: int
) -> tuple[GapConfig, int, CompiledKernel] | None:
    """Return the division of the work, the number of thread blocks and the kernel; None where it cannot be used."""
    config = choose_config(dtype, n, columns, gap_bits, read_shared_limit(device))
    if config is None:
        return None
    macros = {name.upper(): value for name, value in config._asdict().items()}
    macros |= {"VALUE_TYPE": DTYPE_CODES[dtype], "GAP_BITS": gap_bits, "PART_CHUNKS": PART_CHUNKS}
    shared_bytes = input_bytes(dtype, config.vectors, columns, gap_bits)
    kernel = compile_kernel("gap_gather", device, config.warps * LANES, shared_bytes, **macros)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    blocks = min(-(-2 * parts // config.warps), processors * config.min_blocks)
    return None if kernel is None else (config, blocks, kernel)


def choose_config(
    dtype: torch.dtype, n: int, columns: int, gap_bits: int, limit: int = MAX_SHARED_BYTES
) -> GapConfig | None:
    """Return the vectors of a launch and its warps; None where not even one vector fits into shared memory."""
    vectors = min(1 << (n - 1).bit_length(), MAX_LAUNCH_VECTORS if dtype.itemsize == 2 else MAX_LAUNCH_VECTORS // 2)
    while vectors:
        for blocks in (2, 1)[vectors > 4 :]:
            config = GapConfig(vectors, 16, blocks)
            used = input_bytes(dtype, vectors, columns, gap_bits) + static_shared_bytes(config)
            if used * blocks <= limit:
                return config
        vectors //= 2
    return None


def input_bytes(dtype: torch.dtype, vectors: int, columns: int, gap_bits: int) -> int:
    """Return the bytes of the inputs in shared memory, with the zeros that follow them."""
    return (columns + (CHUNK << gap_bits)) * vectors * dtype.itemsize


def static_shared_bytes(config: GapConfig) -> int:
    """Return the bytes of the sums that the warps of a thread block keep in shared memory, and of their slices."""
    return (2 * config.warps * (LANES * (config.vectors + 1) + SLICE_WORDS) + config.vectors) * 4
