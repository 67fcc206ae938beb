"""Data parallel training: every rank holds the same masks and latents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import distributed

from ..errors import PomonaError

if TYPE_CHECKING:
    from .engine import Slot


@torch.no_grad()
def agree(slots: Sequence[Slot]) -> None:
    """Rank 0 hands its masks and latents to all ranks; afterwards equal gradients keep them equal."""
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return
    mine = [(slot.name, tuple(slot.mask.shape)) for slot in slots]
    theirs = [None] * distributed.get_world_size()
    distributed.all_gather_object(theirs, mine)
    if any(other != mine for other in theirs):
        raise PomonaError(
            "the ranks prune different layers: attach the same method to the same model on every rank, after "
            "wrapping it in DistributedDataParallel; pipeline parallel models are not supported."
        )
    for slot in slots:
        distributed.broadcast(slot.mask.view(torch.uint8), 0)
        distributed.broadcast(slot.source.detach(), 0)
        if slot.gauge is not None:
            distributed.broadcast(slot.gauge, 0)
        slot.hold()
