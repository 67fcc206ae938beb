"""The operator `torch.ops.pomona.bitmap`: the product with a matrix packed with bitmaps, which has survivors anywhere.

x is n × columns and y is n × rows; transposed, x is columns × n and y is rows × n, as for `torch.ops.pomona.balanced`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..bitmap import BitmapTensor, unpack_bitmap, validate_bitmap
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
BACKENDS: dict[str, Callable[..., Tensor | None]] = {"cuda": cuda.multiply_bitmap}


def compute_bitmap(x: Tensor, values: Tensor, words: Tensor, starts: Tensor, bias: Tensor | None, rows: int,
                   columns: int, most: int, relu: bool = False, transposed: bool = False) -> Tensor:  # fmt: skip
    """Return the product by the backend of the device, or by the dense matrix where that has no kernel."""
    validate_bitmap_product(x, values, words, starts, bias, rows, columns, most, transposed)
    if x.numel() > 0 and rows > 0:
        backend = BACKENDS.get(x.device.type)
        y = backend and backend(x, values, words, starts, bias, rows, columns, most, relu, transposed)
        if y is not None:
            return y
        warn_about_dense_product("bitmaps on a CPU" if x.device.type == "cpu" else explain_missing_kernel(x))
    dtype = choose_dense_dtype(x)
    weight = unpack_bitmap_once(values, words, starts, rows, columns, most, dtype)
    return multiply_dense(x, weight, bias, relu, transposed)


def fake_bitmap(x: Tensor, values: Tensor, words: Tensor, starts: Tensor, bias: Tensor | None, rows: int,
                columns: int, most: int, relu: bool = False, transposed: bool = False) -> Tensor:  # fmt: skip
    """Return an empty tensor of the product's shape, for torch.compile and torch.export."""
    validate_bitmap_product(x, values, words, starts, bias, rows, columns, most, transposed)
    return x.new_empty((rows, x.shape[-1]) if transposed else (x.shape[0], rows))


def validate_bitmap_product(x: Tensor, values: Tensor, words: Tensor, starts: Tensor, bias: Tensor | None, rows: int,
                            columns: int, most: int, transposed: bool) -> None:  # fmt: skip
    """Raise PomonaError unless the arguments of a product fit together."""
    validate_bitmap(values, words, starts, rows, columns, most)
    validate_vectors(x, values, bias, rows, columns, transposed)


def unpack_bitmap_once(values: Tensor, words: Tensor, starts: Tensor, rows: int, columns: int, most: int,
                       dtype: torch.dtype) -> Tensor:  # fmt: skip
    """Return the dense matrix in a dtype; it is kept for the next call, until the packed values change or are freed."""
    return unpack_and_keep(unpack_bitmap, (values, words, starts), (rows, columns, most), dtype)


bitmap = register_operator(
    "bitmap(Tensor x, Tensor values, Tensor words, Tensor starts, Tensor? bias, int rows, int columns, int most, "
    "bool relu=False, bool transposed=False) -> Tensor",
    compute_bitmap,
    fake_bitmap,
    *make_gradients(unpack_bitmap_once, parts=3),
)
BitmapTensor.product = staticmethod(bitmap)
