"""The plans of a model for images of several shapes, and how many of them are kept and made."""

from __future__ import annotations

from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from .convert import Network, convert_network, trace_network
from .gradients import StepsWithGradients, named_tensors
from .plan import NetworkPlan
from .snapshot import ModelSnapshot

MAX_PLANS = 32  # of different image shapes that are kept
MAX_BYTES = 1 << 29  # of all plans that are kept
CALLS_PER_PLAN = 32  # a plan takes about as long as so many calls save
requires_gradient = attrgetter("requires_grad")

Shape = tuple[int, int, int]  # channels, height, width


class ModelPlan:
    """A model for images of one shape: the steps that it begins with, and a module for the rest."""

    def __init__(self, network: Network) -> None:
        self.steps, self.rest, self.make_begin = NetworkPlan(network), network.rest, network.make_begin
        self.last_use = 0  # the time, counted in calls

    @cached_property
    def begin(self) -> tuple[nn.Module, list[Tensor]]:
        """What the steps compute as a module, and the parameters and buffers of this module."""
        begin = self.make_begin()
        return begin, [tensor for _, tensor in named_tensors(begin)]

    def run_steps(self, x: Tensor) -> Tensor | None:
        """Return the output of the steps, or None where a number is not finite."""
        if torch.is_grad_enabled():
            begin, tensors = self.begin
            if any(map(requires_gradient, tensors)):
                return StepsWithGradients.apply(self.steps, begin, x, *tensors)
        return self.steps.run(x)

    def run_rest(self, y: Tensor) -> Any:
        """Return the output of the model, given that of the steps."""
        return y if self.rest is None else self.rest(y)


class ModelPlans:
    """The plans of a model as it is now. The model is traced once: its graph does not depend on the shape."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.snapshot = ModelSnapshot(model)
        self.graph = trace_network(model)
        self.plans: dict[Shape, ModelPlan | None] = {}  # None for a shape that has none

    def make_plan(self, shape: Shape) -> None:
        """Add the plan for images of a shape, and drop those that were not used for longest where they are too many."""
        network = None if self.graph is None else convert_network(self.model, shape, self.graph)
        plan = None if network is None else ModelPlan(network)
        kept = [(shape, plan), *sorted(self.plans.items(), key=last_use, reverse=True)]
        sizes = [0 if one is None else one.steps.nbytes for _, one in kept]
        while len(kept) > MAX_PLANS or (len(kept) > 1 and sum(sizes) > MAX_BYTES):
            kept.pop()
            sizes.pop()
        self.plans = dict(kept)  # replaced, not changed: other threads may read it


def last_use(entry: tuple[Shape, ModelPlan | None]) -> int:
    """Return when a plan was used last."""
    _, plan = entry
    return 0 if plan is None else plan.last_use


class PlanAllowance:
    """How many plans may be made: one for so many calls as it takes to be worth it, and at first as many as are kept.

    A model that is called with ever new shapes, or whose weights change before every call, is faster without plans.
    """

    def __init__(self) -> None:
        self.calls = MAX_PLANS * CALLS_PER_PLAN

    def count_call(self) -> None:
        """Count a call of the model."""
        self.calls = min(self.calls + 1, MAX_PLANS * CALLS_PER_PLAN)

    def take(self) -> bool:
        """Return whether another plan may be made now, and count it."""
        if self.calls < CALLS_PER_PLAN:
            return False
        self.calls -= CALLS_PER_PLAN
        return True
