"""The interface of a sparsity pattern, and the registry of all patterns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..registry import Registry
from .score_reader import rank_scores


class Pattern(ABC):
    """Which weights of a tensor are kept or pruned together.

    Tensors have their outputs in the first dimension, as (out, in, …). A pattern sees scores only: entries with a
    score of −inf are kept last, entries with +inf first.
    """

    name: ClassVar[str]
    is_elementwise: ClassVar[bool] = False  # whether single weights are ranked against each other
    ranks_units: ClassVar[bool] = False  # whether units are ranked by a norm, which needs non-negative scores
    removes_outputs: ClassVar[bool] = False  # whether whole outputs (rows, filters) are pruned
    always_keeps_some: ClassVar[bool] = False  # whether no selection removes all weights of a tensor

    @property
    def removes_coupled(self) -> bool:
        """Whether the biases and norms of a pruned output are pruned with it."""
        return self.removes_outputs

    @property
    def default_allocation(self) -> str:
        """The allocation of methods that name none.

        Norms of whole outputs differ between layers by more than their importance, so that one threshold would remove
        all outputs of some layers.
        """
        return "uniform" if self.removes_outputs else "global"

    @property
    def sparsity(self) -> float | None:
        """The only sparsity that the pattern allows, or None where it allows any."""
        return None

    def validate_shape(self, name: str, shape: torch.Size) -> None:  # noqa: B027 - most patterns fit every shape
        """Raise PomonaError if the pattern does not fit a tensor of this shape; `name` is for the message."""

    def unit_size(self, shape: torch.Size) -> int:
        """Return how many weights are kept or pruned together: the step in which the number of kept weights changes."""
        return 1

    def unit_weight(self, shape: torch.Size) -> int:
        """Return how much one unit counts when a sparsity is shared between tensors."""
        return self.unit_size(shape)

    @abstractmethod
    def select_masks(self, scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
        """Return one mask per score tensor, true where kept; together they have the nearest possible sparsity."""

    def select_masks_with_floors(
        self, scores: Sequence[Tensor], sparsity: float, floors: Sequence[int]
    ) -> list[Tensor]:
        """Return masks as `select_masks` does, which keep at least `floors[i]` weights, in whole units, of tensor i.

        The weights that a floor keeps are those that the tensor alone would keep. Scores of −inf stay the lowest.
        """
        return self.select_masks(
            [
                s.masked_fill(self.select_masks([s], 1 - n / s.numel())[0] & (s > -torch.inf), torch.inf) if n else s
                for s, n in zip(scores, floors, strict=True)
            ],
            sparsity,
        )

    def select_ranked(
        self,
        scores: Sequence[Tensor],
        sparsity: float,
        floors: Sequence[int],
        magnitudes: bool = False,
        within: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Return masks as `select_masks_with_floors` does, of |score| or with −inf off the masks `within`, if asked."""
        return self.select_masks_with_floors(rank_scores(scores, magnitudes, within), sparsity, floors)


PATTERNS: Registry[Pattern] = Registry("pattern")
