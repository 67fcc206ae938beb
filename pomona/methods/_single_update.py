"""Methods that choose their mask once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ..core.method import Method, Time
from ..schedules import Constant, Schedule


@dataclass(frozen=True, kw_only=True)
class Single(Method):
    """One update, at `attach`, for all of the sparsity."""

    once: ClassVar[bool] = True

    schedule: Schedule = field(default=Constant(), init=False)

    @property
    def timed(self) -> bool:
        return False

    def due(self, time: Time) -> bool:
        return time.step == 0
