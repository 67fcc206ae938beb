"""The operator `torch.ops.pomona.balanced`: the product with a packed matrix.

x is n × columns and y is n × rows; transposed, x is columns × n and y is rows × n. The columns of x may be several
dimensions, of any strides, overlapping ones too: a convolution multiplies a view of its input.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..cpu import backend as cpu
from ..cuda import backend as cuda
from ..format import BalancedTensor, unpack_matrix, validate_packed
from .dense_product import (
    explain_missing_kernel,
    make_gradients,
    multiply_dense,
    unpack_and_keep,
    validate_vectors,
    warn_about_dense_product,
)
from .registration import register_operator


class Backend(Protocol):
    """The product on one type of device. It returns None for arguments that it has no kernel for."""

    def __call__(self, x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, columns: int,
                 block: int, relu: bool, transposed: bool, /) -> Tensor | None: ...  # fmt: skip


BACKENDS: dict[str, Backend] = {"cpu": cpu.multiply_packed, "cuda": cuda.multiply_packed}


def reference_product(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, columns: int,
                      block: int, relu: bool = False, transposed: bool = False) -> Tensor:  # fmt: skip
    """Return the dense product in float32 or wider, in the dtype of x: the definition of the operator."""
    weight = unpack_matrix(values, indices, rows, columns, block)
    return multiply_dense(x, weight.to(torch.promote_types(x.dtype, torch.float32)), bias, relu, transposed)


def compute_product(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, columns: int,
                    block: int, relu: bool = False, transposed: bool = False) -> Tensor:  # fmt: skip
    """Return the product by the backend of the device, or by the reference where that has no kernel."""
    validate_product(x, values, indices, bias, rows, columns, block, transposed)
    backend = BACKENDS.get(x.device.type)
    if backend is not None and x.numel() > 0 and rows > 0:
        y = backend(x, values, indices, bias, rows, columns, block, relu, transposed)
        if y is not None:
            return y
        warn_about_dense_product(explain_missing_kernel(x))
    weight = unpack_once(values, indices, rows, columns, block, torch.promote_types(x.dtype, torch.float32))
    return multiply_dense(x, weight, bias, relu, transposed)


def unpack_once(values: Tensor, indices: Tensor, rows: int, columns: int, block: int, dtype: torch.dtype) -> Tensor:
    """Return the dense matrix in a dtype; it is kept for the next call, until the packed values change or are freed."""
    return unpack_and_keep(BalancedTensor.unpack, (values, indices), (rows, columns, block), dtype)


def fake_product(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, columns: int, block: int,
                 relu: bool = False, transposed: bool = False) -> Tensor:  # fmt: skip
    """Return an empty tensor of the product's shape, for torch.compile and torch.export."""
    validate_product(x, values, indices, bias, rows, columns, block, transposed)
    return x.new_empty((rows, x.shape[-1]) if transposed else (x.shape[0], rows))


def validate_product(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, columns: int,
                     block: int, transposed: bool) -> None:  # fmt: skip
    """Raise PomonaError unless the arguments of a product fit together."""
    validate_packed(values, indices, rows, columns, block)
    validate_vectors(x, values, bias, rows, columns, transposed)


# The schema is public and keeps its argument names: `turned` is `transposed` here.
balanced = register_operator(
    "balanced(Tensor x, Tensor values, Tensor indices, Tensor? bias, int rows, int columns, int block, "
    "bool relu=False, bool turned=False) -> Tensor",
    compute_product,
    fake_product,
    *make_gradients(unpack_once, parts=2),
)
BalancedTensor.product = staticmethod(balanced)
