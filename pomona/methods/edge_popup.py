"""Edge-popup: find a subnetwork of random weights without training a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..core.fused.random_stream import RandomStream
from ..core.method import Masks, Targets, TrainingProgress, method
from ..core.score_method import ScoreMethod
from ..core.targets import DENSE
from ..errors import require
from ..schedules import Constant, Schedule


@method("edge_popup", paper="Ramanujan et al., CVPR 2020", weights="score")
@dataclass(frozen=True, kw_only=True)
class EdgePopup(ScoreMethod):
    """Weights are drawn once and never trained: the optimizer moves a score for each, and the highest are kept.

    The mask is selected at every step from the signed scores, with the same share in every layer. Biases stay as
    they are; norms must have no gain and shift. The model's own weights are replaced at `attach`. There is no need to
    freeze them, and a frozen one is refused: its gradient trains the score.
    """

    left_dense: ClassVar[frozenset[str]] = DENSE - {"classifier", "frozen"}
    default_sparsity: ClassVar[float] = 0.5
    every_counts: ClassVar[str] = "between two entries of the history"  # what `every` means, for its error message

    distribution: str = "sc"  # D_param: signed constants ±√(2/fan_in), or "ku", uniform within ±√(6/fan_in)
    every: int = 300  # steps between two entries of the history
    allocation: str = "uniform"
    schedule: Schedule = Constant()
    seed: int = 0  # of the random weights and the initial scores

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.final_sparsity < 1, f"sparsity is p, the pruned fraction in (0, 1), got {self.sparsity:g}.")
        require(self.every >= 1, f"every counts steps ({self.every_counts}) and must be ≥ 1, got {self.every}.")
        RandomStream(self.seed, self.distribution)  # refuses what it cannot draw

    @property
    def stream(self) -> RandomStream:
        return RandomStream(self.seed, self.distribution)

    def is_update_due(self, progress: TrainingProgress) -> bool:
        return progress.step == 0 or progress.next.is_multiple_of(self.every)

    def update(self, targets: Targets, sparsity: float) -> Masks:
        scores = dict(targets.latent)
        if self.pattern.ranks_units:  # units are ranked by a norm, which needs scores of one sign
            lowest = torch.stack([score.amin() for score in scores.values()]).amin()
            scores = {name: score - lowest for name, score in scores.items()}
        return self.select(targets, scores, sparsity)
