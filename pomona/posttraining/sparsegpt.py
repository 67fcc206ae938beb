"""SparseGPT: prune the columns of a layer in turn, and let the later columns make up for each error."""

from __future__ import annotations

import math
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
        whole, number = isinstance(self.block, int), isinstance(self.damping, float | int)
        require(whole and self.block >= 1, f"block counts columns and must be a whole number ≥ 1, got {self.block!r}.")
        require(
            number and 0 < self.damping < math.inf, f"damping must be a positive finite number, got {self.damping!r}."
        )

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
    weight = matrix.clone(memory_format=torch.contiguous_format)
    kept = torch.ones_like(weight, dtype=torch.bool)
    columns, diagonal = matrix.shape[1], factor.diagonal()
    ratios = (factor / diagonal.unsqueeze(1)).contiguous()  # of a column's change to those of the columns behind it
    prune_group = choose_group_kernel(weight, block)
    for start in range(0, columns, block):
        end = min(start + block, columns)
        removed = weight.new_zeros(len(weight), end - start)
        for first in range(start, end, width):
            group = slice(first, min(first + width, end))
            kept[:, group] = select((weight[:, group] / diagonal[group]).square())
            prune_group(weight, kept, ratios, removed, group, slice(start, end))
        weight[:, end:].addmm_(removed, ratios[start:end, end:], alpha=-1)
    return weight.masked_fill(~kept, 0), kept


def prune_group_of_columns(
    weight: Tensor, kept: Tensor, ratios: Tensor, removed: Tensor, group: slice, block: slice
) -> None:
    """Prune the columns of a group within a block, and let the columns behind each of them in the block make up for it.

    `removed` has the columns of the block, and receives what was pruned from those of the group.
    """
    for column in range(group.start, group.stop):
        pruned = removed[:, column - block.start]
        torch.mul(weight[:, column], ~kept[:, column], out=pruned)
        weight[:, column : block.stop].addr_(pruned, ratios[column, column : block.stop], alpha=-1)


def choose_group_kernel(weight: Tensor, block: int) -> Callable[..., None]:
    """Return the function that prunes a group of columns: one kernel on a GPU, where Triton is installed."""
    if not weight.is_cuda or weight.dtype != torch.float32:
        return prune_group_of_columns
    try:
        from . import column_updates_triton as kernels
    except ImportError:
        return prune_group_of_columns
    return kernels.prune_group if block <= kernels.MAX_BLOCK else prune_group_of_columns
