"""Find the layers whose outputs a forward pass divides, as attention divides queries and keys into heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...models.example_inputs import ModelInputs

VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default)


class WatchViews(TorchDispatchMode):
    """Collects the linear layers whose output is viewed with its last dimension, that of the channels, divided."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[int, tuple[nn.Module, Tensor]] = {}  # by storage; the tensors keep their memory occupied
        self.divided: set[nn.Module] = set()

    def remember_output(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        """Remember the output of a layer, as a forward hook."""
        self.outputs[output.untyped_storage().data_ptr()] = (layer, output)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in VIEWS:
            layer, output = self.outputs.get(args[0].untyped_storage().data_ptr(), (None, None))
            if layer is not None and args[0].shape[-1] == output.shape[-1] > result.shape[-1]:  # type: ignore[union-attr]
                self.divided.add(layer)
        return result


@torch.no_grad()
def find_divided_layers(model: nn.Module, example: ModelInputs) -> set[nn.Module]:
    """Return the linear layers of a model whose outputs its forward pass divides, which fixes their number."""
    watch = WatchViews()
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [layer.register_forward_hook(watch.remember_output) for layer in layers]
    try:
        with watch:
            example.call(model)
    finally:
        for hook in hooks:
            hook.remove()
    return watch.divided
