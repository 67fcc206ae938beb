"""Patterns that keep the same number of weights in every block of every row (Yao et al., AAAI 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import PomonaError, require
from ..masking import count_pruned, matrix_shape
from .base import PATTERNS, Pattern
from .selection import select_largest, select_largest_per_row

ROUNDING_SLACK = 1e-9  # keeps a product such as 0.29 · 50 from being rounded down by a floating-point error


@PATTERNS.register("balanced")
@dataclass(frozen=True)
class Balanced(Pattern):
    """Rows of the matrix out × (in · kh · kw) in equal blocks, each of which keeps the same number of weights.

    Options: the width of a `block`, or the number of `blocks` in a row. Rows that cannot be divided into such blocks
    are refused; with `pad` the last block of a row is filled with columns that are never kept.
    """

    always_keeps_some: ClassVar[bool] = True

    block: int | None = None
    blocks: int | None = None
    pad: bool = False

    def __post_init__(self) -> None:
        require(
            (self.block is None) != (self.blocks is None),
            f"Balanced takes either block= or blocks=, got block={self.block}, blocks={self.blocks}.",
        )
        require((self.block or self.blocks or 0) >= 1, "Balanced needs at least one column and one block.")

    def block_width(self, columns: int) -> int:
        """Return the width of a block in a row of `columns` columns."""
        return self.block or math.ceil(columns / self.blocks)  # type: ignore[operator]

    def validate_shape(self, name: str, shape: torch.Size) -> None:
        rows, columns = matrix_shape(shape)
        if self.pad or columns % (self.block or self.blocks or 1) == 0:
            return
        wanted = f"blocks of {self.block}" if self.block else f"{self.blocks} blocks"
        fits = math.gcd(columns, self.block or self.blocks or 1)
        raise PomonaError(
            f"{wanted} do not divide the rows of {name} ({rows}×{columns}): {fits} would fit, "
            f"pad=True fills the last block up, or leave the layer out with exclude=['{name}']."
        )

    def unit_size(self, shape: torch.Size) -> int:
        rows, columns = matrix_shape(shape)
        return rows * math.ceil(columns / self.block_width(columns))

    def pruned_per_block(self, sparsity: float, width: int) -> int:
        """Return how many weights of a block are pruned: the nearest number, halves rounded up, at least one kept."""
        return min(math.floor(sparsity * width + 0.5 + ROUNDING_SLACK), width - 1)

    def select_masks(self, scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
        widths = [self.block_width(matrix_shape(s.shape)[1]) for s in scores]
        if len(scores) == 1:
            return [select_per_block(scores[0], widths[0], widths[0] - self.pruned_per_block(sparsity, widths[0]))]
        # One threshold over all layers decides how sparse each layer is; its blocks then all have that sparsity.
        count = sum(s.numel() for s in scores)
        common = select_largest(scores, count - count_pruned(sparsity, count))
        return [
            select_per_block(s, width, width - scale_pruned_to_block((~m).sum(), m.numel(), width))
            for s, m, width in zip(scores, common, widths, strict=True)
        ]


def scale_pruned_to_block(pruned: Tensor, count: int, width: int) -> Tensor:
    """Return how many weights of a block are pruned where `pruned` of the layer's `count` weights are.

    Halves are rounded up. The arithmetic is in integers on the device, so that the host does not wait for it.
    """
    return ((2 * pruned * width + count) // (2 * count)).clamp(max=width - 1)


def select_per_block(score: Tensor, width: int, keep: int | Tensor) -> Tensor:
    """Return the mask of one layer that keeps the `keep` highest scores in each block of `width` columns."""
    rows, columns = matrix_shape(score.shape)
    padding = -columns % width
    flat = score.reshape(rows, columns)
    if padding:
        flat = pad(flat, (0, padding), value=-torch.inf)
    kept = select_largest_per_row(flat.reshape(-1, width), keep)
    return kept.view(rows, columns + padding)[:, :columns].reshape(score.shape).contiguous()


@PATTERNS.register("nm", shorthand=r"(\d+):(\d+)")
@dataclass(frozen=True)
class NM(Pattern):
    """n of every m consecutive weights along in · kh · kw are kept, which fixes the sparsity at 1 − n/m.

    As text it is "2:4" or "nm(2, 4)".
    """

    always_keeps_some: ClassVar[bool] = True

    n: int
    m: int

    def __post_init__(self) -> None:
        require(0 < self.n < self.m, f"NM(n, m) needs 0 < n < m, got NM({self.n}, {self.m}).")

    @property
    def sparsity(self) -> float:
        return 1 - self.n / self.m

    def validate_shape(self, name: str, shape: torch.Size) -> None:
        rows, columns = matrix_shape(shape)
        fits = math.gcd(columns, self.m)
        require(
            columns % self.m == 0,
            f"groups of {self.m} do not divide the rows of {name} ({rows}×{columns}): "
            f"{f'm={fits} would fit, or ' if fits > 1 else ''}leave the layer out with exclude=['{name}'].",
        )

    def select_masks(self, scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
        # While a schedule is still below the final sparsity, more than n weights are kept.
        pruned = Balanced(block=self.m).pruned_per_block(min(sparsity, self.sparsity), self.m)
        return [select_per_block(s, self.m, self.m - pruned) for s in scores]
