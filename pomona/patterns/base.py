"""The interface of a sparsity pattern, and the registry of all patterns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..registry import Registry


class Pattern(ABC):
    """Which weights of a tensor are kept or pruned together.

    Tensors have their outputs in the first dimension, as (out, in, …). A pattern sees scores only: entries with a
    score of −inf are kept last, entries with +inf first.
    """

    name: ClassVar[str]
    is_elementwise: ClassVar[bool] = False  # whether single weights are ranked against each other
    ranks_units: ClassVar[bool] = False  # whether units are ranked by a norm, which needs non-negative scores
    removes_outputs: ClassVar[bool] = False  # whether whole outputs (rows, filters) are pruned

    @property
    def removes_coupled(self) -> bool:
        """Whether the biases and norms of a pruned output are pruned with it."""
        return self.removes_outputs

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


PATTERNS: Registry[Pattern] = Registry("pattern")
