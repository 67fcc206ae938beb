"""Data-parallel training: every rank holds the same masks and latents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import distributed

from ..errors import PomonaError

if TYPE_CHECKING:
    from .slot import Slot


@torch.no_grad()
def broadcast_slots(slots: Sequence[Slot]) -> None:
    """Broadcast the masks and latents of rank 0 to all ranks; equal gradients keep them equal from then on."""
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return
    own = [(slot.name, tuple(slot.mask.shape)) for slot in slots]
    gathered = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, own)
    if any(other != own for other in gathered):
        raise PomonaError(
            "the ranks prune different layers: attach the same method to the same model on every rank, after "
            "wrapping it in DistributedDataParallel; pipeline parallel models are not supported."
        )
    for slot in slots:
        distributed.broadcast(slot.mask.view(torch.uint8), 0)
        distributed.broadcast(slot.moved.detach(), 0)
        if slot.calibration is not None:
            distributed.broadcast(slot.calibration, 0)
        slot.enforce_mask()
