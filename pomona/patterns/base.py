"""What every pattern is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..registry import Registry


class Pattern(ABC):
    """Which weights of a tensor are kept or pruned together.

    Tensors come with their outputs first, as (out, in, …). A pattern sees scores only: −inf is an
    entry to be kept last, +inf one to be kept first.
    """

    name: ClassVar[str]
    is_elementwise: ClassVar[bool] = False  # whether single weights are ranked against each other
    ranks_units: ClassVar[bool] = False  # whether units are ranked by a norm, which needs non-negative scores
    removes_outputs: ClassVar[bool] = False  # whether whole outputs (rows, filters) are pruned

    @property
    def removes_coupled(self) -> bool:
        """Whether biases and norms fall with the outputs they belong to."""
        return self.removes_outputs

    @property
    def sparsity(self) -> float | None:
        """The one sparsity the pattern can have, or None where it can have any."""
        return None

    def validate_shape(self, name: str, shape: torch.Size) -> None:  # noqa: B027 - most patterns fit every shape
        """Refuse a tensor that the pattern does not fit."""

    def unit_size(self, shape: torch.Size) -> int:
        """How many weights of a tensor come or go together: its count of kept weights moves in such steps."""
        return 1

    def unit_weight(self, shape: torch.Size) -> int:
        """What these count for where a sparsity is shared out."""
        return self.unit_size(shape)

    @abstractmethod
    def select_masks(self, scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
        """One mask a tensor, true where kept, that together have the sparsity nearest to the one asked for."""


PATTERNS: Registry[Pattern] = Registry("pattern")
