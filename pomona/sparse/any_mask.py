"""The packed forms of weights with any mask: which formats a device has kernels for."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from .bitmap import BitmapTensor
from .gaps import MAX_COLUMNS, GapTensor
from .ops import bitmap_product, gap_product, unstructured_product
from .packed_tensor import PackedTensor
from .unstructured import UnstructuredTensor

# The formats, with the largest number of columns and the types of devices that have kernels.
FORMATS: tuple[tuple[type[UnstructuredTensor | GapTensor | BitmapTensor], float, Collection[str]], ...] = (
    (UnstructuredTensor, float("inf"), unstructured_product.BACKENDS),
    (GapTensor, MAX_COLUMNS, gap_product.BACKENDS),
    (BitmapTensor, float("inf"), bitmap_product.BACKENDS),
)


def pack_any_mask(
    weights: Mapping[str, Tensor], formats: Collection[str], dtype: torch.dtype | None
) -> dict[str, Mapping[str, PackedTensor]]:
    """Return the packed forms of weights by format and parameter name, in those `formats` that take all of them."""
    return {
        packed.format_name: {leaf: packed.from_dense(w).to(dtype or w.dtype) for leaf, w in weights.items()}
        for packed, columns, devices in FORMATS
        if packed.format_name in formats
        and all(w.device.type in devices and w[:1].numel() <= columns for w in weights.values())
    }
