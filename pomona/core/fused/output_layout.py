"""Slots whose outputs are contiguous rows in memory, as the kernels read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..slot import Slot


def threshold_count(slot: Slot) -> int:
    """Return how many outputs have a threshold of their own; 0 for none, or where they are not contiguous."""
    number = 0 if slot.calibration is None else slot.calibration[0].numel()
    return number if number in (1, output_count(slot)) else 0


def output_count(slot: Slot) -> int:
    """Return the number of outputs whose weights are contiguous in memory; 0 where they are not."""
    count = slot.mask.shape[0]
    return count if slot.target.output_dim == 0 and slot.mask.stride(0) * count == slot.mask.numel() else 0
