"""Replacement of modules in a model: dense layers by packed ones and back, and the ReLUs that a layer computes."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .layers import Conv2dReLU, FusedSequential, PackedLayer, is_packable
from .layers.base import has_call_hooks
from .layers.sequential import computes_relu

Children = dict[str, Any]  # the modules of a container by name


def find_packable_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and layer of each layer that has a packed form."""
    return ((name, module) for name, module in model.named_modules() if is_packable(module))


def find_other_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[Tensor]]]:
    """Yield name, module and matrices of each module that has weights but no packed form."""
    for name, module in model.named_modules():
        if not is_packable(module) and not isinstance(module, (PackedLayer, Conv2dReLU)):
            matrices = [p.detach() for p in module.parameters(recurse=False) if p.ndim > 1]
            if matrices:
                yield name, module, matrices


def find_replaced_layers(model: nn.Module) -> list[str]:
    """Return the names of all packed layers and of all convolutions that can compute a ReLU."""
    return [name for name, module in model.named_modules() if isinstance(module, (PackedLayer, Conv2dReLU))]


def find_places(model: nn.Module, module: nn.Module) -> Iterator[tuple[Children, str]]:
    """Yield every place of a module in a model: the children of its parent, and its name among them."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is module:
                yield parent._modules, name


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Put `new` in all places of `old`; return the model, which is `new` where the model itself is `old`."""
    for children, name in find_places(model, old):
        children[name] = new
    return new if model is old else model


def find_relus_after_layers(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each layer with a ReLU after it in a Sequential, and the ReLU; not where hooks see what is between them."""
    for container in find_sequentials(model):
        for layer, relu in pairwise(container._modules.values()):
            if type(relu) is nn.ReLU and not has_call_hooks(relu) and not has_call_hooks(layer):
                yield layer, relu


def find_sequentials(model: nn.Module) -> list[nn.Sequential]:
    """Return every Sequential of a model, but for those of classes that may call their modules otherwise."""
    return [m for m in model.modules() if isinstance(m, nn.Sequential) and type(m) in (nn.Sequential, FusedSequential)]


def fuse_relus(model: nn.Module, convolutions: Collection[str] = ()) -> nn.Module:
    """Let packed layers, and the dense convolutions of these names, compute the ReLU after them; return the model."""
    chosen = {model.get_submodule(name) for name in convolutions}
    for layer in {layer for layer, _ in find_relus_after_layers(model)} & chosen:
        if Conv2dReLU.can_replace(layer):
            replace_module(model, layer, Conv2dReLU.from_conv2d(layer))
    choose_sequentials(model)
    return model


def choose_sequentials(model: nn.Module) -> None:
    """Let each Sequential call a layer and the ReLU after it as one where it has such a pair, and no other one."""
    for container in find_sequentials(model):
        has_pair = any(computes_relu(*pair) for pair in pairwise(container._modules.values()))
        container.__class__ = FusedSequential if has_pair else nn.Sequential


def copy_with_dense_layers(model: nn.Module, names: Sequence[str], source: nn.Module | None = None) -> nn.Module:
    """Return a copy of a model in which the layers of these names are dense and compute no ReLU.

    They are copies of the dense layers of the `source`, the model before it was packed, where that is given: packed
    values may have been rounded.
    """
    model = copy.deepcopy(model)
    for name in names:
        if isinstance(layer := model.get_submodule(name), (PackedLayer, Conv2dReLU)):
            origin = layer if source is None else source.get_submodule(name)
            dense = origin.dense() if isinstance(origin, (PackedLayer, Conv2dReLU)) else copy.deepcopy(origin)
            model = replace_module(model, layer, dense)
    choose_sequentials(model)
    choose_encoder_paths(model)
    return model


def choose_encoder_paths(model: nn.Module, before_packing: bool = False) -> None:
    """Let transformer encoders with packed parts call them one by one, with padded sequences.

    The fast path of `nn.TransformerEncoderLayer` calls none of its parts: it reads their dense weights, which a packed
    layer would have to unpack each time. The layer takes that path only for an activation that it knows. For the fast
    path, `nn.TransformerEncoder` makes nested tensors of padded sequences, which packed layers do not take.

    `before_packing` lets encoders without packed parts do the same, so that their parts receive what they will receive.
    """
    for module in model.modules():
        if not isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerEncoder)):
            continue
        packed = before_packing or any(isinstance(part, PackedLayer) for part in module.modules())
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0 if packed else classify_activation(module.activation)
        else:
            nested = vars(module).pop("use_nested_tensor_when_dense", getattr(module, "use_nested_tensor", False))
            module.use_nested_tensor = nested and not packed
            if packed:
                vars(module)["use_nested_tensor_when_dense"] = nested


def classify_activation(activation: Any) -> int:
    """Return the code of an activation in `nn.TransformerEncoderLayer`: 1 for ReLU, 2 for GELU, 0 for any other."""
    if activation is torch.nn.functional.relu or isinstance(activation, nn.ReLU):
        return 1
    return 2 if activation is torch.nn.functional.gelu or isinstance(activation, nn.GELU) else 0
