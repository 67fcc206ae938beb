"""IteRand: edge-popup whose pruned weights are drawn anew now and then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core.fused.random_stream import threshold
from ..core.method import Time, method
from ..errors import require
from .edge_popup import EdgePopup


@method("iterand", paper="Chijiwa et al., NeurIPS 2021", weights="score")
@dataclass(frozen=True, kw_only=True)
class IteRand(EdgePopup):
    """Edge-popup with iterative randomization, Algorithm 3: a pruned weight gets another chance.

    Before each K_per-th forward a share r of the pruned weights is drawn anew (equation 3); their scores and
    momentum stay. At r = 0 it is edge-popup.
    """

    counts: ClassVar[str] = "K_per, between re-draws"

    every: int = 300  # K_per: steps between re-draws
    rate: float = 0.1  # r: the share of pruned weights that is drawn anew

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.rate <= 1, f"rate is r, the share of pruned weights drawn anew in [0, 1], got {self.rate:g}.")

    @property
    def coin(self) -> int:
        return threshold(self.rate)

    def redraw(self, time: Time) -> int:
        again = self.coin and time.step < time.total and time.next.each(self.every)
        return time.next.step // self.every if again else 0
