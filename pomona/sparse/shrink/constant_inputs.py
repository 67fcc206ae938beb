"""Measurement of the input channels that have one constant value, by a forward pass with hooks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ...models.example_inputs import ModelInputs

LAYERS = (_ConvNd, nn.Linear)  # the layers that produce and read channels
CONSTANT_TOLERANCE = 64  # times the type's epsilon: the spread, relative to the values, up to which they are equal

ConstantInputs = dict[nn.Module, Tensor]  # layer → value of each input channel, NaN where the value varies


def measure_constant_inputs(model: nn.Module, example: ModelInputs) -> ConstantInputs:
    """Return for each layer the input channels that have one value for all samples and positions of an example."""
    values: ConstantInputs = {}

    def store_constants(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        channels = inputs[0].movedim(1 if isinstance(module, _ConvNd) else -1, 0).flatten(1)
        low, high = channels.aminmax(dim=1)
        # The head and the tail of a vectorised loop may round the same number in two ways.
        tolerance = CONSTANT_TOLERANCE * torch.finfo(low.dtype).eps
        is_constant = high - low <= tolerance * torch.maximum(low.abs(), high.abs())
        current = high.where(is_constant, torch.nan).cpu()
        # A layer that runs several times has a constant input only if it is the same every time.
        values[module] = current.where(values.get(module, current) == current, torch.nan)

    layers = [m for m in model.modules() if isinstance(m, LAYERS) or type(m).__name__ == "Conv1D"]
    hooks = [layer.register_forward_pre_hook(store_constants) for layer in layers]
    try:
        example.call(model)
    finally:
        for hook in hooks:
            hook.remove()
    return values
