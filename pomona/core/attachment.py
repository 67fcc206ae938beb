"""Attach a method to a model: find its targets, create their slots, and refuse what cannot work."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from ..errors import require
from . import guards
from .coupled import find_coupled, find_norms
from .method import Method, TrainingProgress
from .slot import Slot
from .targets import unwrap


def validate_length(method: Method, total_steps: int | None, steps_per_epoch: int | None) -> None:
    """Raise PomonaError where the length of training is not one that the method can use."""
    require(
        steps_per_epoch is None or steps_per_epoch >= 1,
        f"steps_per_epoch counts optimizer steps and must be ≥ 1, got {steps_per_epoch}.",
    )
    if method.needs_total_steps:
        require(
            isinstance(total_steps, int) and total_steps >= 1,
            f"{method.name} needs total_steps, the length of training in optimizer steps, got {total_steps}.",
        )
    # Refuse now what the method would refuse one step later.
    method.is_update_due(TrainingProgress(1, total_steps or 1, steps_per_epoch))


def unwrap_optimizers(optimizer: Optimizer | Sequence[Optimizer], method: Method) -> list[Optimizer]:
    """Return the torch optimizers inside their wrappers, or raise PomonaError for those the method cannot use."""
    optimizers = [guards.unwrap_optimizer(o) for o in (optimizer if isinstance(optimizer, Sequence) else [optimizer])]
    for each in optimizers:
        guards.refuse_optimizer(each, method.weights)
    if method.updates_before_step:
        guards.refuse_several(optimizers, method.name)
    if method.keeps_pruned_momentum:
        guards.refuse_without_momentum(optimizers, method.name)
    return optimizers


def create_slots(
    model: nn.Module, method: Method, optimizers: Sequence[Optimizer], track: bool
) -> tuple[list[Slot], list[Slot]]:
    """Return the slots of the method's targets and those of the parameters coupled to them.

    The model is not changed. PomonaError is raised where nothing can be pruned or a target cannot be.
    """
    inner = unwrap(model)
    targets = method.targets(model)
    require(
        bool(targets),
        f"{type(inner).__name__} has nothing to prune: no convolution, linear, recurrent or attention "
        "weight besides the last classifier; name layers with include=[…].",
    )
    method.validate_targets(targets)
    slots = {target.name: Slot.create(target, method, track) for target in targets}
    coupled = create_coupled_slots(inner, method, slots) if method.pattern.removes_coupled else []
    every_slot = [*slots.values(), *coupled]
    guards.refuse_values(every_slot)
    scored = method.weights == "score"
    if method.updates_before_step or method.keeps_pruned_momentum or scored:
        guards.refuse_frozen(slots.values(), method.name)
    if scored:
        guards.refuse_trained_norms(inner, slots.values(), method.name)
    guards.require_owned(every_slot, optimizers)
    guards.refuse_overlap(every_slot, optimizers)
    return list(slots.values()), coupled


def create_coupled_slots(model: nn.Module, method: Method, slots: dict[str, Slot]) -> list[Slot]:
    """Return slots of the biases and norms that are removed with outputs."""
    norms = find_norms(model)
    for slot in slots.values():
        norm = norms.get(slot.target.module)
        if norm is not None and norm.weight is None:
            slot.norm_running_mean = norm._buffers.get("running_mean")
    pairs = find_coupled(model, [slot.target for slot in slots.values()], norms)
    return [Slot.create(target, method, leader=slots[leader.name]) for target, leader in pairs]
