"""Gradients of the parameters of a network that runs in one native call: backward runs its modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .plan import NetworkPlan


class StepsWithGradients(torch.autograd.Function):
    """The steps of a plan, with gradients from the modules, which backward calls with the tensors of the forward."""

    @staticmethod
    def forward(ctx: Any, plan: NetworkPlan, begin: nn.Module, x: Tensor, *tensors: Tensor) -> Tensor | None:
        """Return the output of the steps, or None where a number is not finite; `tensors` are those of `begin`."""
        ctx.begin = begin
        ctx.save_for_backward(x, *tensors)  # which also notices where they are changed before backward
        return plan.run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients of the tensors."""
        x, *tensors = ctx.saved_tensors
        create_graph = torch.is_grad_enabled()
        names = [name for name, _ in named_tensors(ctx.begin)]
        with torch.enable_grad(), evaluation_mode(ctx.begin):
            y = torch.func.functional_call(ctx.begin, dict(zip(names, tensors, strict=True)), x)
            wanted = [tensor for tensor in tensors if tensor.requires_grad]
            found = torch.autograd.grad(y, wanted, gradient, allow_unused=True, create_graph=create_graph)
        gradients = iter(found)
        return None, None, None, *(next(gradients) if tensor.requires_grad else None for tensor in tensors)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a module's parameters and buffers."""
    yield from module.named_parameters()
    yield from module.named_buffers()


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Let a module and its parts be in evaluation mode."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True
