"""Products with packed matrices on a CPU, by the C kernels, which `pomona.native` builds and loads."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from ...native import library
from ...native.library import supported_instruction_sets
from ...native.toolchain import (
    BLOCK_SOURCE,
    CONVOLUTION_SOURCE,
    INTEGER_INSTRUCTION_SETS,
    PRODUCT_SOURCE,
    QUANTIZED_SOURCE,
    UNSTRUCTURED_SOURCE,
)
from ..conv_geometry import ConvGeometry
from ..format import DTYPE_CODES

__all__ = [
    "convolve_unstructured",
    "load_kernel",
    "load_library",
    "multiply_blocks",
    "multiply_packed",
    "multiply_quantized",
    "multiply_two_of_four",
    "multiply_unstructured",
    "order_unstructured",
    "supported_instruction_sets",
    "supported_integer_sets",
]

NO_MEMORY, NOT_FINITE, TOO_LARGE, NOT_ROUNDED = 1, 2, 3, 4  # return codes of a kernel that failed; 0 is success
SINGLE_THREAD_PRODUCTS = 1 << 16  # multiplications up to which waking other threads takes longer than they save
BALANCED_ARGTYPES = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 6
BLOCK_ARGTYPES = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 7
TWO_OF_FOUR_ARGTYPES = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 4
UNSTRUCTURED_ARGTYPES = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 5
QUANTIZED_ARGTYPES = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 8
VALUE_CODES = DTYPE_CODES | {torch.int8: 3, torch.uint8: 4}  # bytes hold two codes of 4 bits
# The source of each kernel, and the types of its arguments that describe the matrix.
KERNELS = {
    "rows": (PRODUCT_SOURCE, BALANCED_ARGTYPES),
    "columns": (PRODUCT_SOURCE, BALANCED_ARGTYPES),
    "blocks_rows": (BLOCK_SOURCE, BLOCK_ARGTYPES),
    "blocks_columns": (BLOCK_SOURCE, BLOCK_ARGTYPES),
    "two_of_four_rows": (PRODUCT_SOURCE, TWO_OF_FOUR_ARGTYPES),
    "two_of_four_columns": (PRODUCT_SOURCE, TWO_OF_FOUR_ARGTYPES),
    "unstructured_rows": (UNSTRUCTURED_SOURCE, UNSTRUCTURED_ARGTYPES),
    "unstructured_columns": (UNSTRUCTURED_SOURCE, UNSTRUCTURED_ARGTYPES),
    "quantized_rows": (QUANTIZED_SOURCE, QUANTIZED_ARGTYPES),
    "quantized_columns": (QUANTIZED_SOURCE, QUANTIZED_ARGTYPES),
    "unstructured_conv2d": (CONVOLUTION_SOURCE, UNSTRUCTURED_ARGTYPES),
}
NO_NORM = (None,) * 4  # in place of the parameters of a batch norm
# The number of vectors; x; the distance between rows of x, or the offsets of its columns; y; the number of threads.
VECTORS_ARGTYPES = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
# The sizes; weight, bias, mean and variance of a batch norm, and its ε; the number of images; x; y; threads.
IMAGES_ARGTYPES = [
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_double,
    ctypes.c_int64,
    *[ctypes.c_void_p] * 2,
    ctypes.c_int64,
]


def load_library() -> ctypes.CDLL | None:
    """Load the compiled kernels; return None where there are none and PyTorch is used."""
    return library.load_library(PRODUCT_SOURCE)


@cache
def supported_integer_sets() -> list[str]:
    """Return the names of the instruction sets for products with integers this processor has, the best one first."""
    sets, kernels = supported_instruction_sets(), library.load_library(QUANTIZED_SOURCE)
    if kernels is None or sets[0] != "avx512":
        return sets
    return [name for name in INTEGER_INSTRUCTION_SETS if getattr(kernels, f"pomona_{name}_supported")()]


@cache
def load_kernel(name: str, instruction_set: str | None = None) -> Callable[..., int] | None:
    """Return a kernel of this name, for the best instruction set or the one named; None without a library."""
    source, matrix_argtypes = KERNELS[name]
    kernels = library.load_library(source)
    if kernels is None:
        return None
    sets = supported_integer_sets() if source == QUANTIZED_SOURCE else supported_instruction_sets()
    function = getattr(kernels, f"pomona_{instruction_set or sets[0]}_{name}")
    function.argtypes = [*matrix_argtypes, *(IMAGES_ARGTYPES if source == CONVOLUTION_SOURCE else VECTORS_ARGTYPES)]
    function.restype = ctypes.c_int
    return function


def multiply_packed(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, columns: int,
                    block: int, relu: bool, transposed: bool, instruction_set: str | None = None,
                    ) -> Tensor | None:  # fmt: skip
    """Return x Wᵀ + bias, or W x + bias with `transposed`; None where the kernels cannot compute it.

    The kernels skip pruned weights, which gives the dense product only where x is finite: for other inputs they
    decline. `pomona.sparse.ops.product` describes the arguments.
    """
    sizes = rows, columns, block, values.shape[2]
    kernel = load_kernel("columns" if transposed else "rows", instruction_set)
    return call_kernel(kernel, x, (values, indices), bias, sizes, relu, transposed)


def multiply_two_of_four(x: Tensor, values: Tensor, places: Tensor, bias: Tensor | None, rows: int, columns: int,
                         relu: bool, transposed: bool, instruction_set: str | None = None,
                         ) -> Tensor | None:  # fmt: skip
    """Return x Wᵀ + bias, or W x + bias with `transposed`; None where the kernels cannot compute it.

    They decline the same inputs as `multiply_packed`. `pomona.sparse.ops.two_of_four_product` describes the arguments.
    """
    kernel = load_kernel("two_of_four_columns" if transposed else "two_of_four_rows", instruction_set)
    return call_kernel(kernel, x, (values, places), bias, (rows, columns), relu, transposed)


def multiply_blocks(x: Tensor, values: Tensor, block_columns: Tensor, starts: Tensor, bias: Tensor | None, rows: int,
                    columns: int, relu: bool, transposed: bool, instruction_set: str | None = None,
                    ) -> Tensor | None:  # fmt: skip
    """Return x Wᵀ + bias, or W x + bias with `transposed`; None where the kernels cannot compute it.

    They decline the same inputs as `multiply_packed`. `pomona.sparse.ops.block_product` describes the arguments.
    """
    kernel = load_kernel("blocks_columns" if transposed else "blocks_rows", instruction_set)
    blocks, height, width = values.shape
    sizes = rows, columns, height, width, blocks
    return call_kernel(kernel, x, (values, block_columns, starts), bias, sizes, relu, transposed)


def multiply_unstructured(x: Tensor, values: Tensor, indices: Tensor, starts: Tensor, lanes: Tensor,
                          bias: Tensor | None, rows: int, columns: int, relu: bool, transposed: bool,
                          instruction_set: str | None = None) -> Tensor | None:  # fmt: skip
    """Return x Wᵀ + bias, or W x + bias with `transposed`; None where the kernels cannot compute it.

    They decline the same inputs as `multiply_packed`. `pomona.sparse.ops.unstructured_product` describes the arguments.
    """
    kernel = load_kernel("unstructured_columns" if transposed else "unstructured_rows", instruction_set)
    parts, sizes = (values, indices, starts, lanes), (rows, columns, values.shape[0])
    return call_kernel(kernel, x, parts, bias, sizes, relu, transposed)


def order_unstructured(values: Tensor, indices: Tensor, starts: Tensor, lanes: Tensor) -> None:
    """Order the survivors of a packed matrix in place, so that most steps read neighbouring columns.

    This changes no product, but its time (`slice_order.h`), and does nothing without a library.
    """
    kernels = library.load_library(UNSTRUCTURED_SOURCE)
    if kernels is None:
        return
    order = getattr(kernels, f"pomona_{supported_instruction_sets()[0]}_unstructured_order")
    order.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3
    parts = [part.data_ptr() for part in (values, indices, starts, lanes)]
    if order(*parts, len(lanes), len(values), DTYPE_CODES[values.dtype]) == NO_MEMORY:
        raise MemoryError("there is no memory to order the weights of a packed matrix.")


def multiply_quantized(x: Tensor, values: Tensor, indices: Tensor, scales: Tensor, bias: Tensor | None, rows: int,
                       columns: int, block: int, span: int, relu: bool, transposed: bool,
                       instruction_set: str | None = None, input_bits: int = 0) -> Tensor | None:  # fmt: skip
    """Return x Wᵀ + bias, or W x + bias with `transposed`; None where the kernels cannot compute it.

    They decline the same inputs as `multiply_packed`. With "avx512vnni" and blocks of up to 64 columns, every vector of
    x is rounded to 16 bits, and with 8 `input_bits` to 8. Other instruction sets, and wider blocks, multiply floats and
    decline to round. `pomona.sparse.ops.quantized_product` describes the arguments.
    """
    kernel = load_kernel("quantized_columns" if transposed else "quantized_rows", instruction_set)
    sizes = rows, columns, block, span, values.shape[2], input_bits
    return call_kernel(kernel, x, (values, indices, scales), bias, sizes, relu, transposed)


def convolve_unstructured(x: Tensor, values: Tensor, indices: Tensor, starts: Tensor, lanes: Tensor,
                          bias: Tensor | None, rows: int, geometry: ConvGeometry, relu: bool,
                          norm: Sequence[Tensor | None] = NO_NORM, eps: float = 0.0,
                          instruction_set: str | None = None) -> Tensor | None:  # fmt: skip
    """Return the convolution of images with a weight packed as rows × (channels · taps), or None without a kernel.

    `norm` has the weight, bias, mean and variance of a batch norm in evaluation mode, which the kernel computes before
    the ReLU. The kernel declines the same inputs as `multiply_packed`.
    """
    kernel = load_kernel("unstructured_conv2d", instruction_set)
    if kernel is None or x.dtype not in DTYPE_CODES:
        return None
    images, channels, height, width = x.shape
    out_height, out_width = geometry.output_size((height, width))
    x32, y = as_float32(x), torch.empty((images, rows, out_height, out_width), dtype=torch.float32, device="cpu")
    parameters = [None if p is None else as_float32(p) for p in (bias, *norm)]
    bias_address, *addresses = [None if p is None else p.data_ptr() for p in parameters]
    sizes = channels, height, width, *itertools.chain(*geometry.pairs)
    code = kernel(
        *[part.data_ptr() for part in (values, indices, starts, lanes)],
        bias_address,
        *(rows, channels * geometry.taps, values.shape[0], DTYPE_CODES[values.dtype], relu),
        (ctypes.c_int64 * len(sizes))(*sizes),
        (ctypes.c_void_p * len(addresses))(*addresses),
        *(eps, images, x32.data_ptr(), y.data_ptr()),
        torch.get_num_threads() if values.numel() * out_height * out_width > SINGLE_THREAD_PRODUCTS else 1,
    )
    if code == NO_MEMORY:
        raise MemoryError("the CPU kernel has no memory for a copy of its input.")
    return None if code in (NOT_FINITE, TOO_LARGE) else y.to(x.dtype)


def as_float32(tensor: Tensor) -> Tensor:
    """Return a tensor as contiguous float32: the same one where it is."""
    return tensor.float().contiguous()


def call_kernel(kernel: Callable[..., int] | None, x: Tensor, parts: Sequence[Tensor], bias: Tensor | None,
                sizes: Sequence[int], relu: bool, transposed: bool) -> Tensor | None:  # fmt: skip
    """Return the product by a kernel, or None where there is none or it declines.

    `parts` are the tensors of the packed matrix, values first, and `sizes` the numbers that describe it, rows first.
    """
    if kernel is None or x.dtype not in DTYPE_CODES:
        return None
    values, rows, n = parts[0], sizes[0], x.shape[-1 if transposed else 0]
    x32, layout = (locate_columns if transposed else locate_rows)(x if x.dtype is torch.float32 else x.float(), n)
    if bias is not None:
        bias = bias.float().contiguous()
    y = x32.new_empty(rows, n) if transposed else x32.new_empty(n, rows)
    code = kernel(
        *[part.data_ptr() for part in parts],
        None if bias is None else bias.data_ptr(),
        *sizes,
        VALUE_CODES[values.dtype],
        relu,
        n,
        x32.data_ptr(),
        layout if layout.__class__ is int else layout.data_ptr(),  # type: ignore[union-attr]
        y.data_ptr(),
        torch.get_num_threads() if n * values.numel() > SINGLE_THREAD_PRODUCTS else 1,
    )
    if code == NO_MEMORY:
        raise MemoryError("the CPU kernel has no memory for a copy of its input.")
    if code in (NOT_FINITE, NOT_ROUNDED):
        return None
    return y if x.dtype is torch.float32 else y.to(x.dtype)


def locate_rows(x: Tensor, n: int) -> tuple[Tensor, int]:
    """Return x as n contiguous rows, and the distance between them."""
    if x.ndim != 2:
        x = x.reshape(n, -1)
    step, inner = x.stride()
    return (x, step) if inner == 1 else (x.contiguous(), x.shape[1])


def locate_columns(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return x (columns … × n) with its n values of a column contiguous, and the offset at which each column begins."""
    x = x if x.stride(-1) == 1 or n == 1 else x.contiguous()
    offsets = torch.zeros((), dtype=torch.int64, device="cpu")  # whatever the default device is: C reads it
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    return x, offsets.flatten()
