"""The forward of a model that runs as planned, and as its modules otherwise."""

from __future__ import annotations

import copy
import inspect
import warnings
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from ..cpu.network import load_function
from ..layers.base import PackedLayer
from ..ops.registration import is_observed
from .convert import convert_network
from .plan import NetworkPlan

MAX_PLANS = 4  # of different image shapes that are kept
read_version = attrgetter("_version")
read_training = attrgetter("training")


class PlannedForward:
    """The forward of a model: one native call for its convolutions where that computes the same, else its modules.

    It takes the place of the model's `forward`. The plan is made at the first call for images of a shape, and again
    where weights have changed. It is used for float32 images on a CPU in evaluation mode, while nothing observes or
    differentiates the modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.__signature__ = inspect.signature(model.forward)
        self.forget_plans()

    def forget_plans(self) -> None:
        """Drop the plans and what they were made from."""
        self.plans: dict[tuple[int, int, int], tuple[NetworkPlan, nn.Module | None] | None] = {}

    @property
    def __code__(self) -> Any:
        """The code of the model's own forward, which torch.export reads."""
        return type(self.model).forward.__code__

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "__signature__": self.__signature__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.forget_plans()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and self.can_plan(args[0]):
            plan = self.find_plan(args[0])
            y = plan and plan[0].run(args[0].contiguous())
            if y is not None:
                return y if plan[1] is None else plan[1](y)  # type: ignore[index]
        return type(self.model).forward(self.model, *args, **kwargs)

    def can_plan(self, x: Any) -> bool:
        """Return whether the plan computes what the modules compute."""
        if type(x) is not Tensor or x.dtype != torch.float32 or x.device.type != "cpu" or x.ndim != 4 or not len(x):
            return False
        if self.model.training or is_observed(x) or torch.is_autocast_enabled("cpu"):
            return False
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.model.parameters()):
            warn_about_gradients()
            return False
        return True

    def find_plan(self, x: Tensor) -> tuple[NetworkPlan, nn.Module | None] | None:
        """Return the plan for images of this shape, with the module for what follows it, or None without one."""
        shape = x.shape[1], x.shape[2], x.shape[3]
        if shape not in self.plans or self.has_changed():
            self.make_plan(shape)
        return self.plans[shape]

    def has_changed(self) -> bool:
        """Return whether weights, modes or hooks are not those of the plans."""
        return (
            sum(map(read_version, self.tensors)) != self.versions
            or any(self.hooks)
            or any(map(read_training, self.modules))
            or PackedLayer.moves != self.moves
        )

    def make_plan(self, shape: tuple[int, int, int]) -> None:
        """Make the plan for images of a shape, and drop those of other weights, or the oldest one."""
        if self.plans and (self.has_changed() or len(self.plans) == MAX_PLANS):
            self.plans = {}
        tensors = (*self.model.parameters(), *self.model.buffers())
        self.tensors = [t for t in tensors if t.is_floating_point() and not t.is_inference()]
        self.versions = sum(map(read_version, self.tensors))
        modules = list(self.model.modules())
        self.modules = [m for m in modules if not isinstance(m, PackedLayer) and not any(m.children())]
        self.hooks = [hooks for m in modules[1:] for hooks in (m._forward_pre_hooks, m._forward_hooks)]
        self.hooks += global_hooks._global_forward_pre_hooks, global_hooks._global_forward_hooks
        self.moves = PackedLayer.moves
        observed = any(self.hooks) or any(map(read_training, self.modules))
        network = None if observed else convert_network(self.model, shape)
        self.plans[shape] = None if network is None else (NetworkPlan(network), network.rest)


@cache
def warn_about_gradients() -> None:
    """Warn, once, that a model runs module by module where it need not."""
    warnings.warn(
        "a compressed network runs module by module while gradients are enabled: call it under torch.inference_mode().",
        stacklevel=2,
    )


def plan_network(model: nn.Module, shape: tuple[int, int, int] | None = None) -> bool:
    """Let a model run as planned where it can; return whether it can for images of a shape, channels first.

    It cannot where it has no forward of its class, where modules other than itself have hooks, and where its first
    layers are none that the kernel has.
    """
    if load_function("network_run") is None or "forward" in vars(model):
        return False
    planned = PlannedForward(model)
    if shape is not None:
        planned.make_plan(shape)
        if planned.plans[shape] is None:
            return False
    vars(model)["forward"] = planned
    return True


def is_planned(model: nn.Module) -> bool:
    """Return whether a model runs as planned."""
    return isinstance(vars(model).get("forward"), PlannedForward)


def remove_plan(model: nn.Module) -> None:
    """Let a model run module by module."""
    if is_planned(model):
        del vars(model)["forward"]


def copy_without_plan(model: nn.Module) -> nn.Module:
    """Return a model that runs module by module: itself, unless it runs as planned."""
    if is_planned(model):
        model = copy.deepcopy(model)
        remove_plan(model)
    return model


def plan_copy(packed: nn.Module, arguments: tuple[Any, ...]) -> nn.Module | None:
    """Return a copy of a packed model that runs as planned for these arguments, or None where it cannot."""
    x = arguments[0] if len(arguments) == 1 else None
    if not isinstance(x, Tensor) or x.ndim != 4 or x.device.type != "cpu" or x.dtype != torch.float32:
        return None
    if not any(isinstance(module, PackedLayer) for module in packed.modules()):
        return None
    planned = copy.deepcopy(packed).eval()
    return planned if plan_network(planned, (x.shape[1], x.shape[2], x.shape[3])) else None
