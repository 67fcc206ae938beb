"""Checks of a pruner's state before any of it is used: a state may come from a damaged file, or from a stranger."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import require, shorten
from ..sharding import whole

if TYPE_CHECKING:
    from .history import UpdateHistory
    from .pruner import Pruner
    from .slot import Slot

MAX_OVERTIME = 10  # how many times its length a training may have been continued beyond its end
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def require_valid(pruner: Pruner, state: Mapping[str, Any], history: UpdateHistory) -> None:
    """Raise PomonaError unless the numbers and tensors of a state can be those of this pruner."""
    require_valid_counters(pruner, state)
    require_valid_history(history, state["step"])
    memory, numbers = state["memory"], pruner.method.memory_keys
    known = isinstance(memory, Mapping) and set(numbers) <= memory.keys()
    numbers = (*numbers, *(slot.name for slot in pruner.slots))
    valid = known and all(is_number(value) or key not in numbers for key, value in memory.items())
    require(valid, f"the pruner's state is damaged: its memory is {shorten(memory)}.")
    norms = state.get("norms", {})
    valid = isinstance(norms, Mapping) and all(type(n) is str and type(c) is int for n, c in norms.items())
    require(valid, f"the pruner's state is damaged: its batch norms have seen {shorten(norms)}.")
    step, every_slot = state["step"], pruner.attached_engine().slots
    for slot in pruner.slots:
        require_bits("mask", slot, find_tensor(state, "masks", slot))
        if slot.last_flip is not None and slot.name in state["flipped"]:
            require_integers("flips", slot, find_tensor(state, "flipped", slot), step)
        if slot.draw_number is not None:
            require_integers("draws", slot, find_tensor(state, "drawn", slot), step)
        if slot.observed_mask is not None:
            require_bits("mask", slot, find_tensor(state, "seen", slot))
    for key, field in (("latents", "latent"), ("gauges", "calibration")):
        for slot in every_slot:
            if getattr(slot, field) is not None:
                require_finite(key, slot, find_tensor(state, key, slot))
    # Of sharded weights a rank may keep none, and all ranks must come to the same result.
    kept = [whole(find_tensor(state, "masks", slot).any()) for slot in pruner.slots]
    require(
        bool(torch.stack([one.cpu() for one in kept]).any()), "the pruner's state is damaged: its masks keep no weight."
    )


def require_valid_counters(pruner: Pruner, state: Mapping[str, Any]) -> None:
    """Raise PomonaError unless the counters of a state are possible, and its length of training is the pruner's."""
    step, total, epoch = state["step"], state["total"], state["steps_per_epoch"]
    for key, value in {"step": step, "total": total, "last_change": state["last_change"]}.items():
        require(type(value) is int and value >= 0, f"the pruner's state is damaged: its {key} is {shorten(value)}.")
    for key, given in (("total", total), ("steps_per_epoch", epoch)):
        own, option = getattr(pruner, key), "total_steps" if key == "total" else key
        require(
            own == given or own in (None, 1),  # 1 stands for a length that `attach` was not given
            f"the state was saved with {option}={shorten(given)}, and the pruner was attached with {option}={own}: "
            "attach it with the length that the state was saved with.",
        )
    valid = total >= 1 and (epoch is None or (type(epoch) is int and epoch >= 1))
    require(valid, f"the pruner's state is damaged: its length is {total} steps, {shorten(epoch)} an epoch.")
    limit = MAX_OVERTIME * total if pruner.method.needs_total_steps else 1 << 53
    require(step <= limit, f"the pruner's state is damaged: its step is {step} of {total}.")
    require(state["last_change"] <= step, f"the pruner's state is damaged: masks changed after step {step}.")
    reached, at_rest = state["reached"], state["at_rest"]
    valid = is_number(reached) and 0 <= reached <= 1 and isinstance(at_rest, bool)
    require(valid, f"the pruner's state is damaged: it has reached {shorten(reached)}, at rest {shorten(at_rest)}.")


def require_valid_history(history: UpdateHistory, step: int) -> None:
    """Raise PomonaError unless the entries of a history have possible figures and steps up to a step."""
    for entry in history.entries:
        valid = type(entry["step"]) is int and 0 <= entry["step"] <= step and is_number(entry["sparsity"])
        valid = valid and isinstance(entry["layers"], list)
        require(valid, f"the pruner's state is damaged: its history has the entry {shorten(entry)}.")


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)


def find_tensor(state: Mapping[str, Any], key: str, slot: Slot) -> Tensor:
    """Return the tensor that a state has for a slot under a key; raise PomonaError if it has none."""
    found = state[key].get(slot.name) if isinstance(state.get(key), Mapping) else None
    require(isinstance(found, Tensor), f"the pruner's state is damaged: {key} has no tensor for {slot.name}.")
    return found  # type: ignore[return-value]


def require_bits(name: str, slot: Slot, stored: Tensor) -> None:
    """Raise PomonaError unless a tensor holds a mask: as bits, or entry by entry."""
    size = math.prod(slot.parameter.shape)
    as_bits = stored.dtype == torch.uint8 and stored.shape == ((size + 7) // 8,)
    require(
        as_bits or (stored.dtype == torch.bool and stored.shape == slot.parameter.shape),
        f"the pruner's state is damaged: the {name} of {slot.name} is {stored.dtype} of shape {tuple(stored.shape)}.",
    )


def require_integers(name: str, slot: Slot, stored: Tensor, limit: int) -> None:
    """Raise PomonaError unless a tensor has a whole number from 0 to a limit for each weight of a slot."""
    fits = stored.dtype in INTEGERS and stored.shape == slot.parameter.shape
    require(
        fits and bool(whole(((stored >= 0) & (stored <= limit)).all())),
        f"the pruner's state is damaged: the {name} of {slot.name} are not numbers of steps from 0 to {limit}.",
    )


def require_finite(name: str, slot: Slot, stored: Tensor) -> None:
    """Raise PomonaError unless all values of a tensor are finite."""
    require(
        stored.is_floating_point() and bool(whole(stored.isfinite().all())),
        f"the pruner's state is damaged: its {name} of {slot.name} are not finite numbers; go back to an earlier one.",
    )
