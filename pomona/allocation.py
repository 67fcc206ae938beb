"""Allocation of sparsity to layers.

"global" uses one threshold for all layers, "uniform" and "erk" set the sparsity of each layer separately. None of them
empties a layer. "global" keeps a small share of every layer: by default `FLOOR_SHARE` of the overall density, and with
"global(floor=0.01)" that fraction of the layer's weights. Only "global(floor=0)" is one threshold and nothing else.
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
from .patterns.sharded_selection import select_masks
from .registry import parse_spec

TOLERANCE = 1e-9  # absorbs floating-point error: 0.29 · 100 is 28.999… and counts as 29
FLOOR_SHARE = 1 / 20  # the default floor of a layer's density, as a share of the overall density


def select(
    scores: Mapping[str, Tensor],
    sparsity: float,
    pattern: Pattern,
    allocation: str,
    *,
    magnitudes: bool = False,
    within: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return masks, by layer name, that keep the highest scores: over all layers if `global`, else in each layer.

    With `magnitudes`, |score| is ranked, and entries off the masks `within` rank below all others.
    """
    name, floor = parse_allocation(allocation)
    tensors, shapes = list(scores.values()), [s.shape for s in scores.values()]
    if name == "global":
        counts = floor_counts(shapes, sparsity, pattern, floor)
        limits = None if within is None else [within[layer] for layer in scores]
        masks = select_masks(pattern, tensors, sparsity, counts, magnitudes, limits)
    else:
        sparsities = layer_sparsities(name, shapes, sparsity, pattern)
        masks = [
            select_masks(pattern, [score], one, [0], magnitudes, None if within is None else [within[layer]])[0]
            for (layer, score), one in zip(scores.items(), sparsities, strict=True)
        ]
    return dict(zip(scores, masks, strict=True))


def floor_counts(shapes: Sequence[torch.Size], sparsity: float, pattern: Pattern, floor: float | None) -> list[int]:
    """Return the minimum number of weights that each layer keeps under "global", in whole units of the pattern.

    With a `floor` that is the fraction `floor` of the layer's weights. By default (None) it is `FLOOR_SHARE` of the
    overall density, but at most as many units as the layer has outputs. The numbers are rounded up to whole units, or
    down where the sum of those rounded up exceeds what the sparsity keeps, but never to less than one unit. Raises
    PomonaError where the sparsity keeps less than one unit of every layer.
    """
    if floor == 0 or (floor is None and pattern.always_keeps_some):
        return [0] * len(shapes)
    sizes, unit_sizes = [shape.numel() for shape in shapes], [pattern.unit_size(shape) for shape in shapes]
    least = [least_count(shape, pattern) for shape in shapes]
    share = FLOOR_SHARE * (1 - sparsity) if floor is None else floor
    units = [share * n / size for n, size in zip(sizes, unit_sizes, strict=True)]
    if floor is None:
        # The outputs bound the floor, because from there on every output could have a unit.
        units = [min(count, shape[0]) if one else 0 for count, shape, one in zip(units, shapes, least, strict=True)]
    up = [min(math.ceil(u - TOLERANCE) * size, n) for u, size, n in zip(units, unit_sizes, sizes, strict=True)]
    down = [math.floor(u + TOLERANCE) * size for u, size in zip(units, unit_sizes, strict=True)]
    kept = count_kept(shapes, sparsity, pattern)
    for counts in (up, [max(*pair) for pair in zip(down, least, strict=True)]):
        if total_weight(shapes, counts, pattern) <= kept:
            return counts
    require_room(shapes, sparsity, pattern)
    return least


def total_weight(shapes: Sequence[torch.Size], counts: Sequence[int], pattern: Pattern) -> int:
    """Return the total of `counts` weights of each layer in what the sparsity is a fraction of: weights, or filters."""
    pairs = zip(counts, shapes, strict=True)
    return sum(n * pattern.unit_weight(shape) // pattern.unit_size(shape) for n, shape in pairs)


def count_kept(shapes: Sequence[torch.Size], sparsity: float, pattern: Pattern) -> int:
    """Return how much a sparsity keeps of all layers together: weights, or filters."""
    total = total_weight(shapes, [shape.numel() for shape in shapes], pattern)
    return total - count_pruned(sparsity, total)


def least_count(shape: torch.Size, pattern: Pattern) -> int:
    """Return the number of weights that a layer keeps at least: one unit, and none of a bias or another vector."""
    return 0 if pattern.always_keeps_some or len(shape) < 2 else pattern.unit_size(shape)


def largest_sparsity(shapes: Sequence[torch.Size], pattern: Pattern) -> float:
    """Return the sparsity at which one unit of every layer is left."""
    least = total_weight(shapes, [least_count(shape, pattern) for shape in shapes], pattern)
    return 1 - least / total_weight(shapes, [shape.numel() for shape in shapes], pattern)


def require_room(shapes: Sequence[torch.Size], sparsity: float, pattern: Pattern) -> None:
    """Raise PomonaError where a sparsity keeps less than one unit of every layer, so that some would be empty."""
    least = [least_count(shape, pattern) for shape in shapes]
    total, kept = total_weight(shapes, least, pattern), count_kept(shapes, sparsity, pattern)
    # A sparsity is reached as nearly as units allow, and half a unit is as near as the next one.
    smallest = min((pattern.unit_weight(shape) for shape, count in zip(shapes, least, strict=True) if count), default=0)
    limit = math.floor(1e4 * largest_sparsity(shapes, pattern)) / 1e4
    noun = "weights" if all(pattern.unit_weight(s) == pattern.unit_size(s) for s in shapes) else "units"
    require(
        2 * (total - kept) < max(smallest, 1),
        f"a sparsity of {sparsity:g} keeps {kept:,} {noun}, and one unit of {pattern} in each of the "
        f"{sum(map(bool, least))} layers is {total:,}: ask for a sparsity of at most {limit:g}, so that no layer is "
        "empty, or leave layers out with exclude=[…].",
    )


def layer_sparsities(name: str, shapes: Sequence[torch.Size], sparsity: float, pattern: Pattern) -> list[float]:
    """Return the sparsity of each layer under a layerwise allocation, by which every layer keeps at least one unit."""
    sparsities = LAYERWISE_ALLOCATIONS[name](shapes, sparsity)
    return [
        min(one, 1 - least_count(shape, pattern) / shape.numel()) for one, shape in zip(sparsities, shapes, strict=True)
    ]


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
def parse_allocation(allocation: str) -> tuple[str, float | None]:
    """Return the name of an allocation, and its floor, which is None where none is given."""
    name, bracket, rest = allocation.partition("(")
    name = name.strip()
    if name not in ALLOCATIONS:
        raise unknown_name_error("allocation", name, ALLOCATIONS)
    try:
        # `global` is a Python keyword and cannot be parsed as a name, so another name takes its place.
        options = parse_spec(f"options({rest}")[1] if bracket else {}
    except PomonaError as error:
        raise PomonaError(f"'{allocation}' is not of the form {name}(option=value, …).") from error
    floor = options.pop("floor", None)
    for option in options:
        raise unknown_name_error(f"option of allocation '{name}'", option, ["floor"])
    require(
        floor is None or (isinstance(floor, (int, float)) and 0 <= floor < 1),
        f"floor is the minimum fraction of its weights that a layer keeps, in [0, 1), got {floor!r}.",
    )
    require(floor is None or name == "global", f"only global takes a floor, got '{allocation}': leave it out.")
    return name, None if floor is None else float(floor)


def normalize_allocation(allocation: str) -> str:
    """Return an allocation in its canonical form, which identifies runs; raise PomonaError if it is invalid."""
    require(isinstance(allocation, str), f"allocation takes one of {', '.join(ALLOCATIONS)}, got {allocation!r}.")
    name, floor = parse_allocation(allocation)
    return name if floor is None else f"{name}(floor={floor or 0})"


def validate_allocation(allocation: str, sparsity: float = 0.0) -> None:
    """Raise PomonaError if the allocation is invalid, or its floor exceeds the fraction that the sparsity keeps."""
    floor = parse_allocation(allocation)[1] or 0.0
    require(
        floor <= 1 - sparsity + TOLERANCE,
        f"floor={floor:g} keeps at least {floor:.2%} of every layer, but a sparsity of {sparsity:g} keeps only "
        f"{1 - sparsity:.2%} of all weights: lower floor or sparsity.",
    )


def validate_room(shapes: Sequence[torch.Size], sparsity: float, pattern: Pattern, allocation: str) -> None:
    """Raise PomonaError where a sparsity leaves too little for every layer, unless the allocation has no floor."""
    if parse_allocation(allocation)[1] != 0:
        require_room(shapes, sparsity, pattern)
