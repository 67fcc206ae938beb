"""The operator `torch.ops.pomona.blocks`: the product with a matrix that is packed in dense blocks.

x is n × columns and y is n × rows; transposed, x is columns × n and y is rows × n, as for `torch.ops.pomona.balanced`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..blocks import BlockTensor, unpack_blocks, validate_blocks
from ..cpu import backend as cpu
from ..cuda import backend as cuda
from .dense_product import (
    choose_dense_dtype,
    explain_missing_kernel,
    make_gradients,
    multiply_dense,
    unpack_and_keep,
    validate_vectors,
    warn_about_dense_product,
)
from .registration import register_operator

# The product by type of device, with the arguments of the operator. It returns None where it has no kernel for them.
BACKENDS: dict[str, Callable[..., Tensor | None]] = {
    "cpu": cpu.multiply_blocks,
    "cuda": cuda.multiply_blocks,
}


def compute_blocks(x: Tensor, values: Tensor, block_columns: Tensor, starts: Tensor, bias: Tensor | None, rows: int,
                   columns: int, relu: bool = False, transposed: bool = False) -> Tensor:  # fmt: skip
    """Return the product by the backend of the device, or by the dense matrix where that has no kernel."""
    validate_block_product(x, values, block_columns, starts, bias, rows, columns, transposed)
    if x.numel() > 0 and rows > 0:
        backend = BACKENDS.get(x.device.type)
        y = backend and backend(x, values, block_columns, starts, bias, rows, columns, relu, transposed)
        if y is not None:
            return y
        warn_about_dense_product(explain_missing_kernel(x))
    weight = unpack_blocks_once(values, block_columns, starts, rows, columns, choose_dense_dtype(x))
    return multiply_dense(x, weight, bias, relu, transposed)


def fake_blocks(x: Tensor, values: Tensor, block_columns: Tensor, starts: Tensor, bias: Tensor | None, rows: int,
                columns: int, relu: bool = False, transposed: bool = False) -> Tensor:  # fmt: skip
    """Return an empty tensor of the product's shape, for torch.compile and torch.export."""
    validate_block_product(x, values, block_columns, starts, bias, rows, columns, transposed)
    return x.new_empty((rows, x.shape[-1]) if transposed else (x.shape[0], rows))


def validate_block_product(x: Tensor, values: Tensor, block_columns: Tensor, starts: Tensor, bias: Tensor | None,
                           rows: int, columns: int, transposed: bool) -> None:  # fmt: skip
    """Raise PomonaError unless the arguments of a product fit together."""
    validate_blocks(values, block_columns, starts, rows, columns)
    validate_vectors(x, values, bias, rows, columns, transposed)


def unpack_blocks_once(values: Tensor, block_columns: Tensor, starts: Tensor, rows: int, columns: int,
                       dtype: torch.dtype) -> Tensor:  # fmt: skip
    """Return the dense matrix in a dtype; it is kept for the next call, until the packed values change or are freed."""
    return unpack_and_keep(unpack_blocks, (values, block_columns, starts), (rows, columns), dtype)


blocks = register_operator(
    "blocks(Tensor x, Tensor values, Tensor block_columns, Tensor starts, Tensor? bias, int rows, int columns, "
    "bool relu=False, bool transposed=False) -> Tensor",
    compute_blocks,
    fake_blocks,
    *make_gradients(unpack_blocks_once, parts=3),
)
BlockTensor.product = staticmethod(blocks)
