"""AC/DC: compressed and decompressed phases in turn."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..core.method import Masks, Targets, TrainingProgress, method
from ..errors import require
from ._bounded_growth import BoundedGrowth
from ._drop_grow import Regrowing


@method("acdc", paper="Peste et al., NeurIPS 2021", weights="hard")
@dataclass(frozen=True, kw_only=True)
class ACDC(Regrowing, BoundedGrowth):
    """Prune by magnitude, release all weights, and so on in turn; released weights start at zero, without momentum.

    The bound on the gradients of outputs with almost no weights is not in the paper; `feedback=None` leaves it out.
    """

    start: float = 0.05  # share of training, dense, before the first compressed phase
    phase: float = 0.1  # length of a compressed or dense phase, as a share of training
    until: float = 0.85  # share of training after which the masks are fixed

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = 0 <= self.start <= self.until <= 1 and self.phase > 0
        require(fits, f"0 ≤ start ≤ until ≤ 1 and phase > 0 are needed, got {self.start}, {self.until}, {self.phase}.")

    def scheduled_sparsity(self, progress: TrainingProgress) -> float:
        share = progress.step / progress.total
        dense_phase = int((share - self.start) / self.phase + 1e-9) % 2 == 1
        return 0.0 if share < self.start or (share < self.until and dense_phase) else self.final_sparsity

    def is_update_due(self, progress: TrainingProgress) -> bool:
        before = replace(progress, step=progress.step - 1)
        return self.scheduled_sparsity(before) != self.scheduled_sparsity(progress)

    def update(self, targets: Targets, sparsity: float) -> Masks:
        return self.select_magnitudes(targets, sparsity)
