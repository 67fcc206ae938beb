"""The kernels for CUDA: in CUDA C++ one for a few vectors or an LSTM and two for more or a convolution, of which one is
for Hopper alone; and in Triton one for all that is left."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from . import conv, few, hopper, lstm, some

__all__ = ["conv", "few", "hopper", "lstm", "product", "some"]

FEW = 8  # vectors up to which shuffles beat the tensor cores
SMALL = 1 << 24  # entries of a matrix, of which twice as many vectors are few: it leaves the tensor cores idle


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
    n, size = flat.shape[0], rows * columns
    y = x.new_empty((rows, n) if turned else (n, rows))
    given = flat, values, indices, bias, y.T if turned else y, columns, block, relu
    for kernel in kernels(n, size):
        if kernel.multiply(*given):
            return y
    return None


def kernels(n: int, size: int) -> Iterator[ModuleType]:
    """Those for so many vectors and a matrix of this size, the fastest first."""
    more = hopper, some
    yield from (few, *more) if n <= FEW * (1 + (size <= SMALL)) else (*more, few)
    try:
        from . import many
    except ImportError:  # no Triton
        return
    yield many
