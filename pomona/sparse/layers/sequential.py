"""A Sequential whose layers compute the ReLU after them in the same kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from .base import PackedWeightLayer, has_call_hooks
from .conv2d_relu import Conv2dReLU


class FusedSequential(nn.Sequential):
    """A Sequential that asks layers to compute the ReLU after them, where nothing else sees what is between the two.

    The ReLU keeps its place, and a layer that is called by its index, in a loop or in a slice is the layer alone.
    """

    def forward(self, input: Any) -> Any:
        modules: list[Any] = list(self._modules.values())
        fuses = isinstance(input, Tensor) and not global_hooks._has_any_global_hook()
        pairs = zip(modules, [*modules[1:], None], strict=True)
        for module, following in pairs:
            if fuses and computes_relu(module, following) and not (is_observed(module) or is_observed(following)):
                input = module(input, relu=True)
                next(pairs)
            else:
                input = module(input)
        return input


def computes_relu(layer: nn.Module | None, following: nn.Module | None) -> bool:
    """Return whether a layer can compute the module that follows it: a ReLU, of no subclass."""
    return type(following) is nn.ReLU and isinstance(layer, (PackedWeightLayer, Conv2dReLU))


def is_observed(module: nn.Module) -> bool:
    """Return whether hooks, or a forward that was set on the instance, see what a module is given or returns."""
    return has_call_hooks(module) or "forward" in vars(module)
