"""The base classes of layers with packed weights. They are for inference: a gradient goes through the dense product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..format import BalancedTensor
from ..ops import balanced

# Device types with one operator for a whole convolution or LSTM; elsewhere these layers are made of products.
WHOLE_LAYER_DEVICES = {"cuda"}


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Return whether autograd records operations on any of these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def is_channels_last(images: Tensor) -> bool:
    """Return whether a tensor of images is in channels-last memory format and in no other."""
    return images.ndim == 4 and images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()


class PackedLayer(nn.Module):
    """A layer with packed weights, whose values and indices are among its buffers.

    It has the options of the dense layer that it replaces, under the same names.
    """

    options: ClassVar[tuple[str, ...]]  # attributes that rebuild the dense layer

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.shapes: dict[str, torch.Size] = {}
        self.blocks: dict[str, int] = {}
        self.sizes: dict[str, tuple[int, int, int]] = {}  # rows, columns and block, as the operator takes them
        for option in self.options:
            setattr(self, option, getattr(layer, option))
        self.train(layer.training)

    def register_packed_weight(self, name: str, packed: BalancedTensor) -> None:
        """Hold a packed weight under the name of the dense parameter."""
        self.shapes[name], self.blocks[name] = packed.shape, packed.block
        self.sizes[name] = (*packed.matrix, packed.block)
        self.register_buffer(f"{name}_values", packed.values)
        self.register_buffer(f"{name}_indices", packed.indices)

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLayer:
        super()._apply(fn, recurse)
        # A memory format is meant for images and dense weights, but packed tensors have four dimensions too.
        for name in self.shapes:
            for buffer in (f"{name}_values", f"{name}_indices"):
                self._buffers[buffer] = self.read_buffer(buffer).contiguous()
        return self

    def read_buffer(self, name: str) -> Tensor:
        """Return a buffer without the lookup time of `nn.Module.__getattr__`."""
        return self._buffers[name]  # type: ignore[return-value]

    def packed_weight(self, name: str) -> BalancedTensor:
        """Return the packed weight of the dense parameter `name`."""
        values, indices = self.read_buffer(f"{name}_values"), self.read_buffer(f"{name}_indices")
        return BalancedTensor(values, indices, self.shapes[name], self.blocks[name])

    def packed_weights(self) -> Iterator[tuple[str, BalancedTensor]]:
        """Yield the name of each packed parameter with its packed weight."""
        return ((name, self.packed_weight(name)) for name in self.shapes)

    def multiply_packed(
        self, name: str, x: Tensor, bias: Tensor | None, relu: bool = False, transposed: bool = False
    ) -> Tensor:
        """Return the product of x with the packed weight `name`, by `torch.ops.pomona.balanced`."""
        packed = self.read_buffer(f"{name}_values"), self.read_buffer(f"{name}_indices")
        return balanced(x, *packed, bias, *self.sizes[name], relu, transposed)

    def empty_dense_layer(self) -> nn.Module:
        """Return the dense layer on the meta device, without values."""
        raise NotImplementedError

    @torch.no_grad()
    def dense(self) -> nn.Module:
        """Return the dense layer with its weights unpacked, as trainable parameters."""
        layer = self.empty_dense_layer()
        state = {name: packed.dense() for name, packed in self.packed_weights()}
        state |= {
            name: buffer for name, buffer in self._buffers.items() if name in layer._parameters and buffer is not None
        }
        state = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
        layer.load_state_dict(state, assign=True)
        return layer.train(self.training)

    def file_metadata(self) -> dict[str, Any]:
        """Return everything but the buffers as plain values, for the header of a file."""
        return {name: {"shape": list(shape), "block": self.blocks[name]} for name, shape in self.shapes.items()}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}: {packed!r}" for name, packed in self.packed_weights())


class PackedWeightLayer(PackedLayer):
    """A layer with one packed weight and a bias, which also computes the ReLU after it where `relu` is set."""

    bias: Tensor | None
    relu = False

    def __init__(self, layer: nn.Linear | nn.Conv2d, weight: BalancedTensor) -> None:
        super().__init__(layer)
        self.register_packed_weight("weight", weight)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    @property
    def weight(self) -> Tensor:
        """The dense weight, unpacked at every access."""
        return self.packed_weight("weight").dense()
