"""Rigging the lottery."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core.method import Targets, Time, method
from ..core.targets import DENSE
from ..errors import require
from . import _drop_grow as evolve
from .sparse_evolutionary import SET


@method("rigl", paper="Evci et al., ICML 2020", weights="hard")
@dataclass(frozen=True, kw_only=True)
class RigL(SET):
    """SET that grows where the dense gradient is largest, drops less and less, and does so in place of a step."""

    dense: ClassVar[frozenset[str]] = DENSE - {"classifier"} | {"first"}
    before: ClassVar[bool] = True

    every: int | None = 100  # ΔT
    until: float = 0.75  # T_end, as a share of training
    allocation: str = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.until <= 1, f"until is a share of training in (0, 1], got {self.until}.")

    def due(self, time: Time) -> bool:
        return super().due(time) and time.step < self.until * time.total

    def drop(self, weight: Tensor, mask: Tensor, time: Time) -> Tensor:
        share = self.share / 2 * (1 + math.cos(math.pi * time.step / (self.until * time.total)))
        return evolve.drop(self.pattern, weight.abs(), mask, evolve.part(share, int(mask.sum())))

    def growth(self, name: str, targets: Targets) -> Tensor:
        return targets.grads[name].abs()

    def rewire(self, name: str, targets: Targets) -> Tensor:
        """As SET, but what was dropped and is taken again keeps its value; truly new weights are zero already."""
        mask = targets.masks[name]
        kept = self.drop(targets.latent[name], mask, targets.time)
        return evolve.grow(self.pattern, self.growth(name, targets), kept, int(mask.sum()))
