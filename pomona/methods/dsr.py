"""Dynamic sparse reparameterization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..allocation import least_count
from ..core.method import Masks, Targets, TrainingProgress, method
from ..core.targets import DENSE
from ..errors import PomonaError, require
from ..scores import random_scores
from ._drop_grow import DropGrow, divide_growth, drop_lowest, grow_highest, unit_sizes

DOUBLE_INTERVAL_AT = (1 / 8, 2 / 5, 7 / 10)  # shares of training: epochs 25, 80 and 140 of the authors' 200


@method("dsr", paper="Mostafa & Wang, ICML 2019", weights="hard")
@dataclass(frozen=True, kw_only=True)
class DSR(DropGrow):
    """Weights below one threshold for all layers are dropped, and as many grow at random where most are left.

    The threshold follows the number of weights that should move: halved above 1.1 times that, doubled below 0.9.
    """

    left_dense: ClassVar[frozenset[str]] = DENSE | {"first", "downsample"}
    memory_keys: ClassVar[tuple[str, ...]] = ("kept", "threshold")

    every: int = 100  # steps between updates at first; the interval doubles during training (DOUBLE_INTERVAL_AT)
    churn: float = 0.0137  # the share of all weights that an update drops: the authors' N_p = 20,000 of WideResNet-28-2
    threshold: float = 1e-3  # H, the magnitude below which weights are dropped, at the start; it adapts
    until: float = 0.95  # share of training after which the masks are fixed
    allocation: str = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.every >= 1, f"every counts steps between updates and must be ≥ 1, got {self.every}.")
        require(0 < self.churn < 1, f"churn is a share of all weights in (0, 1), got {self.churn}.")
        require(self.threshold > 0, f"threshold must be above 0, got {self.threshold}.")
        self.require_free_layers()

    def is_update_due(self, progress: TrainingProgress) -> bool:
        doublings = sum(progress.step >= share * progress.total for share in DOUBLE_INTERVAL_AT)
        return 0 < progress.step < self.until * progress.total and progress.is_multiple_of(self.every * 2**doublings)

    def initial_masks(self, targets: Targets, sparsity: float) -> Masks:
        masks = super().initial_masks(targets, sparsity)
        for name, mask in masks.items():
            if not bool(mask.any()):
                raise PomonaError(
                    f"at a sparsity of {sparsity:.2%} {name} ({mask.numel()} weights) would start with none, and dsr "
                    "grows only where some are left: lower the sparsity, or leave the layer out."
                )
        targets.memory.update(kept=sum(int(m.count_nonzero()) for m in masks.values()), threshold=self.threshold)
        return masks

    def update(self, targets: Targets, sparsity: float) -> Masks:
        memory, threshold = targets.memory, targets.memory["threshold"]
        sizes = unit_sizes(self.pattern, targets.masks)
        free = {name: mask.numel() - int(mask.count_nonzero()) for name, mask in targets.masks.items()}
        weak = {name: self.count_weak(targets.latent[name], mask, threshold) for name, mask in targets.masks.items()}
        # No more can move than there is room for.
        count = min(sum(weak.values()), sum(free.values()))
        drops = divide_growth(count, {name: float(n) for name, n in weak.items()}, weak)
        kept = {
            name: drop_lowest(self.pattern, targets.latent[name].abs(), mask, drops[name])
            for name, mask in targets.masks.items()
        }
        active = {name: int(mask.count_nonzero()) for name, mask in kept.items()}
        moved = memory["kept"] - sum(active.values())
        goal = self.churn * sum(mask.numel() for mask in kept.values())
        memory["threshold"] = threshold * (0.5 if moved > 1.1 * goal else 2.0 if moved < 0.9 * goal else 1.0)
        growth = divide_growth(moved, {name: float(n) for name, n in active.items()}, free, sizes, active)
        draws = random_scores(targets.latent, seed=self.seed + 1 + targets.progress.step)
        return {
            n: grow_highest(self.pattern, draws[n].masked_fill(targets.masks[n] & ~m, -1.0), m, active[n] + growth[n])
            for n, m in kept.items()
        }

    def count_weak(self, weight: Tensor, mask: Tensor, threshold: float) -> int:
        """Return how many active weights lie under the threshold; at least one unit is left."""
        removable = int(mask.count_nonzero()) - max(least_count(mask.shape, self.pattern), 1)
        return max(min(int((mask & (weight.abs() < threshold)).sum()), removable), 0)
