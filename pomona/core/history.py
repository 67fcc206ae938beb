"""What masks do over time: how many entries flip, how alike consecutive masks are, what pruning costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .method import Time

if TYPE_CHECKING:
    from .fused.flat_buffers import Arena


def change(
    arenas: Sequence[Arena], masks: Mapping[str, Tensor] | None, names: Sequence[str], time: Time, sparsity: float
) -> dict[str, Any]:
    """Put new masks in force, and note what that changes. The figures stay on the device until `plain`.

    Without masks, kernels pick them.
    """
    parts = [change_one(arena, masks, time) for arena in arenas if arena.targets]
    return {"step": time.step, "sparsity": sparsity, "names": names, "parts": parts}


def change_one(arena: Arena, masks: Mapping[str, Tensor] | None, time: Time) -> dict[str, Any]:
    """The same for one arena, in as few kernels as will do."""
    mask, before = arena.mask[: arena.count], arena.remember()
    if masks is None:
        arena.pick()
    else:
        arena.put(masks)
    arena.measure()
    noted = arena.note()
    figures = look(arena, before) if noted is None else noted
    if arena.flipped is not None:
        arena.flipped.masked_fill_(before ^ mask, time.step)
    if arena.seen is not None:
        arena.seen.copy_(mask)
    return {"names": arena.names, "sizes": arena.sizes, "figures": figures}


def look(arena: Arena, before: Tensor) -> list[Tensor]:
    """How many are kept of each target; how many flipped and were kept, ‖w − w̃‖ and ‖w‖, of each or of all."""
    mask = arena.mask[: arena.count]
    ends = mask.cumsum(0)[arena.ends]
    figures = [(before ^ mask).sum(), before.sum(), *norms(arena)]
    return [ends.diff(prepend=ends.new_zeros(1)), *(figure[None] for figure in figures)]


def norms(arena: Arena) -> tuple[Tensor, Tensor]:
    """‖w − w̃‖ and ‖w‖ over the targets."""
    flat = arena.latent if arena.weight is None else arena.weight
    if flat is not None and arena.method.plain:
        dense = flat[: arena.count]
        return norm(dense.masked_fill(arena.mask[: arena.count], 0)), norm(dense)
    lost = [norm(slot.dense.detach() - slot.sparse()) for slot in arena.targets]
    whole = [norm(slot.dense.detach()) for slot in arena.targets]
    return norm(torch.stack(lost)), norm(torch.stack(whole))


def norm(x: Tensor) -> Tensor:
    """‖x‖, in a type in which its square does not overflow."""
    return torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))


def plain(record: dict[str, Any]) -> dict[str, Any]:
    """A record of `change` as the user sees it."""
    if "parts" not in record:
        return record
    parts = [[part["names"], part["sizes"], *lists(part["figures"])] for part in record["parts"]]
    names, sizes, kept, *rows = ([one for part in parts for one in part[i]] for i in range(7))
    flips, before = (int(sum(row)) for row in rows[:2])
    lost, whole = (sum(norm**2 for norm in row) for row in rows[2:])
    shares = dict(zip(names, zip(kept, sizes, strict=True), strict=True))
    common = int(sum(kept)) + before - flips  # 2 |A ∩ B|, from |A|, |B| and |A △ B|
    return {
        "step": record["step"],
        "sparsity": record["sparsity"],
        "delta": lost / whole if whole else 0.0,
        "flips": flips,
        "iou": common / (common + 2 * flips) if common + flips else 1.0,
        "layers": [1 - shares[name][0] / shares[name][1] for name in record["names"]],
    }


def lists(figures: Tensor | list[Tensor]) -> list[list[float]]:
    """Figures on the host."""
    return figures.tolist() if isinstance(figures, Tensor) else [figure.tolist() for figure in figures]


def settled(flipped: Sequence[Tensor], steps_per_epoch: int) -> list[float]:
    """Figure 4: the share of all mask entries that never change after epoch 0, 1, 2, …"""
    last = torch.cat([f.flatten() for f in flipped])
    epochs = torch.div(last + steps_per_epoch - 1, steps_per_epoch, rounding_mode="floor")
    return (torch.bincount(epochs).cumsum(0) / len(last)).tolist()
