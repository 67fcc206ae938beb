"""What masks do over time: how many entries flip, how alike consecutive masks are, what pruning costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .method import Masks, Time

if TYPE_CHECKING:
    from .arena import Arena


def change(arenas: Sequence[Arena], masks: Masks, time: Time, sparsity: float) -> dict[str, Any]:
    """Put new masks in force, and give a record of what that changes; its tensors stay on the device."""
    parts = [change_one(arena, masks, time) for arena in arenas if arena.targets]
    home = parts[0]["kept"].device
    flips, before, kept, lost, whole = (
        torch.stack([part[key].to(home) for part in parts]).sum()
        for key in ("flips", "before", "kept", "lost", "whole")
    )
    common = kept + before - flips  # 2 |A ∩ B|, from |A|, |B| and |A △ B|
    return {
        "step": time.step,
        "sparsity": sparsity,
        "delta": lost / whole.clamp(min=torch.finfo(whole.dtype).tiny),  # 0 where all weights are
        "flips": flips,
        "iou": common / (common + 2 * flips),
        "layers": torch.cat([part["layers"].to(home) for part in parts]),
    }


def change_one(arena: Arena, masks: Masks, time: Time) -> dict[str, Tensor]:
    """The same for one arena: the parts that are summed, and the sparsity of each of its targets."""
    mask = arena.mask[: arena.count]
    before = mask.clone()
    new = [masks[slot.name].movedim(0, slot.target.rows) for slot in arena.targets]
    torch._foreach_copy_([slot.mask for slot in arena.targets], new)
    flips = before ^ mask
    if arena.flipped is not None:
        arena.flipped.masked_fill_(flips, time.step)
    ends = mask.cumsum(0)[arena.ends - 1]
    lost, whole = losses(arena)
    return {
        "flips": flips.sum(),
        "before": before.sum(),
        "kept": ends[-1],
        "lost": lost,
        "whole": whole,
        "layers": 1 - ends.diff(prepend=ends.new_zeros(1)) / arena.ends.diff(prepend=ends.new_zeros(1)),
    }


def losses(arena: Arena) -> tuple[Tensor, Tensor]:
    """‖w − w̃‖² and ‖w‖² over the targets."""
    if arena.latent is not None and arena.method.plain:
        latent = arena.latent[: arena.count]
        return square(latent.masked_fill(arena.mask[: arena.count], 0)), square(latent)
    lost = [square(slot.source.detach() - slot.sparse()) for slot in arena.targets]
    return torch.stack(lost).sum(), torch.stack([square(slot.source.detach()) for slot in arena.targets]).sum()


def square(x: Tensor) -> Tensor:
    """‖x‖², in a type in which it does not overflow."""
    return torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).square()


def settled(flipped: Sequence[Tensor], steps_per_epoch: int) -> list[float]:
    """Figure 4: the share of all mask entries that never change after epoch 0, 1, 2, …"""
    last = torch.cat([f.flatten() for f in flipped])
    epochs = torch.div(last + steps_per_epoch - 1, steps_per_epoch, rounding_mode="floor")
    return (torch.bincount(epochs).cumsum(0) / len(last)).tolist()


def plain(record: dict[str, Any]) -> dict[str, Any]:
    """A record with its tensors fetched."""
    return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in record.items()}
