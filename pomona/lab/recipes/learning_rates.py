"""Learning-rate schedules as recipes name them: pure functions of the step.

A schedule is a named choice, written like a method: `{name = "step", gamma = 0.2}` or `"step(gamma=0.2)"`.
It keeps no state, so a checkpoint holds nothing of it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass

from pomona.errors import require
from pomona.registry import Registry

LEARNING_RATES: Registry[LearningRate] = Registry("learning-rate schedule")


@dataclass(frozen=True)
class LearningRate:
    """A learning-rate schedule: a factor on `lr` after a linear warm-up.

    Time is counted in steps, or in whole epochs with `per = "epoch"`: the rate is then constant within an epoch.
    """

    per: str = "step"
    warmup: float = 0.0  # epochs over which the rate rises linearly to lr
    warmup_start: float = 0.0  # the share of lr at which the warm-up starts

    def __post_init__(self) -> None:
        require(self.per in ("step", "epoch"), f"per takes 'step' or 'epoch', got '{self.per}'.")
        require(0 <= self.warmup < math.inf, f"warmup must be 0 epochs or more, got {self.warmup}.")
        require(
            0 <= self.warmup_start <= 1,
            f"warmup_start is a share of lr and must be in [0, 1], got {self.warmup_start}.",
        )

    def factor(self, time: int, total: int, epoch: int, warm: float) -> float:
        """Return the factor on `lr` at `time` of `total`; an epoch lasts `epoch`, the warm-up `warm`."""
        raise NotImplementedError

    def rate_function(self, lr: float, total_steps: int, steps_per_epoch: int) -> Callable[[int], float]:
        """Return the learning rate as a function of the step, counted from 0."""
        unit = steps_per_epoch if self.per == "epoch" else 1
        total, epoch = math.ceil(total_steps / unit), steps_per_epoch // unit
        warm = self.warmup * epoch

        def rate(step: int) -> float:
            time = step // unit
            if time < warm:
                return lr * (self.warmup_start + (1 - self.warmup_start) * min(1.0, (time + 1) / warm))
            return lr * self.factor(time, total, epoch, warm)

        return rate


@LEARNING_RATES.register("constant")
@dataclass(frozen=True)
class ConstantRate(LearningRate):
    """A constant learning rate after the warm-up."""

    def factor(self, time: int, total: int, epoch: int, warm: float) -> float:
        return 1.0


@LEARNING_RATES.register("step")
@dataclass(frozen=True)
class StepDecay(LearningRate):
    """A learning rate that is multiplied by `gamma` at every milestone."""

    milestones: tuple[float, ...] = (0.5, 0.75)  # integers are epochs, floats are shares of training
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "milestones", _parse_milestones(self.milestones))
        require(0 < self.gamma <= 1, f"gamma must be in (0, 1], got {self.gamma}.")

    def factor(self, time: int, total: int, epoch: int, warm: float) -> float:
        times = sorted(m * epoch if isinstance(m, int) else round(m * total) for m in self.milestones)
        return float(self.gamma ** bisect.bisect_right(times, time))


@LEARNING_RATES.register("cosine")
@dataclass(frozen=True)
class CosineDecay(LearningRate):
    """A learning rate that falls from `lr` to `final` along half a cosine and stays there for `rest` epochs."""

    final: float = 0.0  # the share of lr at the end
    rest: float = 0.0  # epochs at the final rate

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.final <= 1, f"final is a share of lr and must be in [0, 1], got {self.final}.")
        require(0 <= self.rest < math.inf, f"rest must be 0 epochs or more, got {self.rest}.")

    def factor(self, time: int, total: int, epoch: int, warm: float) -> float:
        length = total - warm - self.rest * epoch
        share = min(1.0, (time - warm) / length) if length > 0 else 1.0
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * share)) / 2


def _parse_milestones(given: object) -> tuple[float, ...]:
    """Return milestones as a tuple; raise PomonaError unless each is an epoch or a share of training."""
    require(isinstance(given, (list, tuple)), f"milestones takes a list, got {given!r}.")
    for m in given:  # type: ignore[attr-defined]
        whole = type(m) is int and m >= 0
        require(
            whole or (type(m) is float and 0 <= m <= 1),
            f"a milestone is a whole epoch (150) or a share of training in [0, 1] (0.5), got {m!r}.",
        )
    return tuple(given)  # type: ignore[arg-type]
