"""Training in several processes: all ranks prune alike, begin with the same masks, and stop where masks drift apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import PomonaError, require
from ..registry import format_plain_data
from ..sharding import shard_number, sharding_mesh
from .mask_bits import hash_mask

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .slot import Slot


def world_group() -> ProcessGroup | None:
    """Return the group of all processes, or None where this process trains alone."""
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return None
    return distributed.group.WORLD


def training_group(model: nn.Module) -> ProcessGroup | None:
    """Return the group of processes that are known to train a model together, from how it was wrapped; None for one."""
    mesh = sharding_mesh(model.parameters())
    if mesh is not None and mesh.ndim > 1:
        return world_group()
    group: Any = model.process_group if isinstance(model, DistributedDataParallel) else None
    group = mesh.get_group() if mesh is not None else group
    return group if group is not None and group.size() > 1 else None


def gather_objects(value: Any, group: ProcessGroup) -> list[Any]:
    """Return the values of all ranks of a group, in their order."""
    gathered = [None] * group.size()
    distributed.all_gather_object(gathered, value, group)
    return gathered


def require_same_options(group: ProcessGroup | None, options: Mapping[str, Any]) -> None:
    """Raise PomonaError on every rank where one rank has another value of an option than the first."""
    if group is None:
        return
    first, *others = gather_objects(dict(options), group)
    for rank, other in enumerate(others, 1):
        for option in sorted(first.keys() | other.keys()):
            given, expected = other.get(option), first.get(option)
            require(
                given == expected,
                f"rank {rank} has {option} = {format_plain_data(given, repr)} and rank 0 has "
                f"{format_plain_data(expected, repr)}: attach the same method with the same options on every rank, and "
                "load the same checkpoint.",
            )


@torch.no_grad()
def broadcast_slots(slots: Sequence[Slot], group: ProcessGroup | None) -> None:
    """Broadcast the masks and latents of the first rank to all ranks; equal gradients keep them equal from then on."""
    if group is None:
        return
    own = [(slot.name, tuple(slot.parameter.shape)) for slot in slots]
    if any(other != own for other in gather_objects(own, group)):
        raise PomonaError(
            "the ranks prune different layers: attach the same method to the same model on every rank, after "
            "wrapping it in DistributedDataParallel; pipeline parallel models are not supported."
        )
    for slot in slots:
        if slot.is_sharded:  # each rank has a part of its own
            continue
        distributed.broadcast(slot.mask.view(torch.uint8), group=group, group_src=0)
        distributed.broadcast(slot.moved.detach(), group=group, group_src=0)
        if slot.calibration is not None:
            distributed.broadcast(slot.calibration, group=group, group_src=0)
        slot.enforce_mask()


@torch.no_grad()
def require_same_masks(slots: Sequence[Slot], group: ProcessGroup | None, step: int) -> None:
    """Raise PomonaError on every rank where the masks of two ranks differ."""
    slots = [slot for slot in slots if not slot.is_sharded or sharding_mesh([slot.parameter]).ndim > 1]
    if group is None or not slots:  # of weights that are only divided, no two ranks have the same part
        return
    own = torch.stack([hash_mask(slot.mask) for slot in slots])
    parts = own.new_tensor([shard_number(slot.parameter) for slot in slots])
    gathered = [torch.empty_like(torch.stack([own, parts])) for _ in range(group.size())]
    distributed.all_gather(gathered, torch.stack([own, parts]), group)
    hashes, numbers = torch.stack(gathered).unbind(1)
    same_part = numbers[:, None] == numbers  # for each layer, whether two ranks hold the same part of it
    differs = (same_part & (hashes[:, None] != hashes)).cpu()
    if bool(differs.any()):
        first, rank, layer = differs.nonzero()[0].tolist()
        raise PomonaError(
            f"after step {step} the mask of {slots[layer].name} on rank {rank} is not that of rank {first}, so that "
            "the ranks train different networks: resume from the last checkpoint, and look for what differs there "
            "(weights that were changed, gradients that are not reduced, other settings of the optimizer)."
        )


def refuse_join(model: nn.Module | None) -> None:
    """Refuse a step within `join()`, in which ranks without data stop stepping and keep their old masks."""
    config = getattr(model, "_join_config", None)
    if isinstance(model, DistributedDataParallel) and config is not None and config.enable:
        raise PomonaError(
            "join() lets a rank without data stop stepping, and its masks would differ from the others' from then on: "
            "give all ranks the same number of batches (DistributedSampler does), and train without join()."
        )
