"""The sparsity that was reached: what the masks prune, and what is zero."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..sharding import whole_reads

if TYPE_CHECKING:
    from .slot import Slot


class Sparsity(float):
    """The pruned fraction of the targets, which is also `pruned`, with the fraction that is zero in `zeros`.

    They differ where weights that are grown again start at zero (SET, RigL), where thresholds zero kept weights, and
    where pruned weights may grow until the next update (SFP).
    """

    pruned: float
    zeros: float

    def __new__(cls, pruned: float, zeros: float) -> Sparsity:
        sparsity = super().__new__(cls, pruned)
        sparsity.pruned, sparsity.zeros = float(pruned), float(zeros)
        return sparsity

    def __getnewargs__(self) -> tuple[float, float]:  # type: ignore[override]
        return self.pruned, self.zeros

    def __repr__(self) -> str:
        return f"Sparsity(pruned={self.pruned}, zeros={self.zeros})"

    __str__ = float.__repr__


@torch.no_grad()
def measure_sparsity(slots: Iterable[Slot]) -> Sparsity:
    """Return the pruned fraction and the fraction of zeros over the targets of slots."""
    slots = list(slots)
    with whole_reads(any(slot.is_sharded for slot in slots)):
        size = sum(slot.parameter.numel() for slot in slots)
        kept = sum(int(slot.place(slot.mask).sum()) for slot in slots)
        held = (slot.parameter.detach() if slot.is_sharded else slot.target.parameter for slot in slots)
        return Sparsity(1 - kept / size, count_zeros(held) / size)


def count_zeros(tensors: Iterable[Tensor]) -> int:
    """Return how many entries of tensors are zero."""
    return sum(tensor.numel() - int(torch.count_nonzero(tensor)) for tensor in tensors)
