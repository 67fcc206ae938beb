"""The stages of a run: trainings one after another, each with an optimizer, a rate and a pruner of its own.

train              the recipe's method at work
finetune           the masks that were found, held fixed
round 0, 1, …      of a lottery ticket, in place of `train`: each prunes more, and begins with early weights
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pomona.core.method import METHODS, Masks, Method, TrainingProgress
from pomona.core.pruner import Pruner
from pomona.core.targets import Target
from pomona.errors import require
from pomona.methods._mask_holder import MaskHolder
from pomona.methods.finetune import Finetune
from pomona.methods.lottery import Lottery, LotteryRounds

from ..recipes.optimizers import Optimizer, Rate
from ..recipes.recipe import DENSE, Recipe
from . import masks

if TYPE_CHECKING:
    from .run import Run


@dataclass(frozen=True)
class Stage:
    """One training, with nothing pruned."""

    name: str
    epochs: int
    optimizer: Optimizer
    rate: Rate

    def prepare(self, run: Run) -> None:
        """What is done to the trained model before the stage begins; a resumed stage has it behind it."""

    def pruner(self, run: Run) -> Pruner | None:
        """The stage's pruner, at work on the run's model and optimizer."""
        return None

    def outcome(self, run: Run) -> dict[str, Any]:
        """What the summary tells of the stage besides its last measurements: the sparsity of each tensor."""
        return {"layers": masks.sparsities(run.masks or {})}


@dataclass(frozen=True)
class Pruning(Stage):
    """The recipe's method at work."""

    method: Method

    def pruner(self, run: Run) -> Pruner:
        if isinstance(self.method, Finetune) and run.masks is not None:
            return attach(hold(self.method, run), run)
        looks = self.method.updates_before_step and self.method.is_update_due(
            TrainingProgress(0, run.steps, run.per_epoch)
        )  # at a gradient, first
        loss = run.unseen_loss if looks else None
        return attach(Pruner(self.method), run, loss=loss, track=run.options.track)

    def outcome(self, run: Run) -> dict[str, Any]:
        """And where that was tracked, the share of mask entries that never change after epoch 0, 1, 2, …"""
        found = super().outcome(run)
        if run.options.track and run.pruner is not None and not isinstance(run.pruner, MaskHolder):
            shares = run.pruner.settled()
            found["settled"] = shares + [1.0] * (self.epochs + 1 - len(shares))
        return found


@dataclass(frozen=True)
class Tuning(Stage):
    """Training goes on with the masks that the stage before has left."""

    method: Method  # whose masks they are

    def pruner(self, run: Run) -> Pruner:
        return attach(hold(self.method, run), run)


@dataclass(frozen=True)
class Round(Stage):
    """A round of the lottery: prune what the last one trained, go back to early weights, train."""

    method: Lottery
    index: int
    sparsity: float

    def prepare(self, run: Run) -> None:
        if self.index:
            targets = self.method.targets(run.model)
            kept = LotteryRounds(self.method).prune(targets, outputs_first(targets, run.masks), self.sparsity)
            run.masks = {t.name: kept[t.name].movedim(0, t.output_dim) for t in targets}
            run.model.load_state_dict(run.rewind)

    def pruner(self, run: Run) -> Pruner:
        return attach(hold(self.method, run, rewind=None if self.index else self.method.rewind), run)


def stages(recipe: Recipe, model: nn.Module) -> list[Stage]:
    """What a run of the recipe does, in order."""
    first = recipe.train.epochs, recipe.optimizer, recipe.rate
    second = recipe.finetune.epochs, recipe.finetune.optimizer, recipe.finetune.rate
    method = method_of(recipe)
    found: list[Stage]
    if method is None:
        found = [Stage("train", *first), Stage("finetune", *second)]
    elif isinstance(method, Lottery):
        count = sum(target.shape.numel() for target in method.targets(model))
        require(count > 0, f"{type(model).__name__} has nothing to prune: name layers with include=[…].")
        found = [
            Round(f"round {k}", *first, method, k, level) for k, level in enumerate(method.round_sparsities(count))
        ]
        found.append(Tuning("finetune", *second, method))
    else:
        found = [Pruning("train", *first, method), Tuning("finetune", *second, method)]
    return [stage for stage in found if stage.epochs]


def method_of(recipe: Recipe) -> Method | None:
    """The recipe's method, or None for a dense run; a method's own seed is counted from the run's."""
    if recipe.method["name"] == DENSE:
        return None
    options = dict(recipe.method)
    if "seed" in options:
        options["seed"] += recipe.seed
    return METHODS.resolve(options)


def hold(method: Method, run: Run, rewind: int | None = None) -> MaskHolder:
    """A pruner that holds the run's masks on what a method prunes; where a stage is resumed its state brings them."""
    targets = method.targets(run.model)
    held = Finetune(include=tuple(t.name for t in targets), pattern=method.pattern)
    return MaskHolder(held, outputs_first(targets, run.masks), rewind)


def outputs_first(targets: Sequence[Target], found: Masks | None) -> Masks:
    """Masks as methods see them; what has none is kept whole."""
    names = {target.name: target.shape for target in targets}
    for name, mask in (found or {}).items():
        require(
            names.get(name) == mask.shape,
            f"there is a mask of {tuple(mask.shape)} for '{name}', which is not among what is to be held here.",
        )
    found = found or {}
    return {
        t.name: found[t.name].movedim(t.output_dim, 0)
        if t.name in found
        else torch.ones(t.outputs_first, dtype=torch.bool)
        for t in targets
    }


def attach(pruner: Pruner, run: Run, **options: Any) -> Pruner:
    """Put a pruner to work on the run's model."""
    return pruner.attach(run.model, run.optimizer, run.steps, run.per_epoch, **options)
