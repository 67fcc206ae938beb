"""The pruner's state inside the optimizer's, where stacks that know nothing of Pomona save and load it.

The state is stored twice, as one object: under a key of its own beside `param_groups`, and under the same key in the
first parameter group. `Optimizer.load_state_dict` drops the former and keeps the latter. So a state that is loaded
before a pruner is attached waits in the parameter group until `attach` takes it.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ..errors import PomonaError, require
from .state import restore_state

if TYPE_CHECKING:
    from .pruner import Pruner
    from .slot import Slot

STATE_KEY = re.compile(r"pomona(_\d+)?")


def choose_key(optimizer: Optimizer, taken: Iterable[str]) -> str:
    """Return a key for a pruner's state: "pomona", or with a number where that is taken or waits in the optimizer."""
    used = {*taken, *optimizer.param_groups[0]}
    keys = itertools.chain(["pomona"], (f"pomona_{n}" for n in itertools.count(2)))
    return next(key for key in keys if key not in used)


def add_state(saved: dict[str, Any], key: str, state: dict[str, Any]) -> None:
    """Add a pruner's state to the state dict of an optimizer."""
    first, *others = saved["param_groups"]
    saved |= {key: state, "param_groups": [{**first, key: state}, *others]}


def pop_state(saved: dict[str, Any], key: str) -> dict[str, Any] | None:
    """Remove a pruner's state from the state dict of an optimizer and return it, or None where there is none."""
    first, *others = saved["param_groups"]
    saved["param_groups"] = [{k: value for k, value in first.items() if k != key}, *others]
    return saved.pop(key, first.get(key))


def fits_groups(optimizer: Optimizer, saved: Mapping[str, Any]) -> bool:
    """Return whether a state has the parameter groups of an optimizer, which `load_state_dict` requires."""
    own, groups = optimizer.param_groups, saved.get("param_groups")
    if not isinstance(groups, list) or len(groups) != len(own):
        return False
    return all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and len(group["params"]) == len(mine["params"])
        for group, mine in zip(groups, own, strict=True)
    )


def without_states(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without the states of pruners."""
    return {key: value for key, value in group.items() if not STATE_KEY.fullmatch(key)}


@dataclass(frozen=True)
class WaitingState:
    """A pruner's state that an optimizer was loaded with and that no pruner has taken."""

    group: dict[str, Any]
    key: str
    state: dict[str, Any]

    @property
    def names(self) -> list[str]:
        """The names of the parameters that the pruner had; none where the state is damaged."""
        shapes = self.state.get("shapes") if isinstance(self.state, dict) else None
        return [str(name) for name in shapes] if isinstance(shapes, dict) else []

    def put_back(self) -> None:
        """Put the state back into its parameter group."""
        self.group[self.key] = self.state


def list_waiting(optimizers: Sequence[Optimizer]) -> list[WaitingState]:
    """Return the states that wait in optimizers for a pruner."""
    groups = [optimizer.param_groups[0] for optimizer in optimizers]
    return [WaitingState(group, key, group[key]) for group in groups for key in group if STATE_KEY.fullmatch(key)]


def take_waiting(optimizers: Sequence[Optimizer], slots: Iterable[Slot]) -> list[WaitingState]:
    """Remove the waiting states that prune any of the same parameters as the slots, and return them."""
    names = {slot.name for slot in slots}
    taken = [one for one in list_waiting(optimizers) if names & set(one.names or names)]
    for one in taken:
        del one.group[one.key]
    return taken


def continue_from(pruner: Pruner, waiting: Sequence[WaitingState], total_steps: int | None) -> None:
    """Set a pruner to the state that waited for it, or raise PomonaError where that is of another run."""
    try:
        require(len(waiting) == 1, f"it has the states of {len(waiting)} pruners for these parameters.")
        state = waiting[0].state
        require(isinstance(state, dict), "it is no dictionary.")
        lengths = {"steps_per_epoch": pruner.steps_per_epoch} | ({"total": total_steps} if total_steps else {})
        for key, given in lengths.items():
            name = "total_steps" if key == "total" else key
            require(state.get(key, given) == given, f"it was saved with {name}={state.get(key)}, attach has {given}.")
        restore_state(pruner, state, same_weights=True)
    except PomonaError as error:
        reason = str(error).removesuffix(".")
        raise PomonaError(
            f"the optimizer was loaded with a pruner's state that does not fit ({reason}): attach the pruner as it "
            "was when the state was saved, or begin a new run with attach(…, resume=False)."
        ) from error
    if total_steps is not None and pruner.step >= total_steps:
        warnings.warn(
            f"the optimizer was loaded with the state of a pruner at step {pruner.step} of {pruner.total}, for which "
            "only finish() is left: to begin a new run, use attach(…, resume=False).",
            stacklevel=4,
        )


def warn_waiting(optimizers: Sequence[Optimizer]) -> None:
    """Warn of states that still wait when training begins."""
    for waiting in list_waiting(optimizers):
        names = ", ".join(waiting.names)
        warnings.warn(
            f"the optimizer was loaded with the state of a pruner of {names}, and no pruner has taken it: attach one, "
            f"or drop the state with optimizer.param_groups[0].pop('{waiting.key}').",
            stacklevel=2,
        )
