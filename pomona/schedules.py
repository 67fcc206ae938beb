"""Sparsity schedules: which fraction of the final sparsity is due at a step. Schedules keep no state."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from .errors import require
from .registry import Registry


class Schedule(ABC):
    """A function from the training step to the fraction of the final sparsity that is due after it."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def until(self) -> float:
        """The fraction of training after which the final sparsity is due."""

    @abstractmethod
    def __call__(self, step: int, total: int, steps_per_epoch: int | None = None) -> float:
        """Return the fraction due after `step` of `total` steps; with `steps_per_epoch` it changes at epochs only."""


SCHEDULES: Registry[Schedule] = Registry("schedule")


@dataclass(frozen=True)
class RampSchedule(Schedule):
    """Base of schedules that rise from 0 at `start` to 1 at `until`, both fractions of training, along a curve."""

    start: float = 0.0
    until: float = 0.75

    def __post_init__(self) -> None:
        require(
            0 <= self.start < self.until <= 1,
            f"a schedule needs 0 ≤ start < until ≤ 1 (fractions of training), got start={self.start}, "
            f"until={self.until}.",
        )

    def __call__(self, step: int, total: int, steps_per_epoch: int | None = None) -> float:
        if steps_per_epoch:
            step -= step % steps_per_epoch
        progress = (step / total - self.start) / (self.until - self.start)
        return self.curve(min(max(progress, 0.0), 1.0))

    @abstractmethod
    def curve(self, x: float) -> float:
        """Return the fraction at x, which runs from 0 to 1 between `start` and `until`."""


@SCHEDULES.register("cubic")
@dataclass(frozen=True)
class Cubic(RampSchedule):
    """1 − (1 − x)³ (Zhu & Gupta, 2017): fast at first, while many weights are redundant, slow at the end."""

    def curve(self, x: float) -> float:
        return 1 - (1 - x) ** 3


@SCHEDULES.register("linear")
@dataclass(frozen=True)
class Linear(RampSchedule):
    """x, a straight line."""

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
