"""The state of a run in its checkpoints: collecting it, and continuing from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pomona.core.carried_state import without_states
from pomona.methods._mask_holder import MaskHolder

from ..recipes.recipe import Recipe
from .folder import require_same_recipe, require_same_tensors

if TYPE_CHECKING:
    from .run import Run

# The options of a torch optimizer that say how a step is computed, not which step it is.
EXECUTION_OPTIONS = ("foreach", "fused", "capturable")


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
