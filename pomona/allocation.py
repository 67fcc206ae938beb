"""How sparsity is shared between layers.

"global", with one threshold for all; "global(floor=0.01)", where every layer keeps at least that share of its
weights; "uniform" and "erk", where each layer has a sparsity of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .errors import PomonaError, require, unknown_name_error
from .masking import count_pruned
from .patterns import Pattern
from .registry import parse_spec


def select(scores: Mapping[str, Tensor], sparsity: float, pattern: Pattern, allocation: str) -> dict[str, Tensor]:
    """Masks that keep the highest scores: under one threshold if `global`, else layer by layer."""
    name, floor = parse_allocation(allocation)
    tensors = list(scores.values())
    if name == "global":
        masks = pattern.select_masks(
            raise_floor_scores(tensors, sparsity, pattern, floor) if floor else tensors, sparsity
        )
    else:
        shares = LAYERWISE_ALLOCATIONS[name]([s.shape for s in tensors], sparsity)
        masks = [pattern.select_masks([s], share)[0] for s, share in zip(tensors, shares, strict=True)]
    return dict(zip(scores, masks, strict=True))


def raise_floor_scores(scores: Sequence[Tensor], sparsity: float, pattern: Pattern, floor: float) -> list[Tensor]:
    """The scores, with +inf where a floor keeps the highest of a layer, so that they come before all others."""
    counts = floor_counts([s.shape for s in scores], sparsity, pattern, floor)
    return [
        s.masked_fill(pattern.select_masks([s], 1 - count / s.numel())[0], torch.inf) if count else s
        for s, count in zip(scores, counts, strict=True)
    ]


def floor_counts(shapes: Sequence[torch.Size], sparsity: float, pattern: Pattern, floor: float) -> list[int]:
    """How many weights of each layer are kept at least.

    That share of them, rounded up to what comes and goes together; or down, where up is more than the sparsity leaves.
    """
    sizes, units = [shape.numel() for shape in shapes], [pattern.unit_size(shape) for shape in shapes]
    worth = [pattern.unit_weight(shape) for shape in shapes]

    def counted(kept: Sequence[int]) -> int:
        """In what the sparsity is a share of: weights, or filters."""
        return sum(n * w // q for n, w, q in zip(kept, worth, units, strict=True))

    up = [min(math.ceil(floor * n / q - 1e-9) * q, n) for n, q in zip(sizes, units, strict=True)]
    if counted(up) <= counted(sizes) - count_pruned(sparsity, counted(sizes)):
        return up
    return [math.floor(floor * n / q + 1e-9) * q for n, q in zip(sizes, units, strict=True)]


def uniform_sparsities(shapes: Sequence[Sequence[int]], sparsity: float) -> list[float]:
    """The same sparsity in every layer."""
    return [sparsity] * len(shapes)


def erk_sparsities(shapes: Sequence[Sequence[int]], sparsity: float) -> list[float]:
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


LAYERWISE_ALLOCATIONS: dict[str, Callable[[Sequence[Sequence[int]], float], list[float]]] = {
    "uniform": uniform_sparsities,
    "erk": erk_sparsities,
}
ALLOCATIONS = ("global", *LAYERWISE_ALLOCATIONS)


@functools.cache
def parse_allocation(allocation: str) -> tuple[str, float]:
    """An allocation's name, and its floor: 0 where it has none."""
    name, bracket, rest = allocation.partition("(")
    name = name.strip()
    if name not in ALLOCATIONS:
        raise unknown_name_error("allocation", name, ALLOCATIONS)
    try:
        options = parse_spec(f"options({rest}")[1] if bracket else {}  # `global` itself is a word of Python's own
    except PomonaError as error:
        raise PomonaError(f"'{allocation}' is not of the form {name}(option=value, …).") from error
    floor = options.pop("floor", 0)
    for option in options:
        raise unknown_name_error(f"option of allocation '{name}'", option, ["floor"])
    require(
        isinstance(floor, (int, float)) and 0 <= floor < 1,
        f"floor is the share of its weights that a layer keeps at least, in [0, 1), got {floor!r}.",
    )
    require(not floor or name == "global", f"only global takes a floor, got '{allocation}': leave it out.")
    return name, float(floor)


def normalize_allocation(allocation: str) -> str:
    """An allocation in the one spelling that names runs; what is none is refused."""
    require(isinstance(allocation, str), f"allocation takes one of {', '.join(ALLOCATIONS)}, got {allocation!r}.")
    name, floor = parse_allocation(allocation)
    return f"{name}(floor={floor})" if floor else name


def validate_allocation(allocation: str, sparsity: float = 0.0) -> None:
    """Refuse a floor above what the sparsity leaves."""
    floor = parse_allocation(allocation)[1]
    require(
        floor <= 1 - sparsity + 1e-9,
        f"every layer is to keep at least {floor:.2%} of its weights, and at a sparsity of {sparsity:g} only "
        f"{1 - sparsity:.2%} of all are kept: lower floor or sparsity.",
    )
