"""What masks do over time: how many entries flip, how alike consecutive masks are, what pruning costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .method import Time

if TYPE_CHECKING:
    from .engine import Slot


class Update:
    """One mask update, measured on the device; numbers are fetched when somebody looks."""

    def __init__(self, time: Time, sparsity: float) -> None:
        self.time, self.sparsity = time, sparsity
        self.lost: list[Tensor] = []
        self.whole: list[Tensor] = []
        self.flips: list[Tensor] = []
        self.kept: list[Tensor] = []
        self.sizes: list[int] = []
        self.before: list[Tensor] = []

    def change(self, slot: Slot, mask: Tensor) -> None:
        """Put a new mask in force, and note what that changes."""
        flips = slot.mask ^ mask
        if slot.flipped is not None:
            slot.flipped.masked_fill_(flips, self.time.step)
        self.flips.append(flips.sum())
        self.before.append(slot.mask.sum())
        slot.mask.copy_(mask)
        self.kept.append(slot.mask.sum())
        self.sizes.append(mask.numel())
        wide = torch.promote_types(slot.source.dtype, torch.float32)  # squares overflow in half precision
        self.lost.append(torch.linalg.vector_norm(slot.source - slot.sparse(), dtype=wide))
        self.whole.append(torch.linalg.vector_norm(slot.source, dtype=wide))

    def close(self) -> dict[str, Any]:
        """The record for `history`; tensors in it stay on the device."""
        flips, kept, before = (torch.stack(x) for x in (self.flips, self.kept, self.before))
        common = (kept.sum() + before.sum() - flips.sum()) / 2  # |A ∩ B| from |A|, |B| and |A △ B|
        union = (kept.sum() + before.sum() + flips.sum()) / 2
        return {
            "step": self.time.step,
            "sparsity": self.sparsity,
            "delta": torch.stack(self.lost).square().sum() / torch.stack(self.whole).square().sum(),
            "flips": flips.sum(),
            "iou": common / union,
            "layers": 1 - kept / torch.tensor(self.sizes, device=kept.device),
        }


def settled(flipped: Sequence[Tensor], steps_per_epoch: int) -> list[float]:
    """Figure 4: the share of all mask entries that never change after epoch 0, 1, 2, …"""
    last = torch.cat([f.flatten() for f in flipped])
    epochs = torch.div(last + steps_per_epoch - 1, steps_per_epoch, rounding_mode="floor")
    return (torch.bincount(epochs).cumsum(0) / len(last)).tolist()


def plain(record: dict[str, Any]) -> dict[str, Any]:
    """A record with its tensors fetched."""
    return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in record.items()}
