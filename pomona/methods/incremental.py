"""Gradual pruning."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.errors import require
from ..core.method import Masks, Method, Targets, Time, method
from ..scores import among, magnitude


@method("incremental", paper="Zhu & Gupta, 2017", weights="hard")
@dataclass(frozen=True, kw_only=True)
class Incremental(Method):
    """Gradual magnitude pruning: the sparsity rises along a schedule, and what is pruned stays pruned."""

    every: int = 16  # steps between mask updates; the authors take 100 to 1000 of much longer training

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.every >= 1, f"every counts steps between mask updates and must be ≥ 1, got {self.every}.")

    def due(self, time: Time) -> bool:
        """Until the update that reaches the final sparsity."""
        before = self.schedule(max(time.step - self.every, 0), time.total, time.steps_per_epoch)
        return time.each(self.every) and (time.step == 0 or before < 1)

    def update(self, targets: Targets, sparsity: float) -> Masks:
        masks = self.select(among(magnitude(targets.latent), targets.masks), sparsity)
        # Units of several sizes can come nearest to the count with a pruned one among them.
        return {name: mask & targets.masks[name] for name, mask in masks.items()}
