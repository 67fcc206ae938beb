"""How sparsity is shared between layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from .core.errors import unknown
from .patterns import Pattern


def select(scores: Mapping[str, Tensor], sparsity: float, pattern: Pattern, allocation: str) -> dict[str, Tensor]:
    """Masks that keep the highest scores: under one threshold if `global`, else layer by layer."""
    if allocation == "global":
        masks = pattern.masks(list(scores.values()), sparsity)
    else:
        shares = LAYERWISE[allocation]([s.shape for s in scores.values()], sparsity)
        masks = [pattern.masks([s], share)[0] for s, share in zip(scores.values(), shares, strict=True)]
    return dict(zip(scores, masks, strict=True))


def uniform(shapes: Sequence[Sequence[int]], sparsity: float) -> list[float]:
    """The same sparsity in every layer."""
    return [sparsity] * len(shapes)


def erk(shapes: Sequence[Sequence[int]], sparsity: float) -> list[float]:
    """Erdős–Rényi-Kernel (Evci et al., 2020): density ∝ Σ dims / Π dims, capped at 1.

    The factor is solved so that the whole has the sparsity asked for; a layer that would need more
    than all its weights stays dense and the factor is solved again for the rest.
    """
    sizes = [math.prod(shape) for shape in shapes]
    raw = [sum(shape) / size for shape, size in zip(shapes, sizes, strict=True)]
    dense: set[int] = set()
    while True:
        sparse = [i for i in range(len(shapes)) if i not in dense]
        budget = (1 - sparsity) * sum(sizes) - sum(sizes[i] for i in dense)
        factor = budget / sum(raw[i] * sizes[i] for i in sparse) if sparse else 0.0
        full = {i for i in sparse if factor * raw[i] > 1}
        if not full:
            break
        dense |= full
    return [0.0 if i in dense else 1 - factor * raw[i] for i in range(len(shapes))]


LAYERWISE: dict[str, Callable[[Sequence[Sequence[int]], float], list[float]]] = {
    "uniform": uniform,
    "erk": erk,
}
ALLOCATIONS = ("global", *LAYERWISE)


def check(allocation: str) -> None:
    """Refuse a name that is no allocation."""
    if allocation not in ALLOCATIONS:
        raise unknown("allocation", allocation, ALLOCATIONS)
