"""The base classes of layers with packed weights. They are for inference: a gradient goes through the dense product."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..format import BalancedTensor
from ..formats import FORMATS
from ..ops.dense_product import unpack_and_keep, warn_about_dense_product
from ..ops.registration import is_traced
from ..packed_tensor import PackedTensor
from .lazy_weight import LazyWeight

# Device types with one operator for a whole convolution or LSTM; elsewhere these layers are made of products.
WHOLE_LAYER_DEVICES = {"cuda"}
# The attributes of a module that hold the hooks of its calls; those of state dicts are about dense parameters.
CALL_HOOKS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_backward_pre_hooks", "_backward_hooks"),
)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Return whether autograd records operations on any of these tensors, backwards or in forward mode."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return True
    in_forward_mode = forward_ad._current_level >= 0
    return in_forward_mode and any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def cast_for_autocast(x: Tensor) -> Tensor:
    """Return x in the dtype in which autocast would run a dense layer, where it is enabled."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) and x.is_floating_point() else x


def has_call_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks that see its inputs, outputs or their gradients."""
    before_or_after = module._forward_pre_hooks or module._forward_hooks  # written out: a model asks at every call
    return bool(before_or_after or module._backward_pre_hooks or module._backward_hooks)


def copy_call_hooks(source: nn.Module, target: nn.Module) -> None:
    """Give a module the hooks of another one's calls."""
    for name in CALL_HOOKS:
        setattr(target, name, copy.copy(getattr(source, name)))
    target._is_full_backward_hook = source._is_full_backward_hook


def is_channels_last(images: Tensor) -> bool:
    """Return whether a tensor of images is in channels-last memory format and in no other."""
    return images.ndim == 4 and images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()


class PackedLayer(nn.Module):
    """A layer with packed weights, whose values, indices and other parts are among its buffers.

    It has the options of the dense layer that it replaces, under the same names, and the hooks of its calls.
    """

    options: ClassVar[tuple[str, ...]]  # attributes that rebuild the dense layer

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.shapes: dict[str, torch.Size] = {}
        self.formats: dict[str, str] = {}
        self.metadata: dict[str, dict[str, Any]] = {}
        self.blocks: dict[str, int] = {}  # of balanced weights
        self.sizes: dict[str, tuple[int, ...]] = {}  # rows and columns first, as the operator takes them
        self.part_buffers: dict[str, tuple[str, ...]] = {}  # the names of the buffers that hold a weight's parts
        self.dense_dtype = next(layer.parameters()).dtype  # of the dense layer, whatever the values are stored as
        for option in self.options:
            setattr(self, option, getattr(layer, option))
        copy_call_hooks(layer, self)
        self.train(layer.training)

    def register_packed_weight(self, name: str, packed: PackedTensor) -> None:
        """Hold a packed weight under the name of the dense parameter."""
        self.shapes[name], self.formats[name] = packed.shape, packed.format_name
        self.metadata[name], self.sizes[name] = packed.metadata, packed.sizes
        self.part_buffers[name] = tuple(f"{name}_{part}" for part in packed.part_names)
        if isinstance(packed, BalancedTensor):
            self.blocks[name] = packed.block
        for buffer, part in zip(self.part_buffers[name], packed.parts, strict=True):
            self.register_buffer(buffer, part)

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLayer:
        scales = {name: part for name, part in self._buffers.items() if name.endswith("_scales") and part is not None}
        super()._apply(fn, recurse)
        self.dense_dtype = fn(torch.empty(0, dtype=self.dense_dtype)).dtype
        for name, part in scales.items():  # float32 in a model of any dtype, as the operator takes them
            if self.read_buffer(name).dtype != part.dtype:
                self._buffers[name] = part.to(self.read_buffer(name).device)
        # A memory format is meant for images and dense weights, but packed tensors may have four dimensions too.
        for buffers in self.part_buffers.values():
            for buffer in buffers:
                self._buffers[buffer] = self.read_buffer(buffer).contiguous()
        return self

    def read_buffer(self, name: str) -> Tensor:
        """Return a buffer without the lookup time of `nn.Module.__getattr__`."""
        return self._buffers[name]  # type: ignore[return-value]

    def read_parts(self, name: str) -> list[Tensor]:
        """Return the tensors of the packed weight of the dense parameter `name`."""
        return [self._buffers[buffer] for buffer in self.part_buffers[name]]  # type: ignore[misc]

    def packed_weight(self, name: str) -> PackedTensor:
        """Return the packed weight of the dense parameter `name`."""
        return FORMATS[self.formats[name]].from_parts(self.read_parts(name), self.metadata[name])

    def packed_weights(self) -> Iterator[tuple[str, PackedTensor]]:
        """Yield the name of each packed parameter with its packed weight."""
        return ((name, self.packed_weight(name)) for name in self.shapes)

    def multiply_packed(
        self, name: str, x: Tensor, bias: Tensor | None, relu: bool = False, transposed: bool = False
    ) -> Tensor:
        """Return the product of x with the packed weight `name`, by the operator of its format."""
        product = FORMATS[self.formats[name]].product
        return product(x, *self.read_parts(name), bias, *self.sizes[name], relu, transposed)

    def unpack_for_autograd(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the dense weight `name` in a dtype, kept for the next call, for inputs that need a gradient."""
        warn_about_dense_product("an input that needs a gradient")
        return self.unpack_once(name, dtype)

    def unpack_once(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the dense weight `name` in a dtype, kept for the next call."""
        unpack = FORMATS[self.formats[name]].unpack
        return unpack_and_keep(unpack, self.read_parts(name), self.sizes[name], dtype).view(self.shapes[name])

    def empty_dense_layer(self) -> nn.Module:
        """Return the dense layer on the meta device, without values."""
        raise NotImplementedError

    def dense_state(self) -> dict[str, Tensor]:
        """Return the parameters of the dense layer, with its weights unpacked; other buffers may be among them."""
        buffers = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        return buffers | {name: packed.dense().to(self.dense_dtype) for name, packed in self.packed_weights()}

    @torch.no_grad()
    def dense(self) -> nn.Module:
        """Return the dense layer with its weights unpacked, as trainable parameters, and with the hooks of this one."""
        layer = self.dense_without_hooks()
        copy_call_hooks(self, layer)
        return layer.train(self.training)

    @torch.no_grad()
    def dense_without_hooks(self) -> nn.Module:
        """Return the dense layer with its weights unpacked, as trainable parameters."""
        layer = self.empty_dense_layer()
        state = {name: tensor for name, tensor in self.dense_state().items() if name in layer._parameters}
        state = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
        layer.load_state_dict(state, assign=True)
        return layer

    def file_metadata(self) -> dict[str, Any]:
        """Return everything but the buffers as plain values, for the header of a file."""
        return dict(self.metadata)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}: {packed!r}" for name, packed in self.packed_weights())


class PackedWeightLayer(PackedLayer):
    """A layer with one packed weight and a bias, which also computes the ReLU after it where a call asks for it."""

    bias: Tensor | None

    def __init__(self, layer: nn.Linear | nn.Conv2d, weight: PackedTensor) -> None:
        super().__init__(layer)
        self.register_packed_weight("weight", weight)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    @property
    def weight(self) -> Tensor:
        """The dense weight, which is unpacked where its values are used."""
        values = self.read_parts("weight")[0]
        if is_traced(values):
            return self.unpack_weight()
        return LazyWeight(self.weight_shape(), self.dense_dtype, values.device, self.unpack_weight)

    def weight_shape(self) -> torch.Size:
        """Return the shape of the dense weight."""
        return self.shapes["weight"]

    def unpack_weight(self, for_product: bool = False) -> Tensor:
        """Return the dense weight, which is kept for the next call where it is for a product."""
        if for_product:
            warn_about_dense_product("a product with the attribute `weight` of a layer")
            return self.unpack_once("weight", self.dense_dtype)
        return self.packed_weight("weight").dense().to(self.dense_dtype)
