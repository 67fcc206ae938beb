"""Replacement of modules in a model: dense layers by packed ones and back, and ReLUs that a layer computes itself."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .layers import Conv2dReLU, PackedLayer, PackedWeightLayer, is_packable
from .layers.base import has_call_hooks

Children = dict[str, Any]  # the modules of a container by name


class Fused(nn.Identity):
    """The placeholder of a ReLU that the layer before it computes."""

    def __init__(self, relu: nn.ReLU) -> None:
        super().__init__()
        self.inplace = relu.inplace


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
    """Return the names of all packed layers and of all convolutions that compute their ReLU."""
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


def find_relus_after_layers(model: nn.Module) -> Iterator[tuple[nn.Module, Children, str]]:
    """Yield each layer with a ReLU after it in a Sequential: the layer, the Sequential's children, the ReLU's name.

    A layer that is in more than one place of the model is left out: a ReLU may follow it in one of them only. So is one
    with hooks, and one whose ReLU has them: they see what is between the two.
    """
    for container in [m for m in model.modules() if type(m) is nn.Sequential]:
        for name, next_name in pairwise(container._modules):
            layer, relu = container._modules[name], container._modules[next_name]
            if type(relu) is not nn.ReLU or has_call_hooks(relu) or has_call_hooks(layer):
                continue
            if len(list(find_places(model, layer))) == 1:
                yield layer, container._modules, next_name


def fuse_relus(model: nn.Module, convolutions: Collection[str] = ()) -> nn.Module:
    """Let packed layers, and the dense convolutions of these names, compute the ReLU after them; return the model."""
    chosen = {model.get_submodule(name) for name in convolutions}
    for layer, children, relu in list(find_relus_after_layers(model)):
        if isinstance(layer, PackedWeightLayer):
            layer.relu = True
        elif layer in chosen and Conv2dReLU.can_replace(layer):
            replace_module(model, layer, Conv2dReLU.from_conv2d(layer))
        else:
            continue
        children[relu] = Fused(children[relu])
    return model


def restore_dense_layer(model: nn.Module, layer: PackedLayer | Conv2dReLU, dense: nn.Module) -> nn.Module:
    """Put back the dense form of a layer, and the ReLU that the layer computed; return the model."""
    for children, name in find_places(model, layer):
        following = dict(pairwise(children)).get(name, name)
        if isinstance(fused := children[following], Fused):
            children[following] = nn.ReLU(fused.inplace)
    return replace_module(model, layer, dense)


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
            model = restore_dense_layer(model, layer, dense)
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
