"""The stages of a run: consecutive trainings, each with its own optimizer, learning rate and pruner.

train              the recipe's method
finetune           training with the masks of the stage before, fixed
round 0, 1, …      the rounds of a lottery ticket in place of `train`: each prunes more and starts from early weights
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pomona.core.attachment import find_targets
from pomona.core.method import METHODS, Masks, Method, TrainingProgress
from pomona.core.pruner import Pruner
from pomona.core.targets import Target
from pomona.errors import require
from pomona.methods._mask_holder import MaskHolder
from pomona.methods.finetune import Finetune
from pomona.methods.lottery import Lottery, LotteryRounds

from ..recipes.learning_rates import LearningRate
from ..recipes.optimizers import OptimizerSpec
from ..recipes.options import DENSE
from ..recipes.recipe import Recipe
from . import masks
from .stage_figures import mean_by_epoch

if TYPE_CHECKING:
    from .run import Run


@dataclass(frozen=True)
class Stage:
    """A training without pruning."""

    name: str
    epochs: int
    optimizer: OptimizerSpec
    rate: LearningRate

    def prepare(self, run: Run) -> None:
        """Change the trained model before the stage begins; a resumed stage has already done so."""

    def make_pruner(self, run: Run) -> Pruner | None:
        """Return the pruner of the stage, attached to the run's model and optimizer, or None."""
        return None

    def result_fields(self, run: Run) -> dict[str, Any]:
        """Return the fields of the stage's result besides its last scores: the sparsity of each pruned tensor."""
        return {"layers": masks.layer_sparsities(run.masks or {})}


@dataclass(frozen=True)
class PruningStage(Stage):
    """A training with the recipe's method."""

    method: Method

    def make_pruner(self, run: Run) -> Pruner:
        if isinstance(self.method, Finetune) and run.masks is not None:
            return attach_pruner(make_mask_holder(self.method, run), run)
        time = TrainingProgress(0, run.stage_steps, run.steps_per_epoch)
        needs_gradient = self.method.updates_before_step and self.method.is_update_due(time)  # before the first step
        loss = run.unseen_batch_loss if needs_gradient else None
        return attach_pruner(Pruner(self.method), run, loss=loss, track=run.options.track)

    def result_fields(self, run: Run) -> dict[str, Any]:
        """Return the sparsities and, if tracked, `TRACKED_FIGURES`.

        They are the share of mask entries that never change after epoch 0, 1, 2, …, and for each epoch the means of δ
        and of the IoU of consecutive masks over its updates.
        """
        fields = super().result_fields(run)
        if run.options.track and run.pruner is not None and not isinstance(run.pruner, MaskHolder):
            shares, history = run.pruner.settled(), run.pruner.history
            fields["settled"] = shares + [1.0] * (self.epochs + 1 - len(shares))
            fields |= {key: mean_by_epoch(history, key, run.steps_per_epoch, self.epochs) for key in ("delta", "iou")}
        return fields


@dataclass(frozen=True)
class FinetuneStage(Stage):
    """A training with the masks of the stage before, fixed."""

    method: Method  # the method that found the masks

    def make_pruner(self, run: Run) -> Pruner:
        return attach_pruner(make_mask_holder(self.method, run), run)


@dataclass(frozen=True)
class LotteryStage(Stage):
    """A round of the lottery: prune the weights of the last round, go back to early weights, train."""

    method: Lottery
    index: int
    sparsity: float

    def prepare(self, run: Run) -> None:
        if self.index:
            targets = self.method.targets(run.model)
            kept = LotteryRounds(self.method).prune(targets, masks_outputs_first(targets, run.masks), self.sparsity)
            run.masks = {t.name: kept[t.name].movedim(0, t.output_dim) for t in targets}
            run.model.load_state_dict(run.rewind_weights)

    def make_pruner(self, run: Run) -> Pruner:
        return attach_pruner(make_mask_holder(self.method, run, rewind=None if self.index else self.method.rewind), run)


def make_stages(recipe: Recipe, model: nn.Module) -> list[Stage]:
    """Return the stages of a recipe in their order; those without epochs are left out."""
    first = recipe.train.epochs, recipe.optimizer, recipe.rate
    second = recipe.finetune.epochs, recipe.finetune.optimizer, recipe.finetune.rate
    method = make_method(recipe)
    found: list[Stage]
    if method is None:
        found = [Stage("train", *first), Stage("finetune", *second)]
    elif isinstance(method, Lottery):
        count = sum(target.shape.numel() for target in find_targets(model, method))
        levels = enumerate(method.round_sparsities(count))
        found = [LotteryStage(f"round {k}", *first, method, k, level) for k, level in levels]
        found.append(FinetuneStage("finetune", *second, method))
    else:
        found = [PruningStage("train", *first, method), FinetuneStage("finetune", *second, method)]
    return [stage for stage in found if stage.epochs]


def make_method(recipe: Recipe) -> Method | None:
    """Return the recipe's method, or None for a dense run; the method's seed is added to the run's."""
    if recipe.method["name"] == DENSE:
        return None
    options = dict(recipe.method)
    if "seed" in options:
        options["seed"] += recipe.seed
    return METHODS.resolve(options)


def make_mask_holder(method: Method, run: Run, rewind: int | None = None) -> MaskHolder:
    """Return a pruner that holds the run's masks fixed on what a method prunes.

    The masks of a resumed stage come with its state.
    """
    targets = method.targets(run.model)
    finetune = Finetune(include=tuple(t.name for t in targets), pattern=method.pattern)
    return MaskHolder(finetune, masks_outputs_first(targets, run.masks), rewind)


def masks_outputs_first(targets: Sequence[Target], found: Masks | None) -> Masks:
    """Return masks with the output dimension first, as methods need them; a target without a mask is kept whole."""
    names = {target.name: target.shape for target in targets}
    for name, mask in (found or {}).items():
        require(
            names.get(name) == mask.shape,
            f"there is a mask of {tuple(mask.shape)} for '{name}', which is not a weight whose mask is fixed here.",
        )
    found = found or {}
    return {
        t.name: found[t.name].movedim(t.output_dim, 0)
        if t.name in found
        else torch.ones(t.outputs_first, dtype=torch.bool)
        for t in targets
    }


def attach_pruner(pruner: Pruner, run: Run, **options: Any) -> Pruner:
    """Attach a pruner to the run's model and optimizer for this stage.

    The weights may be those of another run. A run that is resumed loads its state from its checkpoint after this.
    """
    return pruner.attach(run.model, run.optimizer, run.stage_steps, run.steps_per_epoch, resume=False, **options)
