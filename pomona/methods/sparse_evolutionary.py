"""Sparse evolutionary training."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..core.method import Masks, Method, Targets, Time, check_every, method
from ..errors import require
from ..schedules import Constant, Schedule
from ..scores import random_scores
from . import _drop_grow as evolve


@method("set", paper="Mocanu et al., Nature Communications 2018", weights="hard")
@dataclass(frozen=True, kw_only=True)
class SET(Method):
    """A random sparse network; each epoch every layer drops its weakest weights and grows as many at random.

    Erdős–Rényi layers, here by their density rather than the paper's ε.
    """

    share: float = 0.3  # ζ: the part of a layer's weights that is replaced
    every: int | None = None  # steps between updates; None is an epoch
    seed: int = 0
    allocation: str = "erk"
    schedule: Schedule = field(default=Constant(), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_every(self.every)
        evolve.refuse_filters(self.pattern, self.name)
        require(0 < self.share < 1, f"share is the part of a layer that is replaced, in (0, 1), got {self.share}.")

    def due(self, time: Time) -> bool:
        return 0 < time.step < time.total and time.each(self.every)

    def start(self, targets: Targets, sparsity: float) -> Masks:
        return self.select(random_scores(targets.latent, self.seed), sparsity)

    def update(self, targets: Targets, sparsity: float) -> Masks:
        return {name: self.rewire(name, targets) for name in targets.latent}

    def rewire(self, name: str, targets: Targets) -> Tensor:
        """One layer's new mask: what is dropped may be drawn again, and then starts from zero."""
        mask = targets.masks[name]
        kept = self.drop(targets.latent[name], mask, targets.time)
        new = evolve.grow(self.pattern, self.growth(name, targets), kept, int(mask.sum()))
        targets.fresh[name] = new & ~kept
        return new

    def drop(self, weight: Tensor, mask: Tensor, time: Time) -> Tensor:
        """Without ζ of the smallest positive and of the largest negative weights, and those that never left zero."""
        if self.pattern.ranks_units:
            return evolve.drop(self.pattern, weight.abs(), mask, evolve.part(self.share, int(mask.sum())))
        kept = mask & (weight != 0)
        for sign in (mask & (weight > 0), mask & (weight < 0)):
            kept &= ~sign | evolve.drop(self.pattern, weight.abs(), sign, evolve.part(self.share, int(sign.sum())))
        return kept

    def growth(self, name: str, targets: Targets) -> Tensor:
        """The score by which free entries are taken."""
        # A stream of its own for each layer and update, so that a resumed run draws the same.
        index = list(targets.latent).index(name)
        return random_scores({name: targets.latent[name]}, self.seed + 1_000_003 * targets.time.step + index)[name]
