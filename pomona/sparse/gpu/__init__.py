"""The kernels for CUDA: in CUDA C++ one for a few vectors or an LSTM and one for more or a convolution, and in Triton
one for all that is left."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from . import conv, few, lstm, some

__all__ = ["conv", "few", "lstm", "product", "some"]

FEW = 8  # vectors up to which shuffles beat the tensor cores


def product(
    x: Tensor,
    values: Tensor,
    indices: Tensor,
    bias: Tensor | None,
    rows: int,
    columns: int,
    block: int,
    relu: bool,
    turned: bool,
) -> Tensor | None:
    """x Wᵀ + bias, or W x + bias where x is turned; None where there is no kernel for it."""
    if x.get_device() != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return product(x, values, indices, bias, rows, columns, block, relu, turned)
    flat = x.reshape(columns, -1).T if turned else x if x.ndim == 2 else x.reshape(x.shape[0], columns)
    n = flat.shape[0]
    y = x.new_empty((rows, n) if turned else (n, rows))
    given = flat, values, indices, bias, y.T if turned else y, columns, block, relu
    for kernel in kernels(n):
        if kernel.multiply(*given):
            return y
    return None


def kernels(n: int) -> Iterator[ModuleType]:
    """Those for so many vectors, the fastest first."""
    yield from (few, some) if n <= FEW else (some, few)
    try:
        from . import many
    except ImportError:  # no Triton
        return
    yield many
