"""Channel groups from Torch-Pruning's dependency graph, and the operations that prevent their removal."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from ...errors import PomonaError
from ...models.example_inputs import ModelInputs
from .channel_group import ChannelGroup, LayerChannels
from .constant_inputs import LAYERS
from .divided_outputs import find_divided_layers

NORMS = (_BatchNorm, _InstanceNorm)  # the norms that process each channel independently


def find_groups(model: nn.Module, example: ModelInputs) -> list[ChannelGroup]:
    """Return the channel groups of a model, traced on an example."""
    pruning = import_torch_pruning()
    divided = find_divided_layers(model, example)
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = pruning.DependencyGraph().build_dependency(
            model, example, forward_fn=lambda model, example: example.call(model), verbose=False
        )
        ndim = example.tensors[0].ndim
        return [convert_group(graph, group, ndim, divided) for group in graph.get_all_groups()]


def convert_group(graph: Any, group: Any, ndim: int, divided: set[nn.Module]) -> ChannelGroup:
    """Convert a group of Torch-Pruning's graph, of a model whose input has `ndim` dimensions."""
    root, handler = group[0].dep.target.module, group[0].dep.handler
    producers: list[LayerChannels] = []
    norms: list[LayerChannels] = []
    readers: list[LayerChannels] = []
    obstacles: list[str | None] = []
    for item in group:
        node, module = item.dep.target, item.dep.target.module
        member = LayerChannels(module, torch.tensor(item.idxs), torch.tensor(item.root_idxs))
        is_reader = isinstance(module, LAYERS) and graph.is_in_channel_pruning_fn(item.dep.handler)
        if isinstance(module, LAYERS):
            (readers if is_reader else producers).append(member)
        elif isinstance(module, NORMS):
            norms.append(member)
        obstacles.append(find_obstacle(node, ndim))
        if not is_reader and module in divided:
            obstacles.append("the forward pass divides them, as into heads")
        if not is_reader and not node.outputs:
            obstacles.append("they are the model's output")
    if not readers:
        obstacles.append("no layer reads them")
    return ChannelGroup(
        size=len(group[0].idxs),
        producers=producers,
        norms=norms,
        readers=readers,
        obstacle=next(filter(None, obstacles), None),
        prune=lambda channels: graph.get_pruning_group(root, handler, channels).prune(),
    )


def find_obstacle(node: Any, ndim: int) -> str | None:
    """Return why channels that pass a node of the graph cannot be removed one by one, or None if they can."""
    kinds, module = import_torch_pruning().ops.OPTYPE, node.module
    if node.type == kinds.OUTPUT:
        return "they are the model's output"
    if isinstance(module, _ConvNd):
        return "a grouped convolution reads or produces them" if module.groups > 1 else None
    if node.type == kinds.SLICE:
        return "the forward pass selects some by index" if module.dim == 1 else None
    if node.type == kinds.ELEMENTWISE and "ConstantPad" in str(module):
        # `_saved_pad` lists two numbers for each dimension, from the last one: behind the image's come the channels'.
        pads_channels = any(node.grad_fn._saved_pad[2 * (ndim - 2) :])
        return "the forward pass adds channels of zeros" if pads_channels else None
    removable = (kinds.LINEAR, kinds.BN, kinds.IN, kinds.PRELU, kinds.CONCAT, kinds.ELEMENTWISE, kinds.RESHAPE)
    return None if node.type in removable else f"{type(module).__name__.strip('_')} mixes them with other channels"


def import_torch_pruning() -> Any:
    """Return the module `torch_pruning`, an optional dependency, or raise PomonaError if it is not installed."""
    try:
        import torch_pruning
    except ImportError as error:
        raise PomonaError("shrink needs Torch-Pruning, which is not installed: pip install torch-pruning.") from error
    return torch_pruning
