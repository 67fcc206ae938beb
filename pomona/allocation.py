"""Allocation of sparsity to layers.

"global" uses one threshold for all layers, and "global(floor=0.01)" also keeps at least that fraction of the weights
of every layer. "uniform" and "erk" give each layer a sparsity of its own.
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

TOLERANCE = 1e-9  # absorbs floating-point error: 0.29 · 100 is 28.999… and counts as 29


def select(scores: Mapping[str, Tensor], sparsity: float, pattern: Pattern, allocation: str) -> dict[str, Tensor]:
    """Return masks, by layer name, that keep the highest scores: over all layers if `global`, else in each layer."""
    name, floor = parse_allocation(allocation)
    tensors = list(scores.values())
    if name == "global":
        masks = pattern.select_masks(
            raise_floor_scores(tensors, sparsity, pattern, floor) if floor else tensors, sparsity
        )
    else:
        sparsities = LAYERWISE_ALLOCATIONS[name]([s.shape for s in tensors], sparsity)
        masks = [pattern.select_masks([s], one)[0] for s, one in zip(tensors, sparsities, strict=True)]
    return dict(zip(scores, masks, strict=True))


def raise_floor_scores(scores: Sequence[Tensor], sparsity: float, pattern: Pattern, floor: float) -> list[Tensor]:
    """Return the scores with +inf for those that the floor of their layer keeps, so that they are kept first."""
    counts = floor_counts([s.shape for s in scores], sparsity, pattern, floor)
    return [
        s.masked_fill(pattern.select_masks([s], 1 - count / s.numel())[0], torch.inf) if count else s
        for s, count in zip(scores, counts, strict=True)
    ]


def floor_counts(shapes: Sequence[torch.Size], sparsity: float, pattern: Pattern, floor: float) -> list[int]:
    """Return the minimum number of weights that each layer keeps: the fraction `floor` of them, in whole units.

    The numbers are rounded up to whole units of the pattern, or down where the sum of those rounded up exceeds what
    the sparsity keeps.
    """
    sizes, unit_sizes = [shape.numel() for shape in shapes], [pattern.unit_size(shape) for shape in shapes]
    unit_weights = [pattern.unit_weight(shape) for shape in shapes]

    def total_weight(kept: Sequence[int]) -> int:
        """Return the total in what the sparsity is a fraction of: weights, or filters."""
        return sum(n * weight // size for n, weight, size in zip(kept, unit_weights, unit_sizes, strict=True))

    up = [min(math.ceil(floor * n / size - TOLERANCE) * size, n) for n, size in zip(sizes, unit_sizes, strict=True)]
    if total_weight(up) <= total_weight(sizes) - count_pruned(sparsity, total_weight(sizes)):
        return up
    return [math.floor(floor * n / size + TOLERANCE) * size for n, size in zip(sizes, unit_sizes, strict=True)]


def uniform_sparsities(shapes: Sequence[Sequence[int]], sparsity: float) -> list[float]:
    """Return the same sparsity for every layer."""
    return [sparsity] * len(shapes)


def erk_sparsities(shapes: Sequence[Sequence[int]], sparsity: float) -> list[float]:
    """Return the sparsities of Erdős–Rényi-Kernel (Evci et al., 2020): density ∝ Σ dims / Π dims, capped at 1.

    The proportionality factor is chosen so that all layers together have the given sparsity. A layer whose density
    would exceed 1 stays dense, and the factor is solved again for the others.
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
    """Return the name of an allocation, and its floor, which is 0 where none is given."""
    name, bracket, rest = allocation.partition("(")
    name = name.strip()
    if name not in ALLOCATIONS:
        raise unknown_name_error("allocation", name, ALLOCATIONS)
    try:
        # `global` is a Python keyword and cannot be parsed as a name, so another name takes its place.
        options = parse_spec(f"options({rest}")[1] if bracket else {}
    except PomonaError as error:
        raise PomonaError(f"'{allocation}' is not of the form {name}(option=value, …).") from error
    floor = options.pop("floor", 0)
    for option in options:
        raise unknown_name_error(f"option of allocation '{name}'", option, ["floor"])
    require(
        isinstance(floor, (int, float)) and 0 <= floor < 1,
        f"floor is the minimum fraction of its weights that a layer keeps, in [0, 1), got {floor!r}.",
    )
    require(not floor or name == "global", f"only global takes a floor, got '{allocation}': leave it out.")
    return name, float(floor)


def normalize_allocation(allocation: str) -> str:
    """Return an allocation in its canonical form, which identifies runs; raise PomonaError if it is invalid."""
    require(isinstance(allocation, str), f"allocation takes one of {', '.join(ALLOCATIONS)}, got {allocation!r}.")
    name, floor = parse_allocation(allocation)
    return f"{name}(floor={floor})" if floor else name


def validate_allocation(allocation: str, sparsity: float = 0.0) -> None:
    """Raise PomonaError if the allocation is invalid, or its floor exceeds the fraction that the sparsity keeps."""
    floor = parse_allocation(allocation)[1]
    require(
        floor <= 1 - sparsity + TOLERANCE,
        f"floor={floor:g} keeps at least {floor:.2%} of every layer, but a sparsity of {sparsity:g} keeps only "
        f"{1 - sparsity:.2%} of all weights: lower floor or sparsity.",
    )
