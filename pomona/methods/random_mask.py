"""Random pruning, the baseline of all methods."""

from __future__ import annotations

from dataclasses import dataclass

from .. import scores
from ..core.method import Masks, Targets, method
from ._single_update import SingleUpdate


@method("random", paper="the baseline of all", weights="hard")
@dataclass(frozen=True, kw_only=True)
class Random(SingleUpdate):
    """A mask drawn at random at `attach` and kept; the weights that are left are trained."""

    seed: int = 0  # of the random mask

    def update(self, targets: Targets, sparsity: float) -> Masks:
        return self.select(targets, scores.random_scores(targets.latent, self.seed), sparsity)
