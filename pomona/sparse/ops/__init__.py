"""The operators of `torch.ops.pomona`: the products of the packed formats, their convolutions, and `balanced_lstm`.

Importing this package registers them with torch, and `balanced`, `balanced_quantized`, `unstructured`, `two_of_four`,
`blocks`, `gaps` and `bitmap` as the products of their formats.
"""

from __future__ import annotations

from .bitmap_product import bitmap
from .block_product import blocks
from .conv2d import balanced_conv2d
from .gap_product import gaps
from .lstm import balanced_lstm
from .product import balanced
from .quantized_product import balanced_quantized
from .two_of_four_product import two_of_four
from .unstructured_conv2d import unstructured_conv2d
from .unstructured_product import unstructured

__all__ = [
    "balanced",
    "balanced_conv2d",
    "balanced_lstm",
    "balanced_quantized",
    "bitmap",
    "blocks",
    "gaps",
    "two_of_four",
    "unstructured",
    "unstructured_conv2d",
]
