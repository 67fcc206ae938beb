"""The operator `torch.ops.pomona.gaps`: the product with a matrix packed with gaps, which has survivors anywhere.

x is n × columns and y is n × rows; transposed, x is columns × n and y is rows × n, as for `torch.ops.pomona.balanced`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..cuda import backend as cuda
from ..gaps import GapTensor, unpack_gaps, validate_gaps
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
BACKENDS: dict[str, Callable[..., Tensor | None]] = {"cuda": cuda.multiply_gaps}


def compute_gaps(x: Tensor, values: Tensor, gaps: Tensor, firsts: Tensor, starts: Tensor, owners: Tensor, lanes: Tensor,
                 bias: Tensor | None, rows: int, columns: int, relu: bool = False, transposed: bool = False,
                 ) -> Tensor:  # fmt: skip
    """Return the product by the backend of the device, or by the dense matrix where that has no kernel."""
    validate_gap_product(x, values, gaps, firsts, starts, owners, lanes, bias, rows, columns, transposed)
    if x.numel() > 0 and rows > 0:
        backend = BACKENDS.get(x.device.type)
        y = backend and backend(x, values, gaps, firsts, starts, owners, lanes, bias, rows, columns, relu, transposed)
        if y is not None:
            return y
        warn_about_dense_product("gaps on a CPU" if x.device.type == "cpu" else explain_missing_kernel(x))
    dtype = choose_dense_dtype(x)
    weight = unpack_gaps_once(values, gaps, firsts, starts, owners, lanes, rows, columns, dtype)
    return multiply_dense(x, weight, bias, relu, transposed)


def fake_gaps(x: Tensor, values: Tensor, gaps: Tensor, firsts: Tensor, starts: Tensor, owners: Tensor, lanes: Tensor,
              bias: Tensor | None, rows: int, columns: int, relu: bool = False, transposed: bool = False,
              ) -> Tensor:  # fmt: skip
    """Return an empty tensor of the product's shape, for torch.compile and torch.export."""
    validate_gap_product(x, values, gaps, firsts, starts, owners, lanes, bias, rows, columns, transposed)
    return x.new_empty((rows, x.shape[-1]) if transposed else (x.shape[0], rows))


def validate_gap_product(x: Tensor, values: Tensor, gaps: Tensor, firsts: Tensor, starts: Tensor, owners: Tensor,
                         lanes: Tensor, bias: Tensor | None, rows: int, columns: int, transposed: bool,
                         ) -> None:  # fmt: skip
    """Raise PomonaError unless the arguments of a product fit together."""
    validate_gaps(values, gaps, firsts, starts, owners, lanes, rows, columns)
    validate_vectors(x, values, bias, rows, columns, transposed)


def unpack_gaps_once(values: Tensor, gaps: Tensor, firsts: Tensor, starts: Tensor, owners: Tensor, lanes: Tensor,
                     rows: int, columns: int, dtype: torch.dtype) -> Tensor:  # fmt: skip
    """Return the dense matrix in a dtype; it is kept for the next call, until the packed values change or are freed."""
    return unpack_and_keep(unpack_gaps, (values, gaps, firsts, starts, owners, lanes), (rows, columns), dtype)


gaps = register_operator(
    "gaps(Tensor x, Tensor values, Tensor gaps, Tensor firsts, Tensor starts, Tensor owners, Tensor lanes, "
    "Tensor? bias, int rows, int columns, bool relu=False, bool transposed=False) -> Tensor",
    compute_gaps,
    fake_gaps,
    *make_gradients(unpack_gaps_once, parts=6),
)
GapTensor.product = staticmethod(gaps)
