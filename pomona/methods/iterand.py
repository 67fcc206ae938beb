"""IteRand: edge-popup whose pruned weights are drawn again at intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core.fused import random_stream
from ..core.method import TrainingProgress, method
from ..errors import require
from .edge_popup import EdgePopup


@method("iterand", paper="Chijiwa et al., NeurIPS 2021", weights="score")
@dataclass(frozen=True, kw_only=True)
class IteRand(EdgePopup):
    """Edge-popup with iterative randomization, Algorithm 3: a pruned weight gets another chance.

    Before each K_per-th forward a share r of the pruned weights is drawn again (equation 3); their scores and
    momentum stay. At r = 0 it is edge-popup.
    """

    every_counts: ClassVar[str] = "K_per, between re-draws"

    every: int = 300  # K_per: steps between re-draws
    rate: float = 0.1  # r: the share of pruned weights that is drawn again

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 <= self.rate <= 1,
            f"rate is r, the share of pruned weights that is drawn again, in [0, 1], got {self.rate:g}.",
        )

    @property
    def redraw_limit(self) -> int:
        return random_stream.redraw_limit(self.rate)

    def redraw_number(self, progress: TrainingProgress) -> int:
        due = self.redraw_limit and progress.step < progress.total and progress.next.is_multiple_of(self.every)
        return progress.next.step // self.every if due else 0
