"""The index draws of a private run: how many coordinates each step keeps, and by which mechanism."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from ..schedules import Schedule
from .budget import Budget
from .index_mechanism import IndexMechanism
from .private_options import DENSE_METHODS


@dataclass(frozen=True)
class IndexDraws:
    """The index draws of a run, whose steps are numbered from 0."""

    method: str
    budget: Budget
    keep: float  # the share of coordinates kept at the end of the schedule
    schedule: Schedule
    group: int | None
    grouping: str
    sizes: tuple[int, ...]  # coordinates of each parameter

    def kept_share(self, step: int) -> float:
        """Return the share of coordinates that a step keeps."""
        return 1.0 if self.method in DENSE_METHODS else 1 - (1 - self.keep) * self.schedule(step, self.budget.steps)

    def mechanism(self, step: int) -> IndexMechanism:
        """Return the index mechanism of a step."""
        leaves = self.sizes if self.grouping == "parameter" else None
        make = partial(IndexMechanism, self.kept_share(step), group=self.group, leaves=leaves)
        if self.method == "gip":
            return make(epsilon=self.budget.index_at(step))
        return make(theta=0.0 if self.method == "random" else math.inf)

    def lost(self, step: int) -> float | None:
        """Return E[i] / m, the share of the private top-k that a step is expected to miss; None for public data."""
        return None if self.method == "public" else self.mechanism(step).lost(sum(self.sizes))

    def lost_at_random(self, step: int) -> float:
        """Return the share of the private top-k that a random index set would miss in a step."""
        return replace(self.mechanism(step), theta=0.0, epsilon=None).lost(sum(self.sizes))
