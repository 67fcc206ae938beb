"""The operators of `torch.ops.pomona`: `balanced`, `unstructured` and `gaps`, their convolutions, and `balanced_lstm`.

Importing this package registers them with torch, and `balanced`, `unstructured` and `gaps` as the products of their
formats.
"""

from __future__ import annotations

from .conv2d import balanced_conv2d
from .gap_product import gaps
from .lstm import balanced_lstm
from .product import balanced
from .unstructured_conv2d import unstructured_conv2d
from .unstructured_product import unstructured

__all__ = ["balanced", "balanced_conv2d", "balanced_lstm", "gaps", "unstructured", "unstructured_conv2d"]
