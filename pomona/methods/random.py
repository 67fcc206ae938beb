"""Random pruning, the floor that any method must be above."""

from __future__ import annotations

from dataclasses import dataclass, field

from .. import scores
from ..core.method import Masks, Method, Targets, Time, method
from ..schedules import Constant, Schedule


@method("random", paper="the baseline of all", weights="hard")
@dataclass(frozen=True, kw_only=True)
class Random(Method):
    """A mask drawn at random at `attach` and kept: the weights that are left are trained."""

    seed: int = 0
    schedule: Schedule = field(default=Constant(), init=False)

    @property
    def timed(self) -> bool:
        return False

    def due(self, time: Time) -> bool:
        return time.step == 0

    def update(self, targets: Targets, sparsity: float) -> Masks:
        return self.select(scores.random(targets.latent, self.seed), sparsity)
