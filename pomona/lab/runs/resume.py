"""The state of a run in its checkpoints: collecting it, and continuing from it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from pomona.core.carried_state import without_states
from pomona.errors import require, shorten
from pomona.methods._mask_holder import MaskHolder
from pomona.untrusted import reading

from ..recipes.recipe import Recipe
from .folder import require_same_recipe, require_same_tensors

if TYPE_CHECKING:
    from .run import Run

# The options of a torch optimizer that say how a step is computed, not which step it is.
EXECUTION_OPTIONS = ("foreach", "fused", "capturable")
LARGEST_FILE = 2**63 - 1  # bytes that a file can have


def collect_state(run: Run) -> dict[str, Any]:
    """Return everything that a resumed run needs, without the state of its strategy.

    The pruner's state is part of the optimizer's.
    """
    return {
        "recipe": run.recipe.to_dict(),
        "stage": run.stage_index,
        "results": run.stage_results,
        "rewind": run.rewind_weights,
        "step": run.step,
        "loss": run.loss_sum,
        "updates": run.updates_written,
        "seconds": run.elapsed_seconds,
        "metrics": run.recorder.sync_metrics(),
        "model": run.model.state_dict(),
        "optimizer": optimizer_state(run),
        "mean": run.average.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state(run.device) if run.device.type == "cuda" else None,
    }


def optimizer_state(run: Run) -> dict[str, Any]:
    """Return the state of the optimizer with its learning rate as a number, whichever loop set it.

    A captured loop keeps the rate as a tensor. The rate itself is a function of the step. The pruner's state is stored
    once, beside the parameter groups: a run attaches its pruner before it loads.
    """
    state = run.optimizer.state_dict()
    rate = run.rate(run.step - run.stage_start)
    return state | {"param_groups": [without_states(group) | {"lr": rate} for group in state["param_groups"]]}


def restore_state(run: Run, state: dict[str, Any]) -> None:
    """Continue a run from the state of a checkpoint; raise PomonaError if it is of another model or recipe."""
    with reading(f"the checkpoint in '{run.folder}'", "start the run again in another folder"):
        _restore_state(run, state)


def _restore_state(run: Run, state: dict[str, Any]) -> None:
    """Continue a run from a state that may still be anything."""
    validate_state(run, state)
    require_same_tensors(state["model"], run.model.state_dict(), run.folder)
    require_same_recipe(run.recipe, Recipe.load_stored(state["recipe"]), run.folder)
    run.begin_stage(state["stage"], resumed=True)
    run.model.load_state_dict(state["model"])
    _load_optimizer(run.optimizer, state["optimizer"])
    run.average.load_state_dict(state.get("mean", run.average.state_dict()))  # the first version had no average
    run.stage_results, run.saved_rewind_weights = state["results"], state["rewind"]
    if isinstance(run.pruner, MaskHolder) and state["rewind"]:
        run.pruner.snapshot = state["rewind"]
    run.step, run.loss_sum, run.updates_written = state["step"], state["loss"], state["updates"]
    run.saved_step = run.step
    run.previous_seconds, run.metrics_size = state["seconds"], state["metrics"]
    _restore_random_state(run, state)
    run.strategy.load_state_dict(state)


def validate_state(run: Run, state: dict[str, Any]) -> None:
    """Raise PomonaError unless the numbers of a state are possible for a run."""
    valid = {
        "stage": type(state["stage"]) is int and 0 <= state["stage"] < len(run.stages),
        "step": type(state["step"]) is int and 0 <= state["step"] <= run.total_steps,
        "loss": type(state["loss"]) in (int, float) or isinstance(state["loss"], torch.Tensor),
        "updates": type(state["updates"]) is int and state["updates"] >= 0,
        "seconds": type(state["seconds"]) in (int, float) and 0 <= state["seconds"] < math.inf,
        "metrics": type(state["metrics"]) is int and 0 <= state["metrics"] <= LARGEST_FILE,
        "results": isinstance(state["results"], list) and all(isinstance(one, dict) for one in state["results"]),
        "rewind": is_state(state["rewind"]),
        "model": is_state(state["model"]),
    }
    wrong = [f"{key} = {shorten(state[key])}" for key, is_valid in valid.items() if not is_valid]
    require(not wrong, f"the checkpoint in '{run.folder}' is damaged: it has {', '.join(wrong[:3])}.")


def is_state(value: Any) -> bool:
    """Return whether a value has tensors by name, as the state dict of a model."""
    return isinstance(value, dict) and all(isinstance(one, torch.Tensor) for one in value.values())


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state into an optimizer, but keep the execution options of this loop: the checkpoint's may differ."""
    kept = [{key: group[key] for key in EXECUTION_OPTIONS if key in group} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, options in zip(optimizer.param_groups, kept, strict=True):
        group.update(options)


def _restore_random_state(run: Run, state: dict[str, Any]) -> None:
    """Continue the random generators of the first process; the others are seeded again for this step."""
    if run.processes.is_first:
        torch.set_rng_state(state["random"])
        if run.device.type == "cuda" and state["random_cuda"] is not None:
            torch.cuda.set_rng_state(state["random_cuda"], run.device)
    else:
        torch.manual_seed(run.recipe.seed + run.step + run.processes.rank)
