"""The pruner's state dictionary: all that a resumed run needs, as plain values and tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import PomonaError, require, shorten
from ..sharding import whole
from ..untrusted import reading
from .history import UpdateHistory
from .mask_bits import pack_bits, unpack_bits
from .method import Masks
from .score_method import ScoreMethod
from .slot import Slot
from .state_checks import require_valid

if TYPE_CHECKING:
    from .pruner import Pruner

VERSION = 1  # of the state dictionary
ADDED = ("norms",)  # keys that states of earlier releases have not
COUNTERS = ("step", "total", "steps_per_epoch", "last_change", "reached", "at_rest")  # attributes of the pruner


def collect_state(pruner: Pruner) -> dict[str, Any]:
    """Return the state of an attached pruner."""
    slots, every_slot = pruner.slots, (*pruner.slots, *pruner.coupled)
    state = {
        "version": VERSION,
        "method": pruner.method.resolved_options(pruner.total),
        **{key: getattr(pruner, key) for key in COUNTERS},
        "history": pruner.history_columns(),
        "shapes": {slot.name: list(slot.parameter.shape) for slot in slots},
        "masks": {slot.name: store_mask(slot, slot.mask) for slot in slots},
        "latents": {slot.name: slot.place(slot.latent) for slot in every_slot if slot.latent is not None},
        "flipped": {slot.name: slot.place(slot.last_flip) for slot in slots if slot.last_flip is not None},
        "memory": copy.deepcopy(pruner.memory),
        "norms": dict(pruner.norm_counts),
    }
    if isinstance(pruner.method, ScoreMethod):  # random weights are not stored: their draw numbers determine them
        observed = {slot: slot.observed_mask for slot in slots if slot.observed_mask is not None}
        state["seen"] = {slot.name: store_mask(slot, mask) for slot, mask in observed.items()}
        state["drawn"] = {slot.name: slot.place(slot.draw_number) for slot in slots if slot.draw_number is not None}
    calibrations = {slot.name: slot.place_calibration() for slot in slots if slot.calibration is not None}
    return state | ({"gauges": calibrations} if calibrations else {})


def store_mask(slot: Slot, mask: Tensor) -> Tensor:
    """Return a mask as a state holds it: as bits, or in the placement of a sharded parameter."""
    return slot.place(mask) if slot.is_sharded else pack_bits(mask)


def read_mask(slot: Slot, stored: Tensor) -> Tensor:
    """Return the mask that a state holds for a slot, or this rank's part of it."""
    if stored.dtype != torch.bool:
        stored = unpack_bits(whole(stored).to(slot.mask.device), slot.parameter.shape)
    return slot.own_part(stored)


@torch.no_grad()
def restore_state(pruner: Pruner, state: dict[str, Any], *, same_weights: bool = False) -> None:
    """Set an attached pruner to a state. Nothing is changed where this raises.

    With `same_weights`, raise PomonaError unless the model holds the weights that the state was saved with; the slots
    are changed then, and the model is not.
    """
    engine = pruner.attached_engine()
    with reading("the pruner's state"):
        masks, history = validate_state(pruner, state)
    engine.abort_step()
    for slot in engine.slots:
        slot.restore_initial_value()
    for slot in pruner.slots:
        slot.mask.copy_(masks[slot.name])
        if slot.last_flip is not None and slot.name in state["flipped"]:
            slot.last_flip.copy_(slot.own_part(state["flipped"][slot.name]))
    for slot in engine.slots:
        if slot.latent is not None:
            slot.latent.copy_(slot.own_part(state["latents"][slot.name]))
        if slot.weight is not None:
            restore_random_weights(slot, state)
        if slot.calibration is not None:
            slot.calibration.copy_(slot.own_calibration(state["gauges"][slot.name]))
        if slot.is_hard or state["at_rest"]:
            slot.copy_output_mask()
    if same_weights:
        for slot in engine.slots:
            require(
                slot.holds_projection(),
                f"the model's {slot.name} is not the one that the state was saved with: load its weights too.",
            )
    for key in COUNTERS:
        setattr(pruner, key, state[key])
    pruner.zeros_at_attach = 0.0
    pruner.replace_history(history)
    pruner.memory = copy.deepcopy(state["memory"])
    pruner.norm_counts = dict(state.get("norms", {}))
    engine.enforce_masks()
    pruner.set_next_sparsity()


def restore_random_weights(slot: Slot, state: dict[str, Any]) -> None:
    """Draw the random weights of a slot again, as a state describes them."""
    assert isinstance(slot.method, ScoreMethod)
    assert slot.weight is not None
    assert slot.observed_mask is not None
    if slot.draw_number is not None:
        slot.draw_number.copy_(slot.own_part(state["drawn"][slot.name]))
    like = slot.values.detach()
    slot.weight.copy_(
        slot.method.stream.weights(slot.name, slot.target.fan_in, like, slot.draw_number, slot.positions())
    )
    slot.observed_mask.copy_(read_mask(slot, state["seen"][slot.name]))


def validate_state(pruner: Pruner, state: dict[str, Any]) -> tuple[Masks, UpdateHistory]:
    """Return the masks and the history in a state, or raise PomonaError where anything in it is not this pruner's."""
    require(isinstance(state, Mapping), f"a pruner's state is a dictionary, got {shorten(state)}.")
    version = state.get("version")
    require(
        version == VERSION,
        f"the pruner's state has version {shorten(version)}, this is version {VERSION}: use the Pomona that wrote it.",
    )
    for key in collect_state(pruner):
        require(key in state or key in ADDED, f"the pruner's state is damaged: it has no '{key}'.")
    own, stored = pruner.method.resolved_options(pruner.total), state["method"]
    require(isinstance(stored, Mapping), f"the pruner's state is damaged: its method is {shorten(stored)}.")
    for key in sorted(own.keys() | stored.keys(), key=lambda key: (key != "name", key)):
        given, expected = stored.get(key), own.get(key)
        require(
            given == expected, f"the state is of a method with {key} = {shorten(given)}, this pruner has {expected}."
        )
    require_same_shapes("load", {s.name: s.parameter.shape for s in pruner.slots}, state["shapes"])
    every_slot = pruner.attached_engine().slots
    latents = {s.name: s.parameter.shape for s in every_slot if s.latent is not None}
    gauges = {s.name: t.shape for s in every_slot if (t := s.place_calibration()) is not None}
    for key, held in (("latents", latents), ("gauges", gauges)):
        require_same_shapes("load", held, {name: t.shape for name, t in state.get(key, {}).items()})
    history = UpdateHistory.from_state(state["history"], len(pruner.slots))
    require_valid(pruner, state, history)
    return {s.name: read_mask(s, state["masks"][s.name]) for s in pruner.slots}, history


def require_same_shapes(action: str, own: Mapping[str, Sequence[int]], given: Mapping[str, Sequence[int]]) -> None:
    """Raise PomonaError for tensors of another model, naming the first that differs."""
    for name, shape in own.items():
        if name not in given:
            raise PomonaError(f"cannot {action}: {name} is missing, so this is another model's.")
        if tuple(given[name]) != tuple(shape):
            raise PomonaError(
                f"cannot {action}: {name} has shape {tuple(given[name])} there and {tuple(shape)} here, "
                "so this is another model's."
            )
