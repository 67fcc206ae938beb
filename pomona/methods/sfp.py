"""Soft filter pruning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ..core.method import Masks, Method, Targets, TrainingProgress, method, validate_every
from ..core.targets import DENSE
from ..patterns import Filter, Pattern
from ..schedules import Constant, Schedule


@method("sfp", paper="He et al., IJCAI 2018", weights="free")
@dataclass(frozen=True, kw_only=True)
class SFP(Method):
    """Each epoch the filters of the smallest norm are set to zero in every layer, and training continues with all."""

    left_dense: ClassVar[frozenset[str]] = DENSE | {"linear", "recurrent", "attention"}
    default_sparsity: ClassVar[float] = 0.3

    every: int | None = None  # steps between updates; None is an epoch
    pattern: Pattern = Filter()
    allocation: str = "uniform"
    schedule: Schedule = field(default=Constant(), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_every(self.every)

    def is_update_due(self, progress: TrainingProgress) -> bool:
        return progress.step <= progress.total and progress.is_multiple_of(self.every)

    def update(self, targets: Targets, sparsity: float) -> Masks:
        return self.select_magnitudes(targets, sparsity)
