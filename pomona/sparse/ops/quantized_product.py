"""The operator `torch.ops.pomona.balanced_quantized`: the product with a packed matrix of int8 or int4 codes.

x is n × columns and y is n × rows; transposed, x is columns × n and y is rows × n, as for `torch.ops.pomona.balanced`.
With 8 `activation_bits` every vector of x is rounded to 8 bits; with 0 it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..cpu import backend as cpu
from ..cuda import quantized as cuda
from ..quantized import QuantizedBalancedTensor, round_activations, validate_quantized
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
# The same with integers, for vectors that are to be rounded to 8 bits.
INTEGER_BACKENDS: dict[str, Callable[..., Tensor | None]] = {"cpu": partial(cpu.multiply_quantized, input_bits=8)}


def reference_quantized(x: Tensor, values: Tensor, indices: Tensor, scales: Tensor, bias: Tensor | None, rows: int,
                        columns: int, block: int, span: int, activation_bits: int = 0, relu: bool = False,
                        transposed: bool = False) -> Tensor:  # fmt: skip
    """Return the product with the values that the codes stand for, in float32 or wider: the operator's definition."""
    weight = QuantizedBalancedTensor.unpack(values, indices, scales, rows, columns, block, span)
    rounded = round_activations(x, transposed) if activation_bits else x
    wide = weight.to(torch.promote_types(x.dtype, torch.float32))
    return multiply_dense(rounded, wide, bias, relu, transposed).to(x.dtype)


def compute_quantized(x: Tensor, values: Tensor, indices: Tensor, scales: Tensor, bias: Tensor | None, rows: int,
                      columns: int, block: int, span: int, activation_bits: int = 0, relu: bool = False,
                      transposed: bool = False) -> Tensor:  # fmt: skip
    """Return the product by the backend of the device, or by the dense matrix where that has no kernel."""
    sizes = rows, columns, block, span, activation_bits
    validate_quantized_product(x, values, indices, scales, bias, sizes, transposed)
    if x.numel() > 0 and rows > 0:
        arguments = values, indices, scales, bias, rows, columns, block, span, relu, transposed
        y = multiply_integers(x, *arguments) if activation_bits else multiply_codes(x, *arguments)
        if y is not None:
            return y
        warn_about_dense_product(explain_missing_kernel(x))
    rounded = round_activations(x, transposed) if activation_bits else x
    weight = unpack_quantized_once(values, indices, scales, *sizes, choose_dense_dtype(x))
    return multiply_dense(rounded, weight, bias, relu, transposed).to(x.dtype)


def multiply_codes(x: Tensor, *arguments: Any) -> Tensor | None:
    """Return the product by the backend of the device, or None where that has no kernel."""
    backend = BACKENDS.get(x.device.type)
    return None if backend is None else backend(x, *arguments)


def multiply_integers(x: Tensor, *arguments: Any) -> Tensor | None:
    """Return the product with every vector rounded to 8 bits: by a kernel with integers, or one with rounded floats."""
    backend = INTEGER_BACKENDS.get(x.device.type)
    y = None if backend is None else backend(x, *arguments)
    return multiply_codes(round_activations(x, arguments[-1]).to(x.dtype), *arguments) if y is None else y


def fake_quantized(x: Tensor, values: Tensor, indices: Tensor, scales: Tensor, bias: Tensor | None, rows: int,
                   columns: int, block: int, span: int, activation_bits: int = 0, relu: bool = False,
                   transposed: bool = False) -> Tensor:  # fmt: skip
    """Return an empty tensor of the product's shape, for torch.compile and torch.export."""
    sizes = rows, columns, block, span, activation_bits
    validate_quantized_product(x, values, indices, scales, bias, sizes, transposed)
    return x.new_empty((rows, x.shape[-1]) if transposed else (x.shape[0], rows))


def validate_quantized_product(x: Tensor, values: Tensor, indices: Tensor, scales: Tensor, bias: Tensor | None,
                               sizes: tuple[int, int, int, int, int], transposed: bool) -> None:  # fmt: skip
    """Raise PomonaError unless the arguments of a product fit together."""
    validate_quantized(values, indices, scales, *sizes)
    validate_vectors(x, values, bias, *sizes[:2], transposed)


def unpack_quantized_once(values: Tensor, indices: Tensor, scales: Tensor, rows: int, columns: int, block: int,
                          span: int, activation_bits: int, dtype: torch.dtype) -> Tensor:  # fmt: skip
    """Return the dense matrix in a dtype; it is kept for the next call, until a part changes or the codes are freed."""
    parts, sizes = (values, indices, scales), (rows, columns, block, span)  # inputs may be rounded or not
    return unpack_and_keep(QuantizedBalancedTensor.unpack, parts, sizes, dtype)


balanced_quantized = register_operator(
    "balanced_quantized(Tensor x, Tensor values, Tensor indices, Tensor scales, Tensor? bias, int rows, int columns, "
    "int block, int span, int activation_bits=0, bool relu=False, bool transposed=False) -> Tensor",
    compute_quantized,
    fake_quantized,
    *make_gradients(unpack_quantized_once, parts=3),
)
QuantizedBalancedTensor.product = staticmethod(balanced_quantized)
