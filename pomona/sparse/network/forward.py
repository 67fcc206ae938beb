"""The forward of a model that runs as planned, and as its modules otherwise."""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..cpu.network import load_function
from ..ops.registration import is_observed
from .model_plans import ModelPlan, ModelPlans, PlanAllowance, Shape
from .snapshot import is_observed_inside


class PlannedForward:
    """The forward of a model: one native call for its convolutions where that computes the same, else its modules.

    It takes the place of the model's `forward`. The plan is made at the first call for images of a shape, and again
    where the model has changed. It is used for float32 images on a CPU in evaluation mode, while nothing observes the
    modules or differentiates by the images.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.__signature__ = inspect.signature(model.forward)
        self.forget_plans()

    def forget_plans(self) -> None:
        """Drop the plans and what they were made from."""
        self.current: ModelPlans | None = None
        self.allowance = PlanAllowance()
        self.planning = threading.Lock()
        self.time = 0  # counted in calls

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
            y = None if plan is None else plan.run_steps(args[0].contiguous())
            if plan is not None and y is not None:
                return plan.run_rest(y)
        return type(self.model).forward(self.model, *args, **kwargs)

    def can_plan(self, x: Any) -> bool:
        """Return whether a plan computes for x what the modules compute."""
        if type(x) is not Tensor or x.dtype != torch.float32 or not x.is_cpu or x.ndim != 4 or not x.shape[0]:
            return False
        is_differentiated = is_observed(x) or forward_ad._current_level >= 0
        return not (self.model.training or is_differentiated or torch.is_autocast_enabled("cpu"))

    def find_plan(self, x: Tensor) -> ModelPlan | None:
        """Return the plan for images of this shape, or None without one."""
        _, *sizes = x.shape
        shape = sizes[0], sizes[1], sizes[2]
        self.time += 1
        self.allowance.count_call()
        current = self.current
        if current is None or shape not in current.plans or not current.snapshot.is_current():
            current = None if is_observed_inside(self.model) else self.make_plan(shape)
        plan = None if current is None else current.plans.get(shape)
        if plan is not None:
            plan.last_use = self.time
        return plan

    def make_plan(self, shape: Shape) -> ModelPlans | None:
        """Return the plans of the model as it is now, with one for images of a shape where that is worth it."""
        with self.planning:
            current = self.current
            if current is not None and not current.snapshot.is_current():
                current = self.current = None
            if current is not None and shape in current.plans:  # by another thread
                return current
            if not self.allowance.take():
                warn_about_new_plans()
                return current
            current = current or ModelPlans(self.model)
            current.make_plan(shape)
            self.current = current
            return current


@cache
def warn_about_new_plans() -> None:
    """Warn, once, that a model runs module by module because plans would take longer than they save."""
    warnings.warn(
        "a compressed network runs module by module where its images have ever new shapes, or its weights change "
        "before each call: plans for them take longer than they save.",
        stacklevel=2,
    )


def plan_network(model: nn.Module, shape: Shape | None = None) -> bool:
    """Let a model run as planned where it can, in evaluation mode; return whether it can for images of a shape.

    It cannot where its forward is not that of its class, assigns attributes or cannot be traced, where modules other
    than itself have hooks, and where its first layers are none that the kernel has.
    """
    if load_function("network_run") is None or "forward" in vars(model):
        return False
    planned = PlannedForward(model)
    vars(model)["forward"] = planned
    modes = {module: module.training for module in model.modules()}
    try:
        plans = None if is_observed_inside(model.eval()) else ModelPlans(model)
        if plans is not None and shape is not None:
            plans.make_plan(shape)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if plans is None or plans.graph is None or (shape is not None and plans.plans[shape] is None):
        remove_plan(model)
        return False
    planned.current = plans
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


def plan_copy(model: nn.Module, arguments: tuple[Any, ...]) -> nn.Module | None:
    """Return a copy of a model that runs as planned for these arguments, or None where it cannot."""
    shape = find_shape(arguments)
    planned = None if shape is None else copy.deepcopy(model)
    return planned if planned is not None and plan_network(planned, shape) else None


def find_shape(arguments: tuple[Any, ...]) -> Shape | None:
    """Return the shape of images that are a model's only argument, channels first, or None without a plan for such."""
    x = arguments[0] if len(arguments) == 1 else None
    if not isinstance(x, Tensor) or x.ndim != 4 or x.device.type != "cpu" or x.dtype != torch.float32:
        return None
    return x.shape[1], x.shape[2], x.shape[3]
