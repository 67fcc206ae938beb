"""The operator `torch.ops.pomona.balanced`: the product with a packed matrix.

x is n × columns and y is n × rows; transposed, x is columns × n and y is rows × n. The columns of x may be several
dimensions, of any strides, overlapping ones too: a convolution multiplies a view of its input.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import PomonaError
from ..cpu import backend as cpu
from ..cuda import backend as cuda
from ..format import DTYPES, register_product, unpack_matrix, validate_packed
from .registration import is_traced, register_operator


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


def multiply_dense(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool, transposed: bool) -> Tensor:
    """Return the product with a dense matrix in that matrix's dtype, rounded to the dtype of x."""
    dtype, columns = weight.dtype, weight.shape[1]
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
        warn_about_dense_product(explain_missing_kernel(x))
    weight = unpack_once(values, indices, rows, columns, block, torch.promote_types(x.dtype, torch.float32))
    return multiply_dense(x, weight, bias, relu, transposed)


# The dense matrices of packed values that had to be unpacked, with the versions of the tensors that they came from.
_unpacked = WeakIdKeyDictionary()


def unpack_once(values: Tensor, indices: Tensor, rows: int, columns: int, block: int, dtype: torch.dtype) -> Tensor:
    """Return the dense matrix in a dtype; it is kept for the next call, until the packed values change or are freed."""
    if is_traced(values) or values.is_inference() or indices.is_inference():  # tensors without addresses or versions
        return unpack_matrix(values, indices, rows, columns, block).to(dtype)
    versions = values._version, indices._version, torch.is_inference_mode_enabled()
    source = versions, indices.data_ptr(), rows, columns, block, dtype
    known, weight = _unpacked.get(values, (None, None))
    if known != source:
        weight = unpack_matrix(values, indices, rows, columns, block).to(dtype)
        _unpacked[values] = source, weight
    return weight


def explain_missing_kernel(x: Tensor) -> str:
    """Return why no kernel could multiply this input."""
    if x.dtype not in DTYPES:
        return f"an input of {x.dtype}"
    if x.device.type == "cpu":
        missing = cpu.load_library() is None
        return "a machine without compiled kernels" if missing else "an input with an infinity or NaN"
    return f"an input on {x.device.type} that no kernel supports"


@cache
def warn_about_dense_product(reason: str) -> None:
    """Warn, once for each reason, that packed weights are multiplied as dense ones."""
    warnings.warn(
        f"packed weights are multiplied as dense ones for {reason}: that is slower than a dense model and takes more "
        "memory; pm.decompress(model) returns the dense model.",
        stacklevel=2,
    )


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


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save what `product_gradients` needs."""
    x, values, indices, _, rows, columns, block, relu, transposed = inputs
    ctx.sizes, ctx.transposed, ctx.shape = (rows, columns, block), transposed, x.shape
    ctx.save_for_backward(values, indices, output if relu else None)


def product_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients of x and bias; the packed values and indices have none."""
    if ctx.needs_input_grad[1]:
        raise PomonaError("packed values have no gradient: train the dense model, and compress it afterwards.")
    values, indices, output = ctx.saved_tensors
    if output is not None:
        grad = torch.where(output > 0, grad, 0)
    (rows, columns, block), grad_x, grad_bias = ctx.sizes, None, None
    if ctx.needs_input_grad[0]:
        weight = unpack_once(values, indices, rows, columns, block, grad.dtype)
        grad_x = (weight.T @ grad if ctx.transposed else grad @ weight).reshape(ctx.shape)
    if ctx.needs_input_grad[3]:
        grad_bias = grad.sum(1 if ctx.transposed else 0)
    return grad_x, None, None, grad_bias, *[None] * 5


# The schema is public and keeps its argument names: `turned` is `transposed` here.
balanced = register_operator(
    "balanced(Tensor x, Tensor values, Tensor indices, Tensor? bias, int rows, int columns, int block, "
    "bool relu=False, bool turned=False) -> Tensor",
    compute_product,
    fake_product,
    product_gradients,
    save_for_backward,
)
register_product(balanced)
