"""One-shot pruning."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.method import Masks, Targets, Time, method
from ..errors import require
from ..scores import magnitude
from ._single_update import Single


@method("oneshot", paper="Han et al., NeurIPS 2015", weights="hard")
@dataclass(frozen=True, kw_only=True)
class OneShot(Single):
    """Cut the smallest weights once; the training that follows is the fine-tuning, with the mask fixed.

    On a trained model the cut is made at `attach`. With `at` it comes after that share of training,
    which is dense until then; at 1, after the last step, nothing is fine-tuned.
    """

    at: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.at <= 1, f"at is a share of training in [0, 1], got {self.at}.")

    @property
    def timed(self) -> bool:
        return self.at > 0

    def due(self, time: Time) -> bool:
        return time.step == round(self.at * time.total)

    def update(self, targets: Targets, sparsity: float) -> Masks:
        return self.select(magnitude(targets.latent), sparsity)
