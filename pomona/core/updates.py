"""Mask updates: what a method reads, and how its masks are installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..allocation import parse_allocation
from ..sharding import is_sharded, replicate, sharding_mesh, whole_reads
from . import guards
from .connectivity import reconnect
from .fused.flat_buffers import FlatBuffers
from .method import Masks, Targets
from .slot import Slot, outputs_first
from .targets import unwrap

if TYPE_CHECKING:
    from .pruned_training import PrunedTraining


def read_targets(pruner: PrunedTraining, gradients: dict[str, Tensor] | None = None) -> Targets:
    """Return the tensors that the pruner's method may read, with their output dimension in front."""

    mesh = sharding_mesh(slot.parameter for slot in pruner.slots)

    def view(pick: Callable[[Slot], Tensor | None]) -> dict[str, Tensor]:
        picked = ((slot, pick(slot)) for slot in pruner.slots)
        values = {slot: value for slot, value in picked if value is not None}
        if mesh is not None:  # where one layer is sharded all are, and those that every rank has are copies
            placed = {s: value if is_sharded(value) else s.place(value.detach()) for s, value in values.items()}
            values = {s: value if is_sharded(value) else replicate(value, mesh) for s, value in placed.items()}
        return {s.name: outputs_first(value, s.target.output_dim) for s, value in values.items()}

    momentum = {}
    if pruner.method.keeps_pruned_momentum:
        momentum = view(lambda slot: guards.read_momentum(pruner.optimizers, slot.parameter))
    return Targets(
        latent=view(lambda slot: slot.moved),
        masks=view(lambda slot: slot.mask),
        progress=pruner.progress,
        grads=view(lambda slot: gradients.get(slot.name)) if gradients else {},
        momentum=momentum,
        memory=pruner.memory,
        output_layers=frozenset(slot.name for slot in pruner.slots if "classifier" in slot.target.tags),
    )


def compute_masks(
    pruner: PrunedTraining, sparsity: float, gradients: dict[str, Tensor] | None, replayed: bool
) -> Targets:
    """Return the targets of an update, with the method's new masks in place of the installed ones.

    A replayed step does not wait for the device, so that its masks are not checked for blocked layers.
    """
    targets = read_targets(pruner, gradients)
    with whole_reads(pruner.attached_engine().is_sharded):
        masks = pruner.method.restrict(targets, pruner.method.update(targets, sparsity))
        return replace(targets, masks=masks if replayed else connect_masks(pruner, targets, masks))


def connect_masks(pruner: PrunedTraining, targets: Targets, masks: Masks) -> Masks:
    """Return masks under which no layer is blocked, for methods whose pruned weights receive no gradient.

    "global(floor=0)" is one threshold and nothing else.
    """
    if pruner.method.weights not in ("hard", "free") or parse_allocation(pruner.method.allocation) == ("global", 0):
        return masks
    return reconnect(unwrap(pruner.model), pruner.method.pattern, targets, masks, pruner.method.only_prunes)  # type: ignore[arg-type]


def snapshot_masks(buffers: Sequence[FlatBuffers]) -> list[Tensor]:
    """Return the masks that the next history entry compares with, one tensor for each set of buffers."""
    return [group.snapshot_masks() for group in buffers]


@torch.no_grad()
def install_masks(buffers: Sequence[FlatBuffers], masks: Mapping[str, Tensor] | None) -> list[Tensor]:
    """Install masks, or without any those that kernels select by magnitude; return the masks before.

    The projection is calibrated for the new masks. No weight is changed yet: `Engine.apply_masks` projects them.
    """
    before = snapshot_masks(buffers)
    for group in buffers:
        if masks is None:
            group.select_by_magnitude()
        else:
            group.install_masks(masks)
        group.calibrate()
    return before
