"""The exponential sparsity schedule that the authors of GIP use for random indices."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import require
from ..schedules import SCHEDULES, RampSchedule


@SCHEDULES.register("exponential")
@dataclass(frozen=True)
class Exponential(RampSchedule):
    """Schedule that follows base^(x − 1): almost all of the rise is in the last tenth.

    The authors' base is the final sparsity in per cent.
    """

    until: float = 1.0
    base: float = 90.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.base > 1, f"base must be above 1, got {self.base}.")

    def curve(self, x: float) -> float:
        return self.base ** (x - 1)
