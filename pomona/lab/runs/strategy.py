"""Training strategies: what differs between a plain run and a private one.

`TrainingStrategy` is that of a plain run. `private.PrivateStrategy` replaces its methods. A run calls its strategy at
fixed points and records nothing except through a recorder, which has the strategy's allowed outputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from pomona import models
from pomona.errors import require

from ..recipes.recipe import Recipe
from ..recipes.stored_text import is_whole
from . import loops
from .folder import RECIPE_FILE, read_finished_run, require_same_recipe
from .recorder import AllowedOutputs
from .stages import Stage, make_stages

if TYPE_CHECKING:
    from .run import Run


class TrainingStrategy:
    """How a plain run is trained: as its recipe says, with every output recorded. A strategy belongs to one run."""

    allowed_outputs: AllowedOutputs | None = None  # None allows everything
    # Whether checkpoints hold a key that every step needs: only their owner can read them, and one is written before
    # the first step.
    has_secret_checkpoints = False

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    # ---- before training

    def fingerprint(self) -> str:
        """Return the hash of the settings that decide the result."""
        return self.recipe.fingerprint()

    def recipe_toml(self) -> str:
        """Return the text of the run's recipe.toml."""
        return self.recipe.to_toml()

    def require_same_recipe(self, folder: Path) -> None:
        """Raise PomonaError unless the run in a folder was started with the settings of this one."""
        require_same_recipe(self.recipe, Recipe.load_stored(folder / RECIPE_FILE), folder)

    def read_finished_run(self, folder: Path) -> dict[str, Any] | None:
        """Return the summary of this run in a folder; None unless it is complete, with its recipe."""
        whole = is_whole(folder / RECIPE_FILE)
        return read_finished_run(folder, self.recipe, self.fingerprint()) if whole else None

    def validate_run(self, run: Run) -> None:
        """Raise PomonaError unless the run's data and model can be trained this way. Nothing is written before."""

    def make_stages(self, model: nn.Module) -> list[Stage]:
        """Return the stages of the run in their order."""
        return make_stages(self.recipe, model)

    def describe(self, run: Run) -> dict[str, Any]:
        """Return what a run at its first stage would do, as plain values."""
        cost = models.summary(run.model, run.data.input_shape)
        pruned = {} if run.pruner is None else {name: mask.numel() for name, mask in run.pruner.masks().items()}
        return {
            "fingerprint": self.fingerprint(),
            "device": str(run.device),
            "data": run.data.describe(),
            "model": run.model_options,
            "params": cost.params,
            "macs": cost.macs,
            "pruned": pruned,
            "stages": {stage.name: stage.epochs for stage in run.stages},
            "steps_per_epoch": run.steps_per_epoch,
            "steps": run.total_steps,
        }

    # ---- during training

    def make_loop(self, run: Run, kind: str) -> loops.Loop:
        """Return the loop that takes the steps of a stage, of a kind that `loops.choose_loop` returned."""
        return loops.make_loop(run, kind)

    def evaluated_model(self, model: nn.Module) -> nn.Module:
        """Return the model that is evaluated in place of the trained one."""
        return model

    def end_stage(self, run: Run) -> None:
        """Change the trained model before the last evaluation of a stage."""

    # ---- results

    def epoch_fields(self) -> dict[str, Any]:
        """Return additional fields of an epoch's row."""
        return {}

    def stage_fields(self) -> dict[str, Any]:
        """Return additional fields of a stage's result."""
        return {}

    def finish(self, run: Run) -> None:
        """Do what is left after the summary is written."""

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return keys of a checkpoint's state that are added to those of the run, or replace them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned from the state of a checkpoint; raise PomonaError if it is of another."""
        require(
            "private" not in state,
            "the checkpoint is of a private run, which goes on within its budget only: resume it with "
            "`pomona private RECIPE --resume`.",
        )


def as_strategy(recipe: Recipe | TrainingStrategy) -> TrainingStrategy:
    """Return a training strategy as it is, and for a recipe that of a plain run."""
    return recipe if isinstance(recipe, TrainingStrategy) else TrainingStrategy(recipe)
