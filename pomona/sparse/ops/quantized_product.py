"""The operator `torch.ops.pomona.balanced_quantized`: the product with a packed matrix of int8 or int4 codes.

x is n × columns and y is n × rows; transposed, x is columns × n and y is rows × n, as for `torch.ops.pomona.balanced`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..cpu import backend as cpu
from ..cuda import quantized as cuda
from ..quantized import QuantizedBalancedTensor, validate_quantized
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
    "cpu": cpu.multiply_quantized,
    "cuda": cuda.multiply_quantized,
}


def reference_quantized(x: Tensor, values: Tensor, indices: Tensor, scales: Tensor, bias: Tensor | None, rows: int,
                        columns: int, block: int, span: int, relu: bool = False, transposed: bool = False,
                        ) -> Tensor:  # fmt: skip
    """Return the product with the values that the codes stand for, in float32 or wider: the operator's definition."""
    weight = QuantizedBalancedTensor.unpack(values, indices, scales, rows, columns, block, span)
    return multiply_dense(x, weight.to(torch.promote_types(x.dtype, torch.float32)), bias, relu, transposed)


def compute_quantized(x: Tensor, values: Tensor, indices: Tensor, scales: Tensor, bias: Tensor | None, rows: int,
                      columns: int, block: int, span: int, relu: bool = False, transposed: bool = False,
                      ) -> Tensor:  # fmt: skip
    """Return the product by the backend of the device, or by the dense matrix where that has no kernel."""
    validate_quantized_product(x, values, indices, scales, bias, rows, columns, block, span, transposed)
    if x.numel() > 0 and rows > 0:
        backend = BACKENDS.get(x.device.type)
        y = backend and backend(x, values, indices, scales, bias, rows, columns, block, span, relu, transposed)
        if y is not None:
            return y
        warn_about_dense_product(explain_missing_kernel(x))
    weight = unpack_quantized_once(values, indices, scales, rows, columns, block, span, choose_dense_dtype(x))
    return multiply_dense(x, weight, bias, relu, transposed)


def fake_quantized(x: Tensor, values: Tensor, indices: Tensor, scales: Tensor, bias: Tensor | None, rows: int,
                   columns: int, block: int, span: int, relu: bool = False, transposed: bool = False,
                   ) -> Tensor:  # fmt: skip
    """Return an empty tensor of the product's shape, for torch.compile and torch.export."""
    validate_quantized_product(x, values, indices, scales, bias, rows, columns, block, span, transposed)
    return x.new_empty((rows, x.shape[-1]) if transposed else (x.shape[0], rows))


def validate_quantized_product(x: Tensor, values: Tensor, indices: Tensor, scales: Tensor, bias: Tensor | None,
                               rows: int, columns: int, block: int, span: int, transposed: bool) -> None:  # fmt: skip
    """Raise PomonaError unless the arguments of a product fit together."""
    validate_quantized(values, indices, scales, rows, columns, block, span)
    validate_vectors(x, values, bias, rows, columns, transposed)


def unpack_quantized_once(values: Tensor, indices: Tensor, scales: Tensor, rows: int, columns: int, block: int,
                          span: int, dtype: torch.dtype) -> Tensor:  # fmt: skip
    """Return the dense matrix in a dtype; it is kept for the next call, until a part changes or the codes are freed."""
    parts, sizes = (values, indices, scales), (rows, columns, block, span)
    return unpack_and_keep(QuantizedBalancedTensor.unpack, parts, sizes, dtype)


balanced_quantized = register_operator(
    "balanced_quantized(Tensor x, Tensor values, Tensor indices, Tensor scales, Tensor? bias, int rows, int columns, "
    "int block, int span, bool relu=False, bool transposed=False) -> Tensor",
    compute_quantized,
    fake_quantized,
    *make_gradients(unpack_quantized_once, parts=3),
)
QuantizedBalancedTensor.product = staticmethod(balanced_quantized)
