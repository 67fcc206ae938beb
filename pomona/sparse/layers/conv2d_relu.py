"""A dense convolution that can compute the ReLU after it, on a GPU in one cuDNN kernel."""

from __future__ import annotations

from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from ..format import DTYPES
from ..ops.registration import is_traced

CUDNN_DEVICES = {"cuda"}  # device types that have cuDNN

Conv = TypeVar("Conv", bound=nn.Conv2d)


class Conv2dReLU(nn.Conv2d):
    """A dense convolution that computes the ReLU after it where a call asks for it: in one cuDNN kernel with the bias.

    PyTorch takes three kernels. The layer is trained, saved and loaded as the plain convolution, with its parameters.
    """

    @staticmethod
    def can_replace(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
        """Return whether a layer can be replaced: not a subclass, which may compute anything, and with zero padding."""
        return type(layer) is nn.Conv2d and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)

    @classmethod
    def from_conv2d(cls, layer: nn.Conv2d) -> Conv2dReLU:
        """Return a convolution that can compute a ReLU and shares parameters, buffers and hooks with `layer`."""
        return change_class(layer, cls)

    def dense(self) -> nn.Conv2d:
        """Return the plain convolution, which shares its parameters with this layer."""
        return change_class(self, nn.Conv2d)

    def forward(self, input: Tensor, relu: bool = False) -> Tensor:
        if relu and self.can_use_cudnn(input):
            parameters, options = self._parameters, (self.stride, self.padding, self.dilation, self.groups)
            weight, bias = parameters["weight"], parameters["bias"]
            try:
                return torch.cudnn_convolution_relu(input, weight, bias, *options)  # type: ignore[arg-type]
            except RuntimeError:  # cuDNN has no such kernel, or the input is invalid and the plain layer explains it
                pass
        y = super().forward(input)
        return y.relu() if relu else y

    def can_use_cudnn(self, input: Tensor) -> bool:
        """Return whether cuDNN may compute it all: its operator has no derivative, few checks and no autocast."""
        parameters, cudnn = self._parameters, torch.backends.cudnn  # `self.weight` would take the host more time
        if input.device.type not in CUDNN_DEVICES or parameters.keys() != {"weight", "bias"}:
            return False
        if is_traced(input, *parameters.values()):
            return False
        weight: Any = parameters["weight"]
        matches = input.dtype == weight.dtype and input.device == weight.device
        deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
        enabled = cudnn.enabled and not deterministic and not torch.is_autocast_enabled(input.device.type)
        return enabled and matches and input.dtype in DTYPES and input.ndim == 4 and input.shape[1] == self.in_channels


def change_class(layer: nn.Module, new_class: type[Conv]) -> Conv:
    """Return a layer of another class with all attributes of `layer`, parameters and hooks included."""
    changed = new_class.__new__(new_class)
    vars(changed).update(vars(layer))
    return changed
