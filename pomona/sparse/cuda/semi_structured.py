"""Products of 2:4 matrices on a CUDA device, by PyTorch's semi-structured kernels for sparse tensor cores."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..two_of_four import unpack_two_of_four
from .quantized import make_and_keep

MIN_CAPABILITY = (8, 0)  # the oldest one with sparse tensor cores
DTYPES = (torch.float16, torch.bfloat16)
ALIGNMENT = 64  # rows and columns of a matrix, and vectors, that the kernels of every version take are multiples of it


def is_supported(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Return whether a GPU of this compute capability multiplies 2:4 matrices of a dtype."""
    return dtype in DTYPES and capability >= MIN_CAPABILITY


def multiply_two_of_four(x: Tensor, values: Tensor, places: Tensor, bias: Tensor | None, rows: int, columns: int,
                         relu: bool, transposed: bool) -> Tensor | None:  # fmt: skip
    """Return x Wᵀ + bias, or W x + bias with `transposed`; None where no kernel takes the arguments.

    The matrix in the form of these kernels is kept beside the packed one, until a part changes or is freed. A vector
    with an infinity or NaN gives NaN in all rows. `pomona.sparse.ops.two_of_four_product` describes the arguments.
    """
    if x.dtype != values.dtype or not is_supported(x.dtype, torch.cuda.get_device_capability(x.device)):
        return None
    weight = make_and_keep((values, places), "semi-structured", lambda: convert(values, places, rows, columns))
    flat = x.reshape(columns, -1).T if transposed else x.reshape(x.shape[0], columns)
    n = len(flat)
    padded = pad(flat, (0, -columns % ALIGNMENT, 0, -n % ALIGNMENT)).contiguous()
    y = torch.nn.functional.linear(padded, weight)[:n, :rows]
    y = y + (flat * 0).sum(1, keepdim=True)  # the kernels skip pruned weights, whose product with an infinity is NaN
    if bias is not None:
        y = y + bias.to(y.dtype)
    y = y.relu() if relu else y
    return y.T.contiguous() if transposed else y.contiguous()


def convert(values: Tensor, places: Tensor, rows: int, columns: int) -> Tensor:
    """Return the matrix, padded with zeros to whole tiles, in the form of PyTorch's kernels."""
    dense = unpack_two_of_four(values, places, rows, columns)
    padded = pad(dense, (0, -columns % ALIGNMENT, 0, -rows % ALIGNMENT)).contiguous()
    return torch.sparse.to_sparse_semi_structured(padded)
