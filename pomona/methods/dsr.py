"""Dynamic sparse reparameterization."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from ..core.method import Masks, Method, Targets, Time, method
from ..core.targets import DENSE
from ..errors import PomonaError, require
from ..schedules import Constant, Schedule
from ..scores import random_scores
from . import _drop_grow as evolve


@method("dsr", paper="Mostafa & Wang, ICML 2019", weights="hard")
@dataclass(frozen=True, kw_only=True)
class DSR(Method):
    """Weights below one threshold for all layers go, as many grow at random where most are left.

    The threshold follows the number that should move: halved above 1.1 times that, doubled below 0.9.
    """

    dense: ClassVar[frozenset[str]] = DENSE | {"first", "downsample"}

    every: int = 100  # steps between updates; doubled at 1/8, 2/5 and 7/10 of training
    churn: float = 0.0137  # N_p over all prunable weights: the authors' 20,000 of WideResNet-28-2
    threshold: float = 1e-3  # H at the start
    until: float = 0.95  # share of training after which the masks are at rest
    seed: int = 0
    allocation: str = "uniform"
    schedule: Schedule = field(default=Constant(), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.every >= 1, f"every counts steps between updates and must be ≥ 1, got {self.every}.")
        require(0 < self.churn < 1, f"churn is a share of all weights in (0, 1), got {self.churn}.")
        require(self.threshold > 0, f"threshold must be above 0, got {self.threshold}.")
        evolve.refuse_filters(self.pattern, self.name)
        require(
            self.pattern.sparsity is None,
            f"{self.pattern} fixes every layer's sparsity, and dsr moves weights between layers.",
        )

    def due(self, time: Time) -> bool:
        doublings = sum(time.step >= share * time.total for share in (1 / 8, 2 / 5, 7 / 10))
        return 0 < time.step < self.until * time.total and time.each(self.every * 2**doublings)

    def start(self, targets: Targets, sparsity: float) -> Masks:
        masks = self.select(random_scores(targets.latent, self.seed), sparsity)
        for name, mask in masks.items():
            if not bool(mask.any()):
                raise PomonaError(
                    f"at {sparsity:.2%} {name} ({mask.numel()} weights) would start with none, and dsr grows only "
                    "where some are left: lower the sparsity, or leave the layer out."
                )
        targets.memory.update(kept=sum(int(m.sum()) for m in masks.values()), threshold=self.threshold)
        return masks

    def update(self, targets: Targets, sparsity: float) -> Masks:
        memory, threshold = targets.memory, targets.memory["threshold"]
        quanta = evolve.quanta(self.pattern, targets.masks)
        free = {name: mask.numel() - int(mask.sum()) for name, mask in targets.masks.items()}
        weak = {name: self.weak(targets.latent[name], mask, threshold) for name, mask in targets.masks.items()}
        # No more can move than there is room for.
        count = min(sum(weak.values()), sum(free.values()))
        drops = evolve.share_out(count, {name: float(n) for name, n in weak.items()}, weak)
        kept = {
            name: evolve.drop(self.pattern, targets.latent[name].abs(), mask, drops[name])
            for name, mask in targets.masks.items()
        }
        active = {name: int(mask.sum()) for name, mask in kept.items()}
        moved = memory["kept"] - sum(active.values())
        goal = self.churn * sum(mask.numel() for mask in kept.values())
        memory["threshold"] = threshold * (0.5 if moved > 1.1 * goal else 2.0 if moved < 0.9 * goal else 1.0)
        growth = evolve.share_out(moved, {name: float(n) for name, n in active.items()}, free, quanta, active)
        draws = random_scores(targets.latent, seed=self.seed + 1 + targets.time.step)
        return {
            n: evolve.grow(self.pattern, draws[n].masked_fill(targets.masks[n] & ~m, -1.0), m, active[n] + growth[n])
            for n, m in kept.items()
        }

    def weak(self, weight: Tensor, mask: Tensor, threshold: float) -> int:
        """How many active weights lie under the threshold; one is left in any case."""
        return min(int((mask & (weight.abs() < threshold)).sum()), int(mask.sum()) - 1)
