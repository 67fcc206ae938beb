"""Operations that are linear up to a remainder: result = J · input + remainder."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass

from ..intervals import EPS, Interval, PairBounds
from ..linear_form import Form, Substitution, as_matrix, largest, row_sums

Transpose = Callable[[tuple[Tensor, ...], Tensor], Tensor]


@dataclass(frozen=True)
class LinearPart:
    """Tensors that describe a linear map J, the entries where it is used, and the interval of result − J · input."""

    derivative: tuple[Tensor, ...]
    used: Tensor
    remainder: Interval

    def above(self, rows: Tensor, transpose: Transpose) -> tuple[Tensor, Tensor]:
        """Return rows on the result as rows on the input, and what they are at most above these."""
        slack = 2 * rows[0].numel() * EPS * rows.abs() * self.remainder.magnitude
        return transpose(self.derivative, rows * self.used), row_sums(largest(rows, self.remainder) + slack)


register_dataclass(LinearPart)


def choose(derivative: tuple[Tensor, ...], remainder: Interval, result: Interval) -> LinearPart:
    """Return the linear part, or nothing but the result's interval, for each entry the narrower of the two."""
    used = (remainder.high - remainder.low) < (result.high - result.low)
    low, high = (torch.where(used, a, b) for a, b in ((remainder.low, result.low), (remainder.high, result.high)))
    return LinearPart(derivative, used, Interval(low, high))


@dataclass(frozen=True)
class LinearParts:
    """The linear parts of an operation in the dense network, in the pruned one, and of its gap over the input's gap."""

    dense: LinearPart
    pruned: LinearPart
    gap: LinearPart


register_dataclass(LinearParts)


def substitute_linear(form: Form, parts: LinearParts, transpose: Transpose) -> tuple[Form, Tensor]:
    """Return forms on the result as forms on the input, and a constant.

    A form c·gap + d·pruned is also c·dense + (d − c)·pruned. For each entry the one with the smaller error is taken.
    """
    errors = [part.remainder.radius for part in (parts.dense, parts.pruned, parts.gap)]
    c, d = form.gap, form.pruned
    sides = c.abs() * errors[0] + (d - c).abs() * errors[1] < c.abs() * errors[2] + d.abs() * errors[1]
    zero = torch.zeros_like(c)
    on_dense, above_dense = parts.dense.above(torch.where(sides, c, zero), transpose)
    on_pruned, above_pruned = parts.pruned.above(torch.where(sides, d - c, d), transpose)
    on_gap, above_gap = parts.gap.above(torch.where(sides, zero, c), transpose)
    # dense = pruned + gap in the input, too
    return Form(on_gap + on_dense, on_pruned + on_dense), above_dense + above_pruned + above_gap


def finite_substitution(substitution: Substitution) -> Substitution:
    """Return the substitution with forms of zeros and an infinite constant in rows that are not numbers."""
    broken = ~substitution.constant.isfinite()
    for form in substitution.forms:
        for part in (form.gap, form.pruned):
            broken = broken | ~as_matrix(part).isfinite().all(1)

    def clean(part: Tensor) -> Tensor:
        return torch.where(broken.view(-1, *[1] * (part.ndim - 1)), 0.0, part)

    forms = [Form(clean(form.gap), clean(form.pruned)) for form in substitution.forms]
    return Substitution(forms, torch.where(broken, math.inf, substitution.constant))


def moved(x: PairBounds, move: Callable[[Tensor], Tensor]) -> PairBounds:
    """Return bounds with each tensor rearranged."""
    return PairBounds(x.dense.map(move), x.pruned.map(move), x.gap.map(move))
