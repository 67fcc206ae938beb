"""What is kept of the inputs of a layer, summed over all calibration batches in float32 or wider."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class InputStatistics(ABC):
    """A sum over the input rows of a layer."""

    count = 0  # rows that were added

    @abstractmethod
    def __init__(self, columns: int, device: torch.device, dtype: torch.dtype) -> None:
        """Start a sum over rows of so many columns."""

    def add(self, rows: Tensor) -> None:
        """Add the rows of one batch."""
        self.count += len(rows)
        self.accumulate(rows)

    @abstractmethod
    def accumulate(self, rows: Tensor) -> None:
        """Add the rows of one batch to the sum."""

    @abstractmethod
    def is_finite(self) -> bool:
        """Return whether the sum has no infinity or NaN."""


class ColumnSquares(InputStatistics):
    """The sum of squares of each input."""

    def __init__(self, columns: int, device: torch.device, dtype: torch.dtype) -> None:
        self.squares = torch.zeros(columns, device=device, dtype=dtype)

    def accumulate(self, rows: Tensor) -> None:
        self.squares += rows.to(self.squares.dtype).square().sum(0)

    def is_finite(self) -> bool:
        return bool(self.squares.isfinite().all())


class SecondMoments(InputStatistics):
    """The sum of products of all pairs of inputs, XᵀX: columns × columns."""

    def __init__(self, columns: int, device: torch.device, dtype: torch.dtype) -> None:
        self.products = torch.zeros(columns, columns, device=device, dtype=dtype)

    def accumulate(self, rows: Tensor) -> None:
        if rows.is_cuda and rows.itemsize == 2 and self.products.dtype == torch.float32:
            self.products += torch.mm(rows.T, rows, out_dtype=torch.float32)  # each product is exact, sums are float32
        else:
            wide = rows.to(self.products.dtype)
            self.products.addmm_(wide.T, wide)

    def is_finite(self) -> bool:
        return bool(self.products.isfinite().all())


class NoStatistics(InputStatistics):
    """Nothing: for a method that looks at the weights only."""

    def __init__(self, columns: int, device: torch.device, dtype: torch.dtype) -> None:
        pass

    def accumulate(self, rows: Tensor) -> None:
        pass

    def is_finite(self) -> bool:
        return True
