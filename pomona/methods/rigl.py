"""Rigging the lottery (RigL)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core.method import Targets, TrainingProgress, method
from ..core.targets import DENSE
from ..errors import require
from ._drop_grow import drop_lowest, floor_share
from .sparse_evolutionary import SET


@method("rigl", paper="Evci et al., ICML 2020", weights="hard")
@dataclass(frozen=True, kw_only=True)
class RigL(SET):
    """SET that grows where the dense gradient is largest and drops less and less; an update replaces a step."""

    left_dense: ClassVar[frozenset[str]] = DENSE - {"classifier"} | {"first"}
    updates_before_step: ClassVar[bool] = True
    restarts_at_zero: ClassVar[bool] = False

    every: int | None = 100  # ΔT: steps between updates; None is an epoch
    until: float = 0.75  # T_end: the share of training after which the masks are fixed
    allocation: str = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.until <= 1, f"until is a share of training in (0, 1], got {self.until}.")

    def is_update_due(self, progress: TrainingProgress) -> bool:
        return super().is_update_due(progress) and progress.step < self.until * progress.total

    def drop(self, weight: Tensor, mask: Tensor, progress: TrainingProgress) -> Tensor:
        share = self.share / 2 * (1 + math.cos(math.pi * progress.step / (self.until * progress.total)))
        return drop_lowest(self.pattern, weight.abs(), mask, floor_share(share, int(mask.count_nonzero())))

    def growth_score(self, name: str, targets: Targets) -> Tensor:
        return targets.grads[name].abs()
