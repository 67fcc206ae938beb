"""The base of methods that select their mask once."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.method import Method, TrainingProgress
from ..schedules import Constant, Schedule


@dataclass(frozen=True, kw_only=True)
class SingleUpdate(Method):
    """One mask update at `attach`, to the final sparsity."""

    schedule: Schedule = field(default=Constant(), init=False)

    @property
    def needs_total_steps(self) -> bool:
        return False

    def is_update_due(self, progress: TrainingProgress) -> bool:
        return progress.step == 0
