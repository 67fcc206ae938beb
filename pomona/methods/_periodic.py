"""The base of methods that update their masks every few steps until the masks are fixed."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.method import Method, TrainingProgress, validate_every


@dataclass(frozen=True, kw_only=True)
class Periodic(Method):
    """A mask update every `every` steps; the last one asks for the final sparsity."""

    every: int = 16  # steps between mask updates

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_every(self.every)

    @property
    def fixed_from(self) -> float:
        """The share of training after which the masks do not change any more."""
        return 1.0

    def is_update_due(self, progress: TrainingProgress) -> bool:
        return progress.is_multiple_of(self.every) and progress.step <= self.fixed_from * progress.total

    def is_last_update(self, progress: TrainingProgress) -> bool:
        return progress.step + self.every > self.fixed_from * progress.total

    def scheduled_sparsity(self, progress: TrainingProgress) -> float:
        return self.final_sparsity if self.is_last_update(progress) else super().scheduled_sparsity(progress)
