"""Gradients of examples as sums of outer products, whose norms and sum need no gradient of a single example.

The weight gradient of an example in a linear layer or a convolution is G_i = Σ_t b_it a_itᵀ over the positions t, with
the layer's inputs a and the gradients b of its outputs. Its norm follows from a and b (Goodfellow, 2015; Li et al.,
"ghost clipping", ICLR 2022): ‖G_i‖ = ‖a‖ ‖b‖ for one position, and ‖G_i‖² = Σ_ts (a_t·a_s)(b_t·b_s) for several.

From here on a and b are float32, whatever their dtype was, and all else is computed in float64. A computed product
a_t·a_s has an error of at most γ ‖a_t‖ ‖a_s‖, and together these change ‖G_i‖² by at most γ (Σ_t ‖a_t‖ ‖b_t‖)² with
γ = 2⁻³⁰, if there are at most 2²² terms (n + m + T² for T positions of n inputs and m outputs). This is added to the
norm of several positions, so that it is not too small. A squared norm that float32 numbers do not hold is infinite here
too, as it is for gradients of examples: the factor to clip such an example would be too small for a normal float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

GRAM_ERROR = 2.0**-30  # γ
LARGEST_SQUARE = 2.0**128
MAX_TERMS = 1 << 22  # of the sums in a squared norm


@dataclass(frozen=True)
class OuterProducts:
    """The gradients of a weight for each row: Σ_t b_t a_tᵀ."""

    outputs: Tensor  # b, (rows, positions, m): the gradients of the layer's outputs
    inputs: Tensor  # a, (rows, positions, n)

    def __post_init__(self) -> None:
        for name in ("outputs", "inputs"):  # whatever autograd knows of them would stay in memory
            object.__setattr__(self, name, getattr(self, name).detach())

    def __len__(self) -> int:
        return len(self.outputs)

    def __getitem__(self, rows: Any) -> OuterProducts:
        """Return some of the rows."""
        return OuterProducts(self.outputs[rows], self.inputs[rows])

    @property
    def shape(self) -> torch.Size:
        """Return (rows, m · n), the shape of the gradients."""
        rows, _, outputs = self.outputs.shape
        return torch.Size((rows, outputs * self.inputs.shape[2]))

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors."""
        return self.outputs.device

    def split(self, rows: int) -> list[OuterProducts]:
        """Return the gradients in parts of so many rows."""
        if len(self) <= rows:
            return [self]
        pairs = zip(self.outputs.split(rows), self.inputs.split(rows), strict=True)
        return [OuterProducts(*pair) for pair in pairs]

    def gradients(self) -> Tensor:
        """Return the gradients themselves, of shape (rows, m, n)."""
        return self.outputs.mT @ self.inputs

    def in_float64(self) -> OuterProducts:
        """Return the same, rounded to float32 and stored as float64."""
        return OuterProducts(self.outputs.float().double(), self.inputs.float().double())

    @cached_property
    def norms(self) -> tuple[Tensor, Tensor]:
        """Return ‖b_t‖ and ‖a_t‖, (rows, positions), of tensors in float64."""
        return torch.linalg.vector_norm(self.outputs, dim=2), torch.linalg.vector_norm(self.inputs, dim=2)

    def squares(self) -> tuple[Tensor, Tensor]:
        """Return the squared norm of each row, from tensors in float64, and its Σ_t ‖a_t‖ ‖b_t‖."""
        ours, theirs = self.norms
        spread = (ours * theirs).sum(1)
        found = spread.square()
        if self.outputs.shape[1] > 1:
            found = found.mul_(GRAM_ERROR).add_(self.gram())
        return torch.where(found < LARGEST_SQUARE, found, found + math.inf), spread

    def gram(self) -> Tensor:
        """Return Σ_ts (a_t·a_s)(b_t·b_s) of each row, but not below 0."""
        return (self.outputs @ self.outputs.mT).mul_(self.inputs @ self.inputs.mT).sum((1, 2)).clamp_(min=0)

    def minus(self, other: OuterProducts) -> OuterProducts:
        """Return the difference, with the positions of both."""
        pairs = (self.outputs, -other.outputs), (self.inputs, other.inputs)
        return OuterProducts(*(torch.cat(pair, 1) for pair in pairs))

    def sum(self) -> Tensor:
        """Return the sum over all rows, (m, n)."""
        return self.outputs.flatten(0, 1).mT @ self.inputs.flatten(0, 1)


Gradients = dict[str, Tensor]  # of rows by parameter name, each (rows, …)
RowGradients = Tensor | OuterProducts  # of one parameter
MixedGradients = Mapping[str, RowGradients]


def as_tensor(gradient: RowGradients) -> Tensor:
    """Return the gradients of rows as a tensor."""
    return gradient.gradients() if isinstance(gradient, OuterProducts) else gradient
