"""SparseGPT: prune the columns of a layer in turn, and let the later columns make up for each error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import PomonaError, require
from ..patterns import NM, Balanced, Block, Pattern, Unstructured
from .input_statistics import InputStatistics, SecondMoments
from .method import PostTraining

DEAD_INPUT_COST = 1e-6  # of the damping: what weights cost whose input is always zero, so that they go first


@dataclass(frozen=True)
class SparseGPT(PostTraining):
    """Prune column by column, and update the columns that follow so that the layer's outputs change least.

    A weight costs w² / [H⁻¹]ⱼⱼ, where H is the second moment of the layer's inputs. Masks are chosen for `block`
    columns at a time, or for the pattern's own groups of columns. A mask whose pattern spans whole rows or columns is
    chosen before the first column.
    """

    paper: ClassVar[str] = "Frantar & Alistarh, ICML 2023"
    statistics: ClassVar[type[InputStatistics]] = SecondMoments

    block: int = 128  # columns whose mask is chosen together, and that are updated together
    damping: float = 0.01  # of the mean of H's diagonal, added to it so that H can be inverted

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.block >= 1, f"block counts columns and must be ≥ 1, got {self.block}.")
        require(self.damping > 0, f"damping must be positive, got {self.damping:g}.")

    def prune_matrix(
        self, matrix: Tensor, statistics: InputStatistics, sparsity: float, shape: torch.Size
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(statistics, SecondMoments)
        factor = inverse_factor(statistics.products / statistics.count, self.damping)
        columns = matrix.shape[1]
        pattern, width = divide_pattern(self.resolved_pattern, columns, self.block)

        def select(score: Tensor) -> Tensor:
            whole = score.view(shape) if width == columns else score
            return pattern.select_masks([whole], sparsity)[0].view(score.shape)

        return prune_columns(matrix, factor, select, max(self.block, width) // width * width, width)


def inverse_factor(moments: Tensor, damping: float) -> Tensor:
    """Return the upper triangular U with H⁻¹ = UᵀU, where H is the second moment with some damping on its diagonal."""
    require(bool(moments.isfinite().all()), "the calibration data lead to infinite or NaN inputs of a layer.")
    diagonal = moments.diagonal()
    ridge = damping * diagonal.mean()
    added = torch.where(diagonal > 0, ridge, DEAD_INPUT_COST * ridge)
    hessian = moments + torch.diag(torch.where(ridge > 0, added, 1.0))
    try:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
        return torch.linalg.cholesky(inverse, upper=True)
    except torch.linalg.LinAlgError as error:
        raise PomonaError(
            f"the second moments of {len(moments)} inputs cannot be inverted: give more damping than {damping:g}, or "
            "more calibration data."
        ) from error


def divide_pattern(pattern: Pattern, columns: int, block: int) -> tuple[Pattern, int]:
    """Return the pattern of some consecutive columns, and how many of them its mask is chosen for at a time.

    These are all columns for a pattern that spans whole rows or whole columns.
    """
    match pattern:
        case Unstructured():
            return pattern, min(block, columns)
        case NM():
            return pattern, pattern.m
        case Balanced():
            width = pattern.block_width(columns)
            return Balanced(block=width, pad=True), width
        case Block(shape=(int(), int(tile))):
            return pattern, min(-(-block // tile) * tile, columns)
    return pattern, columns


def prune_columns(
    matrix: Tensor, factor: Tensor, select: Callable[[Tensor], Tensor], block: int, width: int
) -> tuple[Tensor, Tensor]:
    """Return the matrix with pruned entries zero and the others updated, and the mask.

    `factor` is that of `inverse_factor`. `select` returns the mask of `width` columns by their scores at the time when
    the first of them is reached. The columns of a block, a multiple of `width`, are updated one by one, and those
    behind it together.
    """
    weight, kept = matrix.clone(), torch.ones_like(matrix, dtype=torch.bool)
    columns, diagonal = matrix.shape[1], factor.diagonal()
    ratios = factor / diagonal.unsqueeze(1)  # of a column's change to the changes of the columns behind it
    for start in range(0, columns, block):
        end = min(start + block, columns)
        removed = torch.zeros_like(weight[:, start:end])
        for column in range(start, end):
            if (column - start) % width == 0:
                group = slice(column, min(column + width, columns))
                kept[:, group] = select((weight[:, group] / diagonal[group]).square())
            removed[:, column - start] = weight[:, column].masked_fill(kept[:, column], 0)
            weight[:, column:end].addr_(removed[:, column - start], ratios[column, column:end], alpha=-1)
        weight[:, end:].addmm_(removed, ratios[start:end, end:], alpha=-1)
    return weight.masked_fill(~kept, 0), kept
