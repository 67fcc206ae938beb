"""Coupled parameters: the bias of a removed filter and the norms behind it, which would make its zeros a constant."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn
from torch.fx import Graph, Node

from .channels import Channels, LayerOutputs, add_channels, concatenate_channels, multiply_channels
from .output_layers import count_outputs, is_depthwise, is_head, is_in_place
from .targets import Target
from .tracing import called_name, trace_both_modes

# Norms with a gain and a shift for each channel. A channel of zeros behind a zero gain and shift is a channel of zeros.
NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm, nn.LayerNorm)

# Modules and functions that map a channel of zeros to zeros, and keep the order of the channels.
ZERO_PRESERVING = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Hardswish, nn.Softsign, nn.Identity, nn.Flatten, nn.Upsample, nn.RMSNorm, nn.LocalResponseNorm),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
ZERO_FUNCTIONS = frozenset(
    {"relu", "relu6", "leaky_relu", "prelu", "elu", "celu", "selu", "gelu", "silu", "mish", "tanh", "hardswish"}
    | {"dropout", "dropout1d", "dropout2d", "dropout3d", "flatten", "interpolate", "contiguous", "clone", "to"}
    | {f"{kind}_pool{dims}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for dims in (1, 2, 3)}
)


@dataclass(frozen=True)
class Coupling:
    """A module whose vectors have one entry for each of these channels."""

    name: str
    module: nn.Module
    channels: Channels

    def vectors(self) -> Iterator[Target]:
        """Yield the parameters that are pruned with the channels."""
        for leaf in ("weight", "bias"):
            vector = self.module._parameters.get(leaf)
            if vector is not None and vector.ndim == 1 and len(vector) == self.channels.size:
                tags = frozenset({"norm" if isinstance(self.module, NORMS) else "bias"})
                yield Target(f"{self.name}.{leaf}".removeprefix("."), self.module, leaf, vector.shape, tags)


def find_coupled(model: nn.Module, leaders: Sequence[Target]) -> list[Coupling]:
    """Return the leaders' modules and the norms behind them, with the outputs that each of their channels follows."""
    # Recurrent and attention weights hold several gates or heads; spectral_norm calls the weight weight_orig.
    by_weight = {id(t.parameter): t for t in leaders if t.leaf in ("weight", "weight_orig") and is_head(t.module)}
    layers = {
        module: LayerOutputs(leader.outputs, leader)
        for module in model.modules()
        if (leader := by_weight.get(id(stored_weight(module)))) is not None
    }
    graphs = trace_both_modes(model)
    behind = follow_graphs(model, graphs, layers) if graphs else norms_by_definition(model, layers)
    names = {module: name for name, module in model.named_modules()}
    return [Coupling(names[module], module, channels) for module, channels in (layers | behind).items()]


def stored_weight(module: nn.Module) -> nn.Parameter | None:
    """Return the parameter that holds a layer's weight."""
    return module._parameters.get("weight_orig", module._parameters.get("weight"))


def fits(norm: nn.Module, channels: Channels | None) -> bool:
    """Return whether a norm has an entry for each of these channels, some of which can be removed."""
    if channels is None or not channels.leaders:
        return False
    if isinstance(norm, nn.LayerNorm):  # over the last dimension, which holds the outputs of linear layers only
        linear = all("linear" in leader.tags for leader in channels.leaders)
        return linear and norm.normalized_shape == (channels.size,)
    size = norm.num_channels if isinstance(norm, nn.GroupNorm) else norm.num_features
    return bool(size == channels.size)


def norms_by_definition(model: nn.Module, layers: Mapping[nn.Module, Channels]) -> dict[nn.Module, Channels]:
    """Return norm → channels, where each norm follows the layer that is defined right before it."""
    if any(isinstance(module, NORMS) for module in model.modules()):
        warnings.warn(
            f"the forward of {type(model).__name__} cannot be traced: each norm is assumed to follow the layer "
            "that it is defined after; where that is wrong, a removed filter may leave a constant behind.",
            stacklevel=7,
        )
    neighbours = [pair for module in model.modules() for pair in pairwise(module.children())]
    return {
        norm: layers[layer]
        for layer, norm in neighbours
        if layer in layers and isinstance(norm, NORMS) and fits(norm, layers[layer])
    }


def follow_graphs(
    model: nn.Module, graphs: Sequence[Graph], layers: Mapping[nn.Module, Channels]
) -> dict[nn.Module, Channels]:
    """Return module → channels for the norms and depthwise convolutions of traced forwards.

    A module that takes a sum, or is called several times, has a channel removed only if every term or every call has.
    One that takes a concatenation is divided among its parts.
    """
    found: dict[nn.Module, list[Channels | None]] = defaultdict(list)  # for each call of a module
    for graph in graphs:
        for module, channels in follow_calls(model, graph, layers):
            if channels not in found[module]:
                found[module].append(channels)
    merged = {module: add_channels(terms) for module, terms in found.items()}
    return {module: channels for module, channels in merged.items() if channels is not None and channels.leaders}


def follow_calls(
    model: nn.Module, graph: Graph, layers: Mapping[nn.Module, Channels]
) -> Iterator[tuple[nn.Module, Channels | None]]:
    """Yield (module, channels) for each call of a norm or depthwise convolution in a traced forward."""
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    values: dict[Node, Channels | None] = {}
    for node in graph.nodes:
        inputs = [values[value] for value in node.all_input_nodes]
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, NORMS):
            taken = inputs[0] if inputs and fits(module, inputs[0]) else None
            yield module, taken
            values[node] = taken if maps_zero_to_zero(module) and calls[node.target] == 1 else None
        elif module is not None and is_head(module):
            values[node] = layers.get(module, Channels(count_outputs(module)))
            if is_depthwise(module):
                values[node] = multiply_channels([values[node], inputs[0]])
                yield module, values[node]
        else:
            values[node] = follow_channels(node, module, inputs)
        if node.all_input_nodes and is_in_place(node):
            values[node.all_input_nodes[0]] = values[node]


def maps_zero_to_zero(norm: nn.Module) -> bool:
    """Return whether a removed channel is zero behind the norm: by a gain of zero, or by statistics of its own."""
    return norm.weight is not None or not isinstance(norm, (nn.GroupNorm, nn.LayerNorm))


def follow_channels(node: Node, module: nn.Module | None, inputs: Sequence[Channels | None]) -> Channels | None:
    """Return the channels of what a node computes from its inputs' channels, or None where they are not known."""
    name = called_name(node)
    if module is not None:
        return inputs[0] if inputs and isinstance(module, ZERO_PRESERVING) else None
    if node.op not in ("call_function", "call_method") or not inputs:
        return None
    if name in ZERO_FUNCTIONS:
        return inputs[0]
    if name in ("mul", "imul"):
        return multiply_channels(inputs)
    if name in ("add", "iadd") and len(node.args) == 2 and all(isinstance(term, Node) for term in node.args):
        return add_channels(inputs)
    return concatenate_channels(inputs) if name in ("cat", "concat", "concatenate") else None
