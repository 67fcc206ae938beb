"""Sparse evolutionary training (SET)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core.method import Masks, Targets, TrainingProgress, method, validate_every
from ..errors import require
from ..scores import random_scores
from ._drop_grow import DropGrow, drop_lowest, floor_share, grow_highest


@method("set", paper="Mocanu et al., Nature Communications 2018", weights="hard")
@dataclass(frozen=True, kw_only=True)
class SET(DropGrow):
    """A random sparse network in which every layer drops its weakest weights each epoch and grows as many at random.

    Layers are Erdős–Rényi graphs, given here by their density rather than by the paper's ε.
    """

    restarts_at_zero: ClassVar[bool] = True  # whether a dropped weight that grows again loses its value

    share: float = 0.3  # ζ: the part of a layer's weights that is replaced
    every: int | None = None  # steps between updates; None is an epoch
    allocation: str = "erk"

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_every(self.every)
        require(0 < self.share < 1, f"share is the part of a layer that is replaced, in (0, 1), got {self.share}.")

    def is_update_due(self, progress: TrainingProgress) -> bool:
        return 0 < progress.step < progress.total and progress.is_multiple_of(self.every)

    def update(self, targets: Targets, sparsity: float) -> Masks:
        return {name: self.rewire(name, targets) for name in targets.latent}

    def rewire(self, name: str, targets: Targets) -> Tensor:
        """Return one layer's new mask; a dropped weight may grow again."""
        mask = targets.masks[name]
        kept = self.drop(targets.latent[name], mask, targets.progress)
        grown = grow_highest(self.pattern, self.growth_score(name, targets), kept, int(mask.count_nonzero()))
        if self.restarts_at_zero:
            targets.reset[name] = grown & ~kept
        return grown

    def drop(self, weight: Tensor, mask: Tensor, progress: TrainingProgress) -> Tensor:
        """Return the mask without ζ of the smallest positive and of the largest negative weights, and without zeros."""
        if self.pattern.ranks_units:
            count = floor_share(self.share, int(mask.count_nonzero()))
            return drop_lowest(self.pattern, weight.abs(), mask, count)
        kept = mask & (weight != 0)
        for sign in (mask & (weight > 0), mask & (weight < 0)):
            count = floor_share(self.share, int(sign.count_nonzero()))
            kept &= ~sign | drop_lowest(self.pattern, weight.abs(), sign, count)
        return kept

    def growth_score(self, name: str, targets: Targets) -> Tensor:
        """Return the score by which free entries grow: random."""
        # Each layer and update has its own seed, so that a resumed run draws the same.
        index = list(targets.latent).index(name)
        return random_scores({name: targets.latent[name]}, self.seed + 1_000_003 * targets.progress.step + index)[name]
