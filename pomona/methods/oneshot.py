"""One-shot magnitude pruning."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.method import Masks, Targets, TrainingProgress, method
from ..errors import require
from ._single_update import SingleUpdate


@method("oneshot", paper="Han et al., NeurIPS 2015", weights="hard")
@dataclass(frozen=True, kw_only=True)
class OneShot(SingleUpdate):
    """Prune the smallest weights once; the training that follows fine-tunes the rest, with the mask fixed.

    A trained model is pruned at `attach`. With `at` it is pruned after that share of training, which is dense
    until then; at 1, after the last step, nothing is fine-tuned.
    """

    at: float = 0.0  # the share of training after which the model is pruned; 0 is at `attach`

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.at <= 1, f"at is a share of training in [0, 1], got {self.at}.")

    @property
    def needs_total_steps(self) -> bool:
        return self.at > 0

    def is_update_due(self, progress: TrainingProgress) -> bool:
        return progress.step == round(self.at * progress.total)

    def update(self, targets: Targets, sparsity: float) -> Masks:
        return self.select_magnitudes(targets, sparsity)
