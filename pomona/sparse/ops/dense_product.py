"""What the products with packed matrices share: the dense product in their place, their derivatives, and validation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import PomonaError
from ..cpu import backend as cpu
from ..packed_tensor import DTYPES
from .registration import is_traced


def multiply_dense(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool, transposed: bool) -> Tensor:
    """Return the product with a dense matrix in that matrix's dtype, rounded to the dtype of x."""
    dtype, columns = weight.dtype, weight.shape[1]
    y = weight @ x.to(dtype).reshape(columns, -1) if transposed else x.to(dtype).reshape(-1, columns) @ weight.T
    if bias is not None:
        y = y + (bias.to(dtype).unsqueeze(1) if transposed else bias.to(dtype))
    return (y.relu() if relu else y).to(x.dtype)


def choose_dense_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype for the dense product: a GPU multiplies 16 bits as they are, and adds up in float32."""
    return x.dtype if x.is_cuda else torch.promote_types(x.dtype, torch.float32)


# The dense matrices of packed values that had to be unpacked, by dtype, with what tells whether the parts have changed.
_unpacked = WeakIdKeyDictionary()


def unpack_and_keep(
    unpack: Callable[..., Tensor], parts: Sequence[Tensor], sizes: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return the dense matrix of `unpack(*parts, *sizes)` in a dtype, values being the first part.

    It is kept for the next call, until a part changes or the values are freed.
    """
    if not can_keep(parts):
        return unpack(*parts, *sizes).to(dtype)
    versions, addresses = tuple(part._version for part in parts), tuple(part.data_ptr() for part in parts[1:])
    source = versions, addresses, tuple(sizes)
    known, weights = _unpacked.get(parts[0], (None, {}))
    if known != source:
        weights = {}
        _unpacked[parts[0]] = source, weights
    if dtype not in weights:
        with torch.inference_mode(False):  # a tensor of inference mode could not be used for gradients later
            weights[dtype] = unpack(*parts, *sizes).to(dtype)
    return weights[dtype]


def can_keep(parts: Sequence[Tensor]) -> bool:
    """Return whether what is computed from these tensors can be used again until their versions change.

    Tensors that are traced have no addresses, those of inference mode no versions, and the memory of a CUDA graph has
    its contents only while the graph is replayed.
    """
    if is_traced(parts[0]) or any(part.is_inference() or part.requires_grad for part in parts):
        return False
    return not (parts[0].is_cuda and torch.cuda.is_current_stream_capturing())


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


def validate_vectors(x: Tensor, values: Tensor, bias: Tensor | None, rows: int, columns: int, transposed: bool) -> None:
    """Raise PomonaError unless x and bias fit a packed matrix of this size with these values."""
    inner = x.shape[:-1] if transposed else x.shape[1:]
    if x.ndim < 2 or inner.numel() != columns or not x.is_floating_point():
        raise PomonaError(f"x {tuple(x.shape)} of {x.dtype} does not fit a packed matrix of {rows}×{columns}.")
    if bias is not None and bias.shape != (rows,):
        raise PomonaError(f"the bias has shape {tuple(bias.shape)} where {(rows,)} is needed.")
    if x.device != values.device:
        raise PomonaError(f"x is on {x.device}, the packed weight on {values.device}: move one of them.")


def make_gradients(unpack_once: Callable[..., Tensor], parts: int) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Return the two functions of `torch.library.register_autograd` for a product.

    The arguments of the product are x, so many parts, the bias, the sizes, `relu` and `transposed`. `unpack_once` takes
    the parts, the sizes and a dtype.
    """

    def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *packed = inputs[: 1 + parts]
        *ctx.sizes, relu, ctx.transposed = inputs[2 + parts :]
        ctx.shape = x.shape
        ctx.save_for_backward(*packed, output if relu else None)

    def product_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the gradients of x and bias; the parts have none."""
        if ctx.needs_input_grad[1]:
            raise PomonaError("packed values have no gradient: train the dense model, and compress it afterwards.")
        *packed, output = ctx.saved_tensors
        if output is not None:
            grad = torch.where(output > 0, grad, 0)
        grad_x, grad_bias = None, None
        if ctx.needs_input_grad[0]:
            weight = unpack_once(*packed, *ctx.sizes, grad.dtype)
            grad_x = (weight.T @ grad if ctx.transposed else grad @ weight).reshape(ctx.shape)
        if ctx.needs_input_grad[1 + parts]:
            grad_bias = grad.sum(1 if ctx.transposed else 0)
        return grad_x, *[None] * parts, grad_bias, *[None] * (len(ctx.sizes) + 2)

    return product_gradients, save_for_backward
