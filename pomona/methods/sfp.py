"""Soft filter pruning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ..core.method import Masks, Method, Targets, Time, check_every, method
from ..core.targets import DENSE
from ..patterns import Filter, Pattern
from ..schedules import Constant, Schedule
from ..scores import magnitude


@method("sfp", paper="He et al., IJCAI 2018", weights="free")
@dataclass(frozen=True, kw_only=True)
class SFP(Method):
    """Each epoch the filters of the smallest norm are set to zero in every layer, and are trained on all the same."""

    dense: ClassVar[frozenset[str]] = DENSE | {"linear", "recurrent", "attention"}
    usual: ClassVar[float] = 0.3

    every: int | None = None  # steps between cuts; None is an epoch
    pattern: Pattern = Filter()
    allocation: str = "uniform"
    schedule: Schedule = field(default=Constant(), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_every(self.every)

    def due(self, time: Time) -> bool:
        return time.step <= time.total and time.each(self.every)

    def update(self, targets: Targets, sparsity: float) -> Masks:
        return self.select(magnitude(targets.latent), sparsity)
