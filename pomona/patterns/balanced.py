"""Patterns that keep the same count in every block of every row (Yao et al., AAAI 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import PomonaError, require
from ..masking import count_pruned, matrix_shape
from .base import PATTERNS, Pattern
from .selection import select_largest, select_largest_per_row


@PATTERNS.register("balanced")
@dataclass(frozen=True)
class Balanced(Pattern):
    """Each row of the matrix out × (in · kh · kw) in equal blocks that keep the same count.

    Give the width of a `block`, or the number of `blocks` in a row. A row that does not divide is
    refused, or with `pad` its last block is filled up with columns that hold nothing.
    """

    block: int | None = None
    blocks: int | None = None
    pad: bool = False

    def __post_init__(self) -> None:
        require(
            (self.block is None) != (self.blocks is None),
            f"Balanced takes block= or blocks=, one of them, got block={self.block}, blocks={self.blocks}.",
        )
        require((self.block or self.blocks or 0) >= 1, "Balanced needs at least one column and one block.")

    def block_width(self, columns: int) -> int:
        """The width of a block in a row of that many columns."""
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
        """How many of a block's weights go: round half up, one at least is kept."""
        return min(math.floor(sparsity * width + 0.5 + 1e-9), width - 1)

    def select_masks(self, scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
        widths = [self.block_width(matrix_shape(s.shape)[1]) for s in scores]
        if len(scores) == 1:
            return [select_per_block(scores[0], widths[0], widths[0] - self.pruned_per_block(sparsity, widths[0]))]
        # One threshold over all layers says how sparse each is; its blocks then share that evenly.
        count = sum(s.numel() for s in scores)
        common = select_largest(scores, count - count_pruned(sparsity, count))
        return [
            select_per_block(s, width, width - scale_to_block((~m).sum(), m.numel(), width))
            for s, m, width in zip(scores, common, widths, strict=True)
        ]


def scale_to_block(pruned: Tensor, count: int, width: int) -> Tensor:
    """How many of a block go where `pruned` of a layer's `count` do: half up, in whole numbers, on the device."""
    return ((2 * pruned * width + count) // (2 * count)).clamp(max=width - 1)


def select_per_block(score: Tensor, width: int, keep: int | Tensor) -> Tensor:
    """The mask of one layer that keeps `keep` entries in each block of `width` columns."""
    rows, columns = matrix_shape(score.shape)
    padding = -columns % width
    flat = score.reshape(rows, columns)
    if padding:
        flat = pad(flat, (0, padding), value=-torch.inf)
    kept = select_largest_per_row(flat.reshape(-1, width), keep)
    return kept.view(rows, columns + padding)[:, :columns].reshape(score.shape).contiguous()


@PATTERNS.register("nm")
@dataclass(frozen=True)
class NM(Pattern):
    """n kept of every m along in · kh · kw. It fixes the sparsity at 1 − n/m."""

    n: int
    m: int

    def __post_init__(self) -> None:
        require(0 < self.n < self.m, f"NM(n, m) needs 0 < n < m, got NM({self.n}, {self.m}).")

    @property
    def sparsity(self) -> float:
        return 1 - self.n / self.m

    def validate_shape(self, name: str, shape: torch.Size) -> None:
        rows, columns = matrix_shape(shape)
        require(
            columns % self.m == 0,
            f"groups of {self.m} do not divide the rows of {name} ({rows}×{columns}): "
            f"m={math.gcd(columns, self.m)} would fit, or leave the layer out with exclude=['{name}'].",
        )

    def select_masks(self, scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
        # On the way there (a schedule that is still rising) more than n are kept.
        pruned = Balanced(block=self.m).pruned_per_block(min(sparsity, self.sparsity), self.m)
        return [select_per_block(s, self.m, self.m - pruned) for s in scores]
