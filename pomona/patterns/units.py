"""Patterns whose units are ranked against each other: single weights, tiles, kernels, filters."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import PomonaError, require, unknown_name_error
from ..masking import count_pruned, matrix_shape
from .base import PATTERNS, Pattern
from .selection import raise_floor_scores, select_largest


class UnitPattern(Pattern):
    """Base of patterns that divide a tensor into equal units and rank the units of all tensors together by a norm."""

    ranks_units: ClassVar[bool] = True

    norm: int

    @abstractmethod
    def split_into_units(self, shape: torch.Size) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape of a view of the tensor, and the dimensions of that view which one unit spans."""

    def unit_size(self, shape: torch.Size) -> int:
        view, inner = self.split_into_units(shape)
        return math.prod(view[dim] for dim in inner)

    def unit_height(self, shape: torch.Size) -> int:
        """Return how many rows of the tensor one unit spans."""
        return 1

    def select_masks(self, scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
        return self.select_masks_with_floors(scores, sparsity, [0] * len(scores))

    def select_masks_with_floors(
        self, scores: Sequence[Tensor], sparsity: float, floors: Sequence[int]
    ) -> list[Tensor]:
        views = [self.split_into_units(s.shape) for s in scores]
        units = [self.unit_norms(s.reshape(view), inner) for s, (view, inner) in zip(scores, views, strict=True)]
        sizes = [self.unit_weight(s.shape) for s in scores]
        unit_floors = [count // self.unit_size(s.shape) for count, s in zip(floors, scores, strict=True)]
        kept = select_units(units, sizes, sparsity, unit_floors)
        return [
            k.expand(view).reshape(s.shape).contiguous() for k, s, (view, _) in zip(kept, scores, views, strict=True)
        ]

    def unit_norms(self, score: Tensor, inner: tuple[int, ...]) -> Tensor:
        """Return the norm of the scores over each unit; a unit of −inf scores only stays −inf."""
        wide = torch.promote_types(score.dtype, torch.float32)
        norm = torch.linalg.vector_norm(score.clamp(min=0), self.norm, inner, keepdim=True, dtype=wide)
        return norm.masked_fill((score == -torch.inf).all(dim=inner, keepdim=True), -torch.inf)


def select_units(
    units: Sequence[Tensor], sizes: Sequence[int], sparsity: float, floors: Sequence[int] | None = None
) -> list[Tensor]:
    """Return masks of the highest-ranked units, as many as bring the sparsity, counted in weights, nearest.

    At least `floors[i]` units of tensor i are kept.
    """
    weights = sum(u.numel() * size for u, size in zip(units, sizes, strict=True))
    pruned = count_pruned(sparsity, weights)
    if len(set(sizes)) == 1:
        count = sum(u.numel() for u in units)
        return select_largest(units, count - round(pruned / sizes[0]), floors)
    # Units of several sizes: go down the ranking, and stop where the number of kept weights is nearest.
    flat = raise_floor_scores(units, floors)
    order = flat.argsort(descending=True, stable=True)
    size = torch.cat([torch.full((u.numel(),), s, device=flat.device) for u, s in zip(units, sizes, strict=True)])
    kept = size[order].cumsum(0)
    distance = (torch.cat([kept.new_zeros(1), kept]) - (weights - pruned)).abs()
    mask = torch.zeros_like(flat, dtype=torch.bool)
    mask[order] = torch.arange(len(flat), device=flat.device) < distance.argmin()
    return [m.view(u.shape) for m, u in zip(mask.split([u.numel() for u in units]), units, strict=True)]


@PATTERNS.register("unstructured")
@dataclass(frozen=True)
class Unstructured(Pattern):
    """Single weights, without structure."""

    is_elementwise: ClassVar[bool] = True

    def select_masks(self, scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
        return self.select_masks_with_floors(scores, sparsity, [0] * len(scores))

    def select_masks_with_floors(
        self, scores: Sequence[Tensor], sparsity: float, floors: Sequence[int]
    ) -> list[Tensor]:
        return self.select_ranked(scores, sparsity, floors)

    def select_ranked(
        self,
        scores: Sequence[Tensor],
        sparsity: float,
        floors: Sequence[int],
        magnitudes: bool = False,
        within: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        count = sum(s.numel() for s in scores)
        keep = count - count_pruned(sparsity, count)
        return select_largest(scores, keep, floors, magnitudes=magnitudes, within=within)


@PATTERNS.register("block")
@dataclass(frozen=True)
class Block(UnitPattern):
    """Tiles of h × w weights in the matrix out × (in · kh · kw), ranked by their norm.

    A side of None spans the whole matrix: (None, 64) are 64 columns, which read an attention head of that size, and
    (None, 1) are those that read one neuron.
    """

    shape: tuple[int | None, int | None]
    norm: int = 2

    def __post_init__(self) -> None:
        sides = tuple(self.shape) if isinstance(self.shape, (tuple, list)) else ()
        whole = len(sides) == 2 and all(side is None or (type(side) is int and side >= 1) for side in sides)
        require(
            whole and sides != (None, None),
            f"a block needs a shape (h, w) of whole numbers ≥ 1, one of which may be None, got {self.shape}.",
        )
        object.__setattr__(self, "shape", sides)
        validate_norm(self.norm)

    def tile_in(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the height and width of a tile in a matrix of this size."""
        return self.shape[0] or rows, self.shape[1] or columns

    def unit_height(self, shape: torch.Size) -> int:
        return self.tile_in(*matrix_shape(shape))[0]

    def validate_shape(self, name: str, shape: torch.Size) -> None:
        rows, columns = matrix_shape(shape)
        height, width = self.tile_in(rows, columns)
        if rows % height or columns % width:
            sizes = zip(self.shape, (rows, columns), strict=True)
            fits = tuple(None if side is None else math.gcd(size, side) for side, size in sizes)
            raise PomonaError(
                f"blocks of {height}×{width} do not divide {name} ({rows}×{columns}): "
                f"Block({fits}) would fit, or leave the layer out with exclude=['{name}']."
            )

    def split_into_units(self, shape: torch.Size) -> tuple[tuple[int, ...], tuple[int, ...]]:
        rows, columns = matrix_shape(shape)
        height, width = self.tile_in(rows, columns)
        return (rows // height, height, columns // width, width), (1, 3)


@PATTERNS.register("kernel")
@dataclass(frozen=True)
class Kernel(UnitPattern):
    """Kernels of a convolution, its 2-D slices of kh × kw weights; in a linear layer each weight is its own kernel."""

    norm: int = 2

    def __post_init__(self) -> None:
        validate_norm(self.norm)

    def split_into_units(self, shape: torch.Size) -> tuple[tuple[int, ...], tuple[int, ...]]:
        outer = math.prod(shape[:2])
        return (outer, math.prod(shape[2:])), (1,)


@PATTERNS.register("filter")
@dataclass(frozen=True)
class Filter(UnitPattern):
    """Whole output channels, ranked by their L1 or L2 norm; their bias and batch norm are pruned with them.

    The papers count filters (`of="filters"`) and do not prune norms (`norms=False`). The norm then turns a pruned
    channel into a constant that later layers read, so the channel cannot be removed from the network.
    """

    removes_outputs: ClassVar[bool] = True

    norm: int = 2
    of: str = "weights"  # what the sparsity is a fraction of, over all tensors: "weights" or "filters"
    norms: bool = True  # whether bias and norm are pruned with their filter

    def __post_init__(self) -> None:
        validate_norm(self.norm)
        if self.of not in ("weights", "filters"):
            raise unknown_name_error("share", self.of, ("weights", "filters"))

    @property
    def removes_coupled(self) -> bool:
        return self.norms

    def split_into_units(self, shape: torch.Size) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (shape[0], math.prod(shape[1:])), (1,)

    def unit_weight(self, shape: torch.Size) -> int:
        return 1 if self.of == "filters" else self.unit_size(shape)


def validate_norm(norm: int) -> None:
    """Raise PomonaError unless `norm` is 1 or 2."""
    require(norm in (1, 2), f"norm must be 1 or 2, got {norm}.")
