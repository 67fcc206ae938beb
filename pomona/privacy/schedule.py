"""The schedule with which the authors of GIP prune random indices."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import require
from ..schedules import SCHEDULES, RampSchedule


@SCHEDULES.register("exponential")
@dataclass(frozen=True)
class Exponential(RampSchedule):
    """base^(x − 1): slow at first, almost all of it in the last tenth. The base is the last share in per cent."""

    until: float = 1.0
    base: float = 90.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.base > 1, f"base must be above 1, got {self.base}.")

    def curve(self, x: float) -> float:
        return self.base ** (x - 1)
