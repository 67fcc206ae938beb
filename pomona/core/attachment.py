"""Attach a method to a model: find its targets, create their slots, and refuse what cannot work."""

from __future__ import annotations

import warnings
from collections.abc import Sequence, Sized

from torch import nn
from torch.optim import Optimizer

from ..errors import PomonaError, require
from ..sharding import whole_reads
from . import guards
from .coupled import NORMS, find_coupled
from .method import Method, TrainingProgress
from .slot import OutputLeaders, Slot
from .sparsity import count_zeros
from .targets import Target, unwrap

# A model was pruned before if this share of its weights is zero, and more than a few.
PRUNED_SHARE = 0.01
PRUNED_COUNT = 100


def find_length(
    total_steps: int | None, steps_per_epoch: int | None, loader: Sized | None, epochs: int | None
) -> tuple[int | None, int | None]:
    """Return total_steps and steps_per_epoch, counted from a loader and a number of epochs where these are given."""
    if loader is not None:
        require(
            steps_per_epoch is None,
            f"steps_per_epoch={steps_per_epoch} and loader= both tell the length of an epoch: leave out loader= where "
            "an optimizer step takes several batches, else steps_per_epoch=.",
        )
        steps_per_epoch = count_batches(loader)
    if epochs is not None:
        require(
            isinstance(epochs, int) and epochs >= 1,
            f"epochs counts passes over the data and must be ≥ 1, got {epochs}.",
        )
        require(
            total_steps is None,
            f"total_steps={total_steps} and epochs={epochs} both tell the length of training: leave out one of them.",
        )
        require(
            steps_per_epoch is not None,
            f"epochs={epochs} is a length of training only with loader= or steps_per_epoch=: give one of them.",
        )
        total_steps = epochs * steps_per_epoch  # type: ignore[operator]
    return total_steps, steps_per_epoch


def count_batches(loader: Sized) -> int:
    """Return the number of batches in an epoch of a loader; raise PomonaError where it is not known or 0."""
    try:
        count = len(loader)
    except (TypeError, NotImplementedError) as error:  # the loader of an iterable data set has a __len__ that raises
        raise PomonaError(
            f"the loader, a {type(loader).__name__}, does not know its length: give steps_per_epoch= and total_steps=, "
            "counted in optimizer steps, in its place."
        ) from error
    require(count >= 1, f"the loader, a {type(loader).__name__}, has no batches: give one with at least one.")
    return count


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


def find_targets(model: nn.Module, method: Method) -> list[Target]:
    """Return the parameters that a method prunes, with a warning for each layer that its pattern does not fit.

    Layers that no traced forward calls share one warning.
    PomonaError is raised where nothing can be pruned, or the sparsity would leave some targets empty.
    """
    found, network = method.prunable(model), type(unwrap(model)).__name__
    if found.misfits and not found.targets:
        raise PomonaError(f"{method.pattern} fits no layer of {network}: {found.misfits[0].reason}")
    if found.uncalled:
        names = ", ".join(choice.target.name for choice in found.uncalled)
        warnings.warn(
            f"{names}: left dense, as the traced forward calls no such layer, and outputs of it may be the network's; "
            "name all layers to prune with include=[…] where that is wrong.",
            stacklevel=5,
        )
    require(
        bool(found.targets),
        f"{network} has nothing to prune: no convolution, linear, recurrent or attention weight that is "
        "trained, besides the layers whose outputs are the network's; name layers with include=[…].",
    )
    method.validate_targets(found.targets)
    for choice in found.misfits:
        warnings.warn(f"{choice.target.name} is left dense: {choice.reason}", stacklevel=5)
    return found.targets


def create_slots(
    model: nn.Module, method: Method, optimizers: Sequence[Optimizer], track: bool
) -> tuple[list[Slot], list[Slot]]:
    """Return the slots of the method's targets and those of the parameters coupled to them.

    The model is not changed. PomonaError is raised where nothing can be pruned or a target cannot be.
    """
    inner = unwrap(model)
    guards.refuse_flat_shards(inner)
    targets = find_targets(model, method)
    slots = {target.name: Slot.create(target, method, track) for target in targets}
    coupled = create_coupled_slots(inner, method, slots) if method.pattern.removes_coupled else []
    every_slot = [*slots.values(), *coupled]
    guards.refuse_values(every_slot)
    scored = method.weights == "score"
    if method.updates_before_step or method.keeps_pruned_momentum or scored:
        guards.refuse_frozen(slots.values(), method.name)
    if "frozen" in method.left_dense:
        guards.warn_frozen(slots.values())
    if scored:
        guards.refuse_trained_norms(inner, slots.values(), method.name)
    guards.require_owned(every_slot, optimizers)
    guards.refuse_overlap(every_slot, optimizers)
    return list(slots.values()), coupled


def find_pruned_share(method: Method, slots: Sequence[Slot]) -> float:
    """Return the share of zeros where weights look pruned already to a method that chooses masks by them, else 0.

    Weights that were initialized to zero throughout do not count.
    """
    if method.weights == "score" or method.final_sparsity == 0:
        return 0.0
    sizes = [slot.parameter.numel() for slot in slots]
    with whole_reads(any(slot.is_sharded for slot in slots)):
        counts = [count_zeros([slot.parameter.detach()]) for slot in slots]
    zeros = sum(count for count, size in zip(counts, sizes, strict=True) if count < size)
    return zeros / sum(sizes) if zeros >= max(PRUNED_COUNT, PRUNED_SHARE * sum(sizes)) else 0.0


def create_coupled_slots(model: nn.Module, method: Method, slots: dict[str, Slot]) -> list[Slot]:
    """Return slots of the biases and norms that are removed with outputs."""
    held = {id(slot.parameter) for slot in slots.values()}
    coupled = []
    for coupling in find_coupled(model, [slot.target for slot in slots.values()]):
        leaders = OutputLeaders(coupling.channels, {t.name: slots[t.name] for t in coupling.channels.leaders})
        for target in coupling.vectors():
            if id(target.parameter) not in held:
                held.add(id(target.parameter))
                coupled.append(Slot.create(target, method, leader=leaders))
        if isinstance(coupling.module, NORMS) and coupling.module.weight is None:
            slots[coupling.channels.leaders[0].name].unscaled_norms.append((coupling.module, leaders))
    return coupled
