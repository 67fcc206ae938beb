"""Gradual magnitude pruning."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..core.method import Masks, Targets, TrainingProgress, method
from ._periodic import Periodic


@method("incremental", paper="Zhu & Gupta, 2017", weights="hard")
@dataclass(frozen=True, kw_only=True)
class Incremental(Periodic):
    """Gradual magnitude pruning: the sparsity rises along a schedule, and what is pruned stays pruned."""

    every: int = 16  # steps between mask updates; the authors take 100 to 1000 of much longer training

    def is_update_due(self, progress: TrainingProgress) -> bool:
        """Return whether an update is due; the last one is the one that reaches the final sparsity."""
        before = replace(progress, step=max(progress.step - self.interval(progress), 0))
        reached = progress.step > 0 and self.scheduled_sparsity(before) >= self.final_sparsity
        return super().is_update_due(progress) and not reached

    def update(self, targets: Targets, sparsity: float) -> Masks:
        return self.select_magnitudes(targets, sparsity)
