"""The operator `torch.ops.pomona.balanced`: the product with a packed matrix.

x is n × columns and y is n × rows; transposed, x is columns × n and y is rows × n. The columns of x may be several
dimensions, of any strides, overlapping ones too: a convolution multiplies a view of its input.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...errors import PomonaError
from ..cpu import backend as cpu
from ..cuda import backend as cuda
from ..format import register_product, unpack_matrix, validate_packed
from .registration import register_operator


class Backend(Protocol):
    """The product on one type of device. It returns None for arguments that it has no kernel for."""

    def __call__(self, x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, columns: int,
                 block: int, relu: bool, transposed: bool, /) -> Tensor | None: ...  # fmt: skip


BACKENDS: dict[str, Backend] = {"cpu": cpu.multiply_packed, "cuda": cuda.multiply_packed}


def reference_product(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, columns: int,
                      block: int, relu: bool = False, transposed: bool = False) -> Tensor:  # fmt: skip
    """Return the dense product in float32 or wider, in the dtype of x: the definition of the operator."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    weight = unpack_matrix(values, indices, rows, columns, block).to(dtype)
    y = weight @ x.to(dtype).reshape(columns, -1) if transposed else x.to(dtype).reshape(-1, columns) @ weight.T
    if bias is not None:
        y = y + (bias.to(dtype).unsqueeze(1) if transposed else bias.to(dtype))
    return (y.relu() if relu else y).to(x.dtype)


def compute_product(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, columns: int,
                    block: int, relu: bool = False, transposed: bool = False) -> Tensor:  # fmt: skip
    """Return the product by the backend of the device, or by the reference where that has no kernel."""
    validate_product(x, values, indices, bias, rows, columns, block, transposed)
    backend = BACKENDS.get(x.device.type)
    if backend is not None and x.numel() > 0 and rows > 0:
        y = backend(x, values, indices, bias, rows, columns, block, relu, transposed)
        if y is not None:
            return y
    return reference_product(x, values, indices, bias, rows, columns, block, relu, transposed)


def fake_product(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, columns: int, block: int,
                 relu: bool = False, transposed: bool = False) -> Tensor:  # fmt: skip
    """Return an empty tensor of the product's shape, for torch.compile and torch.export."""
    validate_product(x, values, indices, bias, rows, columns, block, transposed)
    return x.new_empty((rows, x.shape[-1]) if transposed else (x.shape[0], rows))


def validate_product(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, columns: int,
                     block: int, transposed: bool) -> None:  # fmt: skip
    """Raise PomonaError unless the arguments of a product fit together."""
    validate_packed(values, indices, rows, columns, block)
    inner = x.shape[:-1] if transposed else x.shape[1:]
    if x.ndim < 2 or inner.numel() != columns or not x.is_floating_point():
        raise PomonaError(f"x {tuple(x.shape)} of {x.dtype} does not fit a packed matrix of {rows}×{columns}.")
    if bias is not None and bias.shape != (rows,):
        raise PomonaError(f"the bias has shape {tuple(bias.shape)} where {(rows,)} is needed.")
    if x.device != values.device:
        raise PomonaError(f"x is on {x.device}, the packed weight on {values.device}: move one of them.")


# The schema is public and keeps its argument names: `turned` is `transposed` here.
balanced = register_operator(
    "balanced(Tensor x, Tensor values, Tensor indices, Tensor? bias, int rows, int columns, int block, "
    "bool relu=False, bool turned=False) -> Tensor",
    compute_product,
    fake_product,
)
register_product(balanced)
