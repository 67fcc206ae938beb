"""How much of the final sparsity is asked for, when. A schedule is told the step and keeps no state."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from .errors import require
from .registry import Registry


class Schedule(ABC):
    """The share of the final sparsity that is asked for after a step."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def until(self) -> float:
        """The share of training after which all of it is asked for."""

    @abstractmethod
    def __call__(self, step: int, total: int, steps_per_epoch: int | None = None) -> float:
        """The share asked for after `step` of `total` steps; with epochs it moves only at their start."""


SCHEDULES: Registry[Schedule] = Registry("schedule")


@dataclass(frozen=True)
class RampSchedule(Schedule):
    """From 0 at `start` to 1 at `until`, both shares of training, along a curve."""

    start: float = 0.0
    until: float = 0.75

    def __post_init__(self) -> None:
        require(
            0 <= self.start < self.until <= 1,
            f"a schedule needs 0 ≤ start < until ≤ 1 (shares of training), got start={self.start}, until={self.until}.",
        )

    def __call__(self, step: int, total: int, steps_per_epoch: int | None = None) -> float:
        if steps_per_epoch:
            step -= step % steps_per_epoch
        progress = (step / total - self.start) / (self.until - self.start)
        return self.curve(min(max(progress, 0.0), 1.0))

    @abstractmethod
    def curve(self, x: float) -> float:
        """The share at x, which runs from 0 to 1 between `start` and `until`."""


@SCHEDULES.register("cubic")
@dataclass(frozen=True)
class Cubic(RampSchedule):
    """Zhu & Gupta (2017): 1 − (1 − x)³, quick while much is redundant, slow at the end."""

    def curve(self, x: float) -> float:
        return 1 - (1 - x) ** 3


@SCHEDULES.register("linear")
@dataclass(frozen=True)
class Linear(RampSchedule):
    """x itself."""

    def curve(self, x: float) -> float:
        return x


@SCHEDULES.register("cosine")
@dataclass(frozen=True)
class Cosine(RampSchedule):
    """(1 − cos πx) / 2, slow at both ends."""

    def curve(self, x: float) -> float:
        return (1 - math.cos(math.pi * x)) / 2


@SCHEDULES.register("constant")
@dataclass(frozen=True)
class Constant(Schedule):
    """The final sparsity from the first step on."""

    @property
    def until(self) -> float:
        return 0.0

    def __call__(self, step: int, total: int, steps_per_epoch: int | None = None) -> float:
        return 1.0
