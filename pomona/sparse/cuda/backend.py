"""Products with packed matrices on a CUDA device, by the fastest kernel that takes the arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from . import bitmap_tiles, gap_gather, hopper_wgmma, slice_gather, tensor_core, warp_shuffle

MAX_SHUFFLE_VECTORS = 8  # vectors up to which shuffles are faster than the tensor cores
SMALL_MATRIX = 1 << 24  # entries of a matrix up to which that limit is doubled: it leaves the tensor cores idle


class ProductKernel(Protocol):
    """A module with a kernel for y = x Wᵀ + bias."""

    def multiply(self, x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, y: Tensor, columns: int,
                 block: int, relu: bool) -> bool:  # fmt: skip
        """Write x Wᵀ + bias to y, all of any strides; return False for arguments the kernel does not take."""


def multiply_packed(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, columns: int,
                    block: int, relu: bool, transposed: bool) -> Tensor | None:  # fmt: skip
    """Return x Wᵀ + bias, or W x + bias with `transposed`; None where no kernel takes the arguments.

    `pomona.sparse.ops.product` describes the arguments.
    """
    if x.get_device() != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return multiply_packed(x, values, indices, bias, rows, columns, block, relu, transposed)
    flat = x.reshape(columns, -1).T if transposed else x if x.ndim == 2 else x.reshape(x.shape[0], columns)
    n, size = flat.shape[0], rows * columns
    y = x.new_empty((rows, n) if transposed else (n, rows))
    arguments = flat, values, indices, bias, y.T if transposed else y, columns, block, relu
    for kernel in candidate_kernels(n, size):
        if kernel.multiply(*arguments):
            return y
    return None


def candidate_kernels(n: int, size: int) -> Iterator[ProductKernel]:
    """Yield the kernels for n vectors and a matrix of `size` entries, the fastest first."""
    tensor_cores = hopper_wgmma, tensor_core
    few = n <= MAX_SHUFFLE_VECTORS * (1 + (size <= SMALL_MATRIX))
    yield from (warp_shuffle, *tensor_cores) if few else (*tensor_cores, warp_shuffle)
    try:
        from . import triton_dense
    except ImportError:  # Triton is optional, and slow to import
        return
    yield triton_dense


def multiply_unstructured(x: Tensor, values: Tensor, indices: Tensor, starts: Tensor, lanes: Tensor,
                          bias: Tensor | None, rows: int, columns: int, relu: bool, transposed: bool,
                          ) -> Tensor | None:  # fmt: skip
    """Return x Wᵀ + bias, or W x + bias with `transposed`; None where no kernel takes the arguments.

    `pomona.sparse.ops.unstructured_product` describes the arguments.
    """
    parts = values, indices, starts, lanes
    return multiply_gathered(slice_gather.multiply, x, parts, bias, rows, columns, relu, transposed)


def multiply_gaps(x: Tensor, values: Tensor, gaps: Tensor, firsts: Tensor, starts: Tensor, owners: Tensor,
                  lanes: Tensor, bias: Tensor | None, rows: int, columns: int, relu: bool, transposed: bool,
                  ) -> Tensor | None:  # fmt: skip
    """Return x Wᵀ + bias, or W x + bias with `transposed`; None where no kernel takes the arguments.

    `pomona.sparse.ops.gap_product` describes the arguments.
    """
    parts = values, gaps, firsts, starts, owners, lanes
    return multiply_gathered(gap_gather.multiply, x, parts, bias, rows, columns, relu, transposed)


def multiply_blocks(x: Tensor, values: Tensor, block_columns: Tensor, starts: Tensor, bias: Tensor | None, rows: int,
                    columns: int, relu: bool, transposed: bool) -> Tensor | None:  # fmt: skip
    """Return x Wᵀ + bias, or W x + bias with `transposed`; None where no kernel takes the arguments.

    `pomona.sparse.ops.block_product` describes the arguments.
    """
    try:
        from . import triton_blocks
    except ImportError:  # Triton is optional, and slow to import
        return None
    parts = values, block_columns, starts
    return multiply_gathered(triton_blocks.multiply, x, parts, bias, rows, columns, relu, transposed)


def multiply_bitmap(x: Tensor, values: Tensor, words: Tensor, starts: Tensor, bias: Tensor | None, rows: int,
                    columns: int, most: int, relu: bool, transposed: bool) -> Tensor | None:  # fmt: skip
    """Return x Wᵀ + bias, or W x + bias with `transposed`; None where no kernel takes the arguments.

    `pomona.sparse.ops.bitmap_product` describes the arguments.
    """

    def multiply(x: Tensor, values: Tensor, words: Tensor, starts: Tensor, bias: Tensor | None, y: Tensor,
                 columns: int, relu: bool) -> bool:  # fmt: skip
        return bitmap_tiles.multiply(x, values, words, starts, bias, y, columns, most, relu)

    return multiply_gathered(multiply, x, (values, words, starts), bias, rows, columns, relu, transposed)


def multiply_gathered(multiply: Callable[..., bool], x: Tensor, parts: Sequence[Tensor], bias: Tensor | None,
                      rows: int, columns: int, relu: bool, transposed: bool) -> Tensor | None:  # fmt: skip
    """Return the product by a kernel that gathers its inputs; None where it does not take the arguments."""
    if x.get_device() != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return multiply_gathered(multiply, x, parts, bias, rows, columns, relu, transposed)
    flat = x.reshape(columns, -1).T if transposed else x.reshape(x.shape[0], columns)
    n = flat.shape[0]
    y = x.new_empty((rows, n) if transposed else (n, rows))
    return y if multiply(flat, *parts, bias, y.T if transposed else y, columns, relu) else None
