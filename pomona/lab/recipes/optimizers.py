"""Optimizers and learning-rate schedules as the papers use them.

Both are named choices, written like a method: `{name = "sgd", lr = 0.2}` or `"sgd(lr=0.2)"`.
A schedule keeps no state: it is a pure function of the step, so a resumed run needs none of it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pomona.errors import require
from pomona.registry import Registry

OPTIMIZERS: Registry[Optimizer] = Registry("optimizer")
RATES: Registry[Rate] = Registry("learning-rate schedule")


@dataclass(frozen=True)
class Optimizer:
    """What every optimizer has; `build` makes the torch one."""

    lr: float = 0.1  # the rate before any decay, reached at the end of the warm-up
    weight_decay: float = 1e-4

    def __post_init__(self) -> None:
        require(0 < self.lr < math.inf, f"lr must be above 0 and finite, got {self.lr}.")
        require(0 <= self.weight_decay < math.inf, f"weight_decay must be 0 or more, got {self.weight_decay}.")

    def build(self, parameters: Iterable[torch.nn.Parameter], captured: bool = False) -> torch.optim.Optimizer:
        """The torch optimizer over these parameters; `captured` makes one whose step a CUDA graph can hold."""
        raise NotImplementedError

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Give every parameter a state to capture: as it is, or where there is none that of no step taken."""
        raise NotImplementedError


@OPTIMIZERS.register("sgd")
@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum, Nesterov's unless told otherwise."""

    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.momentum < 1, f"momentum must be in [0, 1), got {self.momentum}.")
        require(
            self.momentum > 0 or not self.nesterov,
            "nesterov needs a momentum above 0: set nesterov = false for plain SGD.",
        )

    def build(self, parameters: Iterable[torch.nn.Parameter], captured: bool = False) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters,
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            fused=captured or None,
        )

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        if self.momentum:
            for parameter, state in _states(optimizer):
                _put(state, "momentum_buffer", torch.zeros_like(parameter))


@OPTIMIZERS.register("adam")
@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, with weight decay added to the gradient."""

    lr: float = 1e-3
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    kind: ClassVar[type[torch.optim.Adam]] = torch.optim.Adam

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            require(0 <= beta < 1, f"{key} must be in [0, 1), got {beta}.")
        require(self.eps > 0, f"eps must be above 0, got {self.eps}.")

    def build(self, parameters: Iterable[torch.nn.Parameter], captured: bool = False) -> torch.optim.Optimizer:
        return self.kind(
            parameters,
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=captured or None,
            capturable=captured,
        )

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in _states(optimizer):
            _put(state, "step", torch.zeros((), dtype=torch.float32, device=parameter.device))
            for key in ("exp_avg", "exp_avg_sq"):
                _put(state, key, torch.zeros_like(parameter))


@OPTIMIZERS.register("adamw")
@dataclass(frozen=True)
class AdamW(Adam):
    """Adam, with weight decay applied to the weights themselves."""

    weight_decay: float = 0.01
    kind: ClassVar[type[torch.optim.Adam]] = torch.optim.AdamW


def _states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.nn.Parameter, dict[str, Any]]]:
    """Every parameter, with the place for its state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter, optimizer.state[parameter]


def _put(state: dict[str, Any], key: str, first: torch.Tensor) -> None:
    """A first value, or the value that is there laid out like it: fused steps want all tensors alike."""
    if key in state:
        first.copy_(state[key])
    state[key] = first


@dataclass(frozen=True)
class Rate:
    """A learning-rate schedule: a factor on `lr`, after a linear warm-up.

    Time is counted in steps, or in whole epochs where `per = "epoch"` (the rate then stands still
    within an epoch).
    """

    per: str = "step"
    warmup: float = 0.0  # epochs over which the rate rises linearly to lr
    warmup_start: float = 0.0  # the share of lr from which it rises

    def __post_init__(self) -> None:
        require(self.per in ("step", "epoch"), f"per takes 'step' or 'epoch', got '{self.per}'.")
        require(0 <= self.warmup < math.inf, f"warmup must be 0 epochs or more, got {self.warmup}.")
        require(
            0 <= self.warmup_start <= 1,
            f"warmup_start is a share of lr and must be in [0, 1], got {self.warmup_start}.",
        )

    def factor(self, time: int, total: int, epoch: int, warm: float) -> float:
        """The share of `lr` at `time` of `total`; an epoch lasts `epoch`, the warm-up `warm`."""
        raise NotImplementedError

    def over(self, lr: float, total_steps: int, steps_per_epoch: int) -> Callable[[int], float]:
        """The rate as a function of the step, the first step being 0."""
        unit = steps_per_epoch if self.per == "epoch" else 1
        total, epoch = math.ceil(total_steps / unit), steps_per_epoch // unit
        warm = self.warmup * epoch

        def rate(step: int) -> float:
            time = step // unit
            if time < warm:
                return lr * (self.warmup_start + (1 - self.warmup_start) * min(1.0, (time + 1) / warm))
            return lr * self.factor(time, total, epoch, warm)

        return rate


@RATES.register("constant")
@dataclass(frozen=True)
class Constant(Rate):
    """The same rate from the warm-up to the end."""

    def factor(self, time: int, total: int, epoch: int, warm: float) -> float:
        return 1.0


@RATES.register("step")
@dataclass(frozen=True)
class Step(Rate):
    """Multiply by `gamma` at every milestone."""

    milestones: tuple[float, ...] = (0.5, 0.75)  # whole numbers are epochs, fractions shares of training
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "milestones", _milestones(self.milestones))
        require(0 < self.gamma <= 1, f"gamma must be in (0, 1], got {self.gamma}.")

    def factor(self, time: int, total: int, epoch: int, warm: float) -> float:
        times = sorted(m * epoch if isinstance(m, int) else round(m * total) for m in self.milestones)
        return float(self.gamma ** bisect.bisect_right(times, time))


@RATES.register("cosine")
@dataclass(frozen=True)
class Cosine(Rate):
    """Half a cosine from `lr` after the warm-up down to `final`, then `rest` epochs there."""

    final: float = 0.0  # the share of lr at the end
    rest: float = 0.0  # epochs held at the final rate

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.final <= 1, f"final is a share of lr and must be in [0, 1], got {self.final}.")
        require(0 <= self.rest < math.inf, f"rest must be 0 epochs or more, got {self.rest}.")

    def factor(self, time: int, total: int, epoch: int, warm: float) -> float:
        length = total - warm - self.rest * epoch
        share = min(1.0, (time - warm) / length) if length > 0 else 1.0
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * share)) / 2


def _milestones(given: object) -> tuple[float, ...]:
    """Milestones as a tuple, each a whole epoch or a share of training."""
    require(isinstance(given, (list, tuple)), f"milestones takes a list, got {given!r}.")
    for m in given:  # type: ignore[attr-defined]
        whole = type(m) is int and m >= 0
        require(
            whole or (type(m) is float and 0 <= m <= 1),
            f"a milestone is a whole epoch (150) or a share of training in [0, 1] (0.5), got {m!r}.",
        )
    return tuple(given)  # type: ignore[arg-type]
