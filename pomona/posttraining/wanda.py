"""Wanda, and magnitude pruning that compares weights within the same groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..patterns import Balanced, Pattern, Unstructured
from .input_statistics import ColumnSquares, InputStatistics, NoStatistics
from .method import PostTraining


@dataclass(frozen=True)
class Wanda(PostTraining):
    """Prune the weights with the smallest |w| times the norm of their input; the others stay as they are.

    Without structure, weights are compared within each output, as the authors have it; other patterns compare them
    within their own groups.
    """

    paper: ClassVar[str] = "Sun et al., ICLR 2024"
    statistics: ClassVar[type[InputStatistics]] = ColumnSquares

    def prune_matrix(
        self, matrix: Tensor, statistics: InputStatistics, sparsity: float, shape: torch.Size
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(statistics, ColumnSquares)
        score = matrix.abs() * statistics.squares.sqrt()
        pattern = self.resolved_pattern
        per_output = Balanced(blocks=1) if isinstance(pattern, Unstructured) else pattern
        return keep_highest(matrix, score, per_output, sparsity, shape)


@dataclass(frozen=True)
class Magnitude(PostTraining):
    """Prune the smallest weights of each layer: what calibration data is worth shows in comparison with it."""

    paper: ClassVar[str] = "Han et al., NeurIPS 2015"
    statistics: ClassVar[type[InputStatistics]] = NoStatistics

    def prune_matrix(
        self, matrix: Tensor, statistics: InputStatistics, sparsity: float, shape: torch.Size
    ) -> tuple[Tensor, Tensor]:
        return keep_highest(matrix, matrix.abs(), self.resolved_pattern, sparsity, shape)


def keep_highest(
    matrix: Tensor, score: Tensor, pattern: Pattern, sparsity: float, shape: torch.Size
) -> tuple[Tensor, Tensor]:
    """Return the matrix with zeros in place of the entries of lowest score, and the mask."""
    kept = pattern.select_masks([score.view(shape)], sparsity)[0].view(matrix.shape)
    return matrix.masked_fill(~kept, 0), kept
