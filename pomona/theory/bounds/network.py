"""The chain of layers that the theorems of Qian & Klabjan (2021) are about: its shapes, norms and error propagation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from ...errors import require
from ..validation import require_positive


def layer_shapes(widths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the rows and columns of each layer's matrix."""
    return [(b, a) for a, b in pairwise(widths)]


def inner_layer_sizes(widths: Sequence[int]) -> list[int]:
    """Return D_k, the number of weights, of the layers 1 < k < l, which are those that are pruned."""
    return [a * b for a, b in layer_shapes(widths)[1:-1]]


def with_hidden_width(widths: Sequence[int], width: int) -> tuple[int, ...]:
    """Return the widths of the same network with all hidden layers `width` wide."""
    return (widths[0], *[width] * (len(widths) - 2), widths[-1])


def lipschitz_product(lipschitz: float | Sequence[float], count: int) -> float:
    """Return L_1 … L_{l−1}, from one constant for all `count` activations or one for each."""
    each = [lipschitz] * count if isinstance(lipschitz, (int, float)) else [float(L) for L in lipschitz]
    require(len(each) == count, f"there are {count} activations, and so as many Lipschitz constants, got {len(each)}.")
    require_positive(**{f"lipschitz {k}": L for k, L in enumerate(each, 1)})
    return math.prod(each)


def propagated_error(norms: Sequence[float], removed: Sequence[float]) -> float:
    """Return Π (‖W_k‖ + ‖W_k − W_k*‖) − Π ‖W_k‖, with nothing removed from the first and the last layer.

    `removed` holds ‖W_k − W_k*‖ of the inner layers. The result is summed layer by layer, because the difference of the
    two products would cancel.
    """
    product, gap = norms[0], 0.0
    for norm, removed_norm in zip(norms[1:-1], removed, strict=True):
        product, gap = product * norm, gap * (norm + removed_norm) + product * removed_norm
    return gap * norms[-1]
