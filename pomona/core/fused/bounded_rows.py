"""The bound on the gradients of weak outputs on a CPU, which changes only the rows that it shortens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...native import step
from ..method import GradientBound

if TYPE_CHECKING:
    from ..slot import Slot

MOST_ROWS = 0.25  # the share of rows up to which changing them in place is cheaper than a new gradient


class BoundedRows:
    """Gradients of which some rows are shortened in place during a step, and the rows as they were."""

    def __init__(self) -> None:
        self.changed: list[tuple[Tensor, Tensor, Tensor]] = []  # gradients, numbers of rows, the rows before

    def bound(self, slot: Slot, bound: GradientBound) -> bool:
        """Bound the gradient of a slot as `BoundedFeedback` does, bit for bit; return False where that is impossible.

        Norms of the weights are estimates from the last projection, which decide only which outputs are weak.
        """
        gradient, weight_norms = slot.parameter.grad, slot.known_output_norms()
        if gradient is None or weight_norms is None or not can_bound(gradient):
            return False
        inner = list(range(1, gradient.ndim))
        norms = torch.linalg.vector_norm(gradient, dim=inner, keepdim=True)
        found = step.bound_factors(norms, weight_norms, *bound)
        if found is None:
            return False
        factors, count = found
        if count > MOST_ROWS * len(gradient):
            slot.parameter.grad = gradient * factors
        elif count:
            rows = (factors.view(-1) != 1).nonzero().view(-1)
            before = gradient[rows]
            self.changed.append((gradient, rows, before))
            gradient.index_copy_(0, rows, before * factors[rows])
        return True

    def restore(self) -> None:
        """Put the rows back that a step has shortened."""
        while self.changed:
            gradient, rows, before = self.changed.pop()
            gradient.index_copy_(0, rows, before)


def can_bound(gradient: Tensor) -> bool:
    """Return whether a gradient is of the kind whose rows are bounded; its norms then have the bits of torch's."""
    return (
        gradient.ndim > 1
        and type(gradient) is Tensor
        and step.is_float(gradient)
        and gradient[0].numel() <= step.MAX_NORM_LENGTH
        and torch.get_default_dtype() is torch.float32
    )
