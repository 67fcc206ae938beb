"""The operators `torch.ops.pomona.balanced`, `balanced_conv2d` and `balanced_lstm`: packed weights on any device.

Importing this package registers them with torch, and `balanced` as the product of `BalancedTensor.linear`.
"""

from __future__ import annotations

from .conv2d import balanced_conv2d
from .lstm import balanced_lstm
from .product import balanced

__all__ = ["balanced", "balanced_conv2d", "balanced_lstm"]
