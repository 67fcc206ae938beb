"""Optimizers as recipes name them: frozen specs that build the torch optimizers.

An optimizer is a named choice, written like a method: `{name = "sgd", lr = 0.2}` or `"sgd(lr=0.2)"`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pomona.errors import require
from pomona.registry import Registry

OPTIMIZERS: Registry[OptimizerSpec] = Registry("optimizer")


@dataclass(frozen=True)
class OptimizerSpec:
    """The options that every optimizer has; `build` makes the torch optimizer."""

    lr: float = 0.1  # the learning rate before any decay, reached at the end of the warm-up
    weight_decay: float = 1e-4

    def __post_init__(self) -> None:
        require(0 < self.lr < math.inf, f"lr must be above 0 and finite, got {self.lr}.")
        require(0 <= self.weight_decay < math.inf, f"weight_decay must be 0 or more, got {self.weight_decay}.")

    def build(self, parameters: Iterable[torch.nn.Parameter], captured: bool = False) -> torch.optim.Optimizer:
        """Return the torch optimizer over these parameters; `captured` makes its step fit for CUDA graph capture."""
        raise NotImplementedError

    def initialize_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Give every parameter the state that a captured step needs: its present one, or that before the first step."""
        raise NotImplementedError


@OPTIMIZERS.register("sgd")
@dataclass(frozen=True)
class SGD(OptimizerSpec):
    """Stochastic gradient descent with Nesterov momentum by default."""

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

    def initialize_state(self, optimizer: torch.optim.Optimizer) -> None:
        if self.momentum:
            for parameter, state in _parameter_states(optimizer):
                _set_state(state, "momentum_buffer", torch.zeros_like(parameter))


@OPTIMIZERS.register("adam")
@dataclass(frozen=True)
class Adam(OptimizerSpec):
    """Adam, with weight decay added to the gradient."""

    lr: float = 1e-3
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    torch_class: ClassVar[type[torch.optim.Adam]] = torch.optim.Adam

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            require(0 <= beta < 1, f"{key} must be in [0, 1), got {beta}.")
        require(self.eps > 0, f"eps must be above 0, got {self.eps}.")

    def build(self, parameters: Iterable[torch.nn.Parameter], captured: bool = False) -> torch.optim.Optimizer:
        return self.torch_class(
            parameters,
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=captured or None,
            capturable=captured,
        )

    def initialize_state(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in _parameter_states(optimizer):
            _set_state(state, "step", torch.zeros((), dtype=torch.float32, device=parameter.device))
            for key in ("exp_avg", "exp_avg_sq"):
                _set_state(state, key, torch.zeros_like(parameter))


@OPTIMIZERS.register("adamw")
@dataclass(frozen=True)
class AdamW(Adam):
    """Adam, with weight decay applied to the weights themselves."""

    weight_decay: float = 0.01
    torch_class: ClassVar[type[torch.optim.Adam]] = torch.optim.AdamW


def _parameter_states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.nn.Parameter, dict[str, Any]]]:
    """Yield every parameter with the mapping that holds its state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter, optimizer.state[parameter]


def _set_state(state: dict[str, Any], key: str, initial: torch.Tensor) -> None:
    """Set a state to its initial value, or to its present value in the initial one's memory layout.

    Fused optimizer steps need all tensors of a parameter in one layout.
    """
    if key in state:
        initial.copy_(state[key])
    state[key] = initial
