"""Gradual pruning."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.method import Masks, Targets, Time, method
from ..scores import exclude_pruned, magnitude
from ._periodic import Periodic


@method("incremental", paper="Zhu & Gupta, 2017", weights="hard")
@dataclass(frozen=True, kw_only=True)
class Incremental(Periodic):
    """Gradual magnitude pruning: the sparsity rises along a schedule, and what is pruned stays pruned."""

    every: int = 16  # steps between mask updates; the authors take 100 to 1000 of much longer training

    def due(self, time: Time) -> bool:
        """Until the update that reaches the final sparsity."""
        before = Time(max(time.step - self.every, 0), time.total, time.steps_per_epoch)
        return super().due(time) and (time.step == 0 or self.asked(before) < self.target)

    def update(self, targets: Targets, sparsity: float) -> Masks:
        masks = self.select(exclude_pruned(magnitude(targets.latent), targets.masks), sparsity)
        # Units of several sizes can come nearest to the count with a pruned one among them.
        return {name: mask & targets.masks[name] for name, mask in masks.items()}
