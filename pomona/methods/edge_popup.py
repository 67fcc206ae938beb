"""Edge-popup: never train a weight, find the subnetwork."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..core.fused.random_stream import Stream
from ..core.method import Masks, Method, Targets, Time, method
from ..core.targets import DENSE
from ..errors import require
from ..schedules import Constant, Schedule


@method("edge_popup", paper="Ramanujan et al., CVPR 2020", weights="score")
@dataclass(frozen=True, kw_only=True)
class EdgePopup(Method):
    """Weights are drawn once and never trained: the optimizer moves a score for each, and the highest are kept.

    The mask is taken anew at every step, in every layer the same share of it, from the signed scores. Biases stay
    as they are; norms must have no gain and shift. The model's own weights are replaced at `attach`.
    """

    dense: ClassVar[frozenset[str]] = DENSE - {"classifier"}
    usual: ClassVar[float] = 0.5
    counts: ClassVar[str] = "between two records of the mask"

    distribution: str = "sc"  # D_param: signed constants ±√(2/fan_in), or "ku", uniform within ±√(6/fan_in)
    every: int = 300  # steps between two records of the mask in the history
    allocation: str = "uniform"
    schedule: Schedule = Constant()
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.target < 1, f"sparsity is p, the pruned fraction in (0, 1), got {self.target:g}.")
        require(self.every >= 1, f"every counts steps ({self.counts}) and must be ≥ 1, got {self.every}.")
        Stream(self.seed, self.distribution)  # refuses what it cannot draw

    @property
    def stream(self) -> Stream:
        return Stream(self.seed, self.distribution)

    def due(self, time: Time) -> bool:
        return time.step == 0 or time.next.each(self.every)

    def update(self, targets: Targets, sparsity: float) -> Masks:
        scores = dict(targets.latent)
        if self.pattern.ranks_units:  # ranks units by a norm, which wants scores of one sign
            lowest = torch.stack([score.amin() for score in scores.values()]).amin()
            scores = {name: score - lowest for name, score in scores.items()}
        return self.select(scores, sparsity)
