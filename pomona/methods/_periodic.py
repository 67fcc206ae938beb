"""The base of methods that update their masks every few steps until the masks are fixed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.method import Method, TrainingProgress, validate_every

LONGEST_INTERVAL = 16  # steps between mask updates: the DPF paper's p
UPDATES = 100  # mask updates that a shorter training is given instead


def default_interval(total_steps: int) -> int:
    """Return the steps between mask updates, where none are given, in a training of this length."""
    return max(1, min(LONGEST_INTERVAL, total_steps // UPDATES))


@dataclass(frozen=True, kw_only=True)
class Periodic(Method):
    """A mask update every `every` steps; the last one asks for the final sparsity."""

    every: int | None = None  # steps between mask updates; None is 16, or a hundredth of a training below 1,600 steps

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_every(self.every)

    @property
    def fixed_from(self) -> float:
        """The share of training after which the masks do not change any more."""
        return 1.0

    def interval(self, progress: TrainingProgress) -> int:
        return default_interval(progress.total) if self.every is None else self.every

    def resolved_options(self, total_steps: int) -> dict[str, Any]:
        return super().resolved_options(total_steps) | {"every": self.interval(TrainingProgress(0, total_steps))}

    def is_update_due(self, progress: TrainingProgress) -> bool:
        return progress.is_multiple_of(self.interval(progress)) and progress.step <= self.fixed_from * progress.total

    def is_last_update(self, progress: TrainingProgress) -> bool:
        return progress.step + self.interval(progress) > self.fixed_from * progress.total

    def scheduled_sparsity(self, progress: TrainingProgress) -> float:
        return self.final_sparsity if self.is_last_update(progress) else super().scheduled_sparsity(progress)
