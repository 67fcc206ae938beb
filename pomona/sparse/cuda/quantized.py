"""Products with balanced matrices of int8 or int4 codes on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..packed_tensor import DTYPE_CODES
from ..quantized import CODE_BITS, dequantize
from . import code_gather
from .backend import multiply_gathered, multiply_packed
from .code_units import arrange_units, choose_layout
from .launcher import MAX_WARP_BLOCK

choose_layout_once = cache(choose_layout)


def multiply_quantized(x: Tensor, values: Tensor, indices: Tensor, scales: Tensor, bias: Tensor | None, rows: int,
                       columns: int, block: int, span: int, relu: bool, transposed: bool) -> Tensor | None:  # fmt: skip
    """Return x Wᵀ + bias, or W x + bias with `transposed`; None where no kernel takes the arguments.

    `pomona.sparse.ops.quantized_product` describes the arguments. A few vectors are multiplied by the codes; for more,
    the values of the codes in the dtype of x are kept beside them, and multiplied by the kernels for such values.
    """
    if x.dtype not in DTYPE_CODES:
        return None
    parts = values, indices, scales
    if x.numel() <= code_gather.MAX_VECTORS * columns:
        layout = choose_layout_once(values.shape[2], block, CODE_BITS[values.dtype], values.shape[1], span)
        multiply = partial(code_gather.multiply, layout)
        units = make_and_keep(parts, (span, layout), lambda: arrange_units(*parts, block, span, layout))
        y = multiply_gathered(multiply, x, (units,), bias, rows, columns, relu, transposed)
        if y is not None:
            return y
    if block > MAX_WARP_BLOCK:
        return None
    floats = make_and_keep(parts, (span, x.dtype), lambda: dequantize(values, scales, span).to(x.dtype))
    return multiply_packed(x, floats, indices, bias, rows, columns, block, relu, transposed)


# What was made of the parts of packed matrices, with the versions of the tensors that it was made of.
_made = WeakIdKeyDictionary()


def make_and_keep(parts: Sequence[Tensor], key: Hashable, make: Callable[[], Tensor]) -> Tensor:
    """Return the tensor that `make` returns, and keep it until a part changes or the first of them is freed.

    Parts without a version, which were made in inference mode, could change unnoticed: nothing of them is kept, nor of
    a call that is captured, which would be made with each replay.
    """
    if any(part.is_inference() for part in parts):
        return make()
    source = tuple((part._version, part.data_ptr()) for part in parts)
    known, kept = _made.get(parts[0], (None, {}))
    if known != source:
        kept = {}
    if key not in kept:
        made = make()
        if made.is_cuda and torch.cuda.is_current_stream_capturing():
            return made
        kept[key] = made
        _made[parts[0]] = source, kept
    return kept[key]
