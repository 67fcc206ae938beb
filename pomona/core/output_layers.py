"""Output layers: those whose outputs are the outputs of the network, such as its classifiers and heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.fx import Graph, Node

from .layer_kind import layer_kind, stores_outputs_second
from .tracing import called_name

Weights = frozenset[int]  # the identities of parameters
NONE: Weights = frozenset()

SUMS = frozenset({"add", "iadd", "sub", "isub"})
# Functions of an input and a weight, where the weight need not belong to a layer.
PRODUCTS = frozenset(
    {"linear", "bilinear", "matmul", "imatmul", "mm", "bmm", "mv", "addmm", "baddbmm", "einsum", "tensordot"}
    | {f"conv{transposed}{dims}d" for transposed in ("", "_transpose") for dims in (1, 2, 3)}
    | {"embedding", "embedding_bag", "scaled_dot_product_attention"}
)
# Functions and attributes that read no values.
SHAPES = frozenset({"size", "dim", "numel", "len", "shape", "ndim", "device", "dtype", "is_cuda", "get_device"})


def find_output_weights(model: nn.Module, graphs: Sequence[Graph]) -> Weights:
    """Return the identities of the weights whose layers compute the model's outputs in any of its traced forwards.

    Where nothing was traced, or no layer is in it, the order of definition decides (`heads_by_definition`).
    """
    if not find_called_weights(model, graphs):
        return weights_of(heads_by_definition(model))
    return union(find_traced_outputs(model, graph) for graph in graphs)


def find_uncalled_weights(model: nn.Module, graphs: Sequence[Graph]) -> Weights:
    """Return the identities of the weights of layers that no traced forward calls, though it calls others.

    Nothing tells where they stand: they may be heads for another argument, or of another method of the model.
    """
    called = find_called_weights(model, graphs)
    layers = weights_of(module for module in model.modules() if is_head(module))
    return layers - called if layers & called else NONE


def find_called_weights(model: nn.Module, graphs: Sequence[Graph]) -> Weights:
    """Return the identities of the weights that traced forwards read, through their modules or by themselves."""
    nodes = [node for graph in graphs for node in graph.nodes]
    called = weights_of(model.get_submodule(str(node.target)) for node in nodes if node.op == "call_module")
    read = [node for node in nodes if node.op == "get_attr" and not all(map(reads_no_values, node.users))]
    return called.union(id(weight) for node in read for weight in weight_operand(model, node))


def find_traced_outputs(model: nn.Module, graph: Graph) -> Weights:
    """Return the identities of the weights whose layers compute the outputs of a graph.

    The graph is followed from the outputs backwards, through everything that is not a layer. Of the terms of a sum
    those count that lead to outputs only: the skip connection of a residual block also leads to other layers, and an
    output of the network remains as long as one term of the sum has it.
    """
    leads_to_outputs_only = find_nodes_for_outputs(model, graph)
    behind: dict[Node, Weights] = {}  # the weights of the layers behind each value
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if reads_no_values(node):
            behind[node] = NONE
        elif is_layer(model, node):
            behind[node] = layer_weights(model, node)
            if node.op == "call_module" and is_depthwise(model.get_submodule(str(node.target))):
                behind[node] |= union(behind[i] for i in inputs)  # a channel of the layer before is one of this layer
        else:
            own = [value for value in inputs if leads_to_outputs_only[value]] if called_name(node) in SUMS else inputs
            behind[node] = union(behind[i] for i in own) or union(behind[i] for i in inputs)
        if inputs and is_in_place(node):
            behind[inputs[0]] = behind[node]
        if node.op == "output":
            return behind[node]
    return NONE


def union(sets: Iterable[Weights]) -> Weights:
    """Return the union of any number of sets."""
    return NONE.union(*sets)


def weights_of(layers: Iterable[nn.Module]) -> Weights:
    """Return the identities of the layers' weights, under whatever names a parametrization stores them."""
    return frozenset(id(p) for layer in layers for p in layer.parameters() if p.ndim > 1)


# ---- nodes of the graph


def find_nodes_for_outputs(model: nn.Module, graph: Graph) -> dict[Node, bool]:
    """Return for each node whether its value leads to the model's outputs only, and to no further layer."""
    found: dict[Node, bool] = {}
    for node in reversed(graph.nodes):
        found[node] = all(reads_no_values(u) or (found[u] and not is_layer(model, u)) for u in node.users)
    return found


def is_layer(model: nn.Module, node: Node) -> bool:
    """Return whether a node computes new channels: a product, or a module with weights that is not a norm."""
    if node.op != "call_module":
        return called_name(node) in PRODUCTS
    module = model.get_submodule(str(node.target))
    return layer_kind(module) != "norm" and any(p.ndim > 1 for p in module.parameters())


def layer_weights(model: nn.Module, node: Node) -> Weights:
    """Return the weights that compute the outputs of a layer, of the last layers inside a module, or of a product."""
    if node.op != "call_module":
        return frozenset(id(p) for operand in node.all_input_nodes for p in weight_operand(model, operand))
    module = model.get_submodule(str(node.target))
    return weights_of([module] if is_head(module) else heads_by_definition(module))


def reads_no_values(node: Node) -> bool:
    """Return whether a node asks a tensor for its shape, type or device, or makes another one like it."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = str(node.args[1]) if node.target is getattr and len(node.args) > 1 else called_name(node)
    return name in SHAPES or name.startswith("new_") or name.endswith("_like")


def is_in_place(node: Node) -> bool:
    """Return whether a node writes into its first operand."""
    name = str(getattr(node.target, "__name__", node.target))
    return node.op in ("call_function", "call_method") and name.endswith("_") and not name.endswith("__")


def weight_operand(model: nn.Module, node: Node) -> Iterator[nn.Parameter]:
    """Yield the parameter that an operand of a product holds, perhaps transposed or normalised."""
    while node.op != "get_attr" and len(node.all_input_nodes) == 1 and not is_layer(model, node):
        node = node.all_input_nodes[0]
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        value = getattr(model.get_submodule(owner), name)
        if isinstance(value, nn.Parameter) and value.ndim > 1:
            yield value


# ---- the order of definition


def heads_by_definition(model: nn.Module) -> list[nn.Module]:
    """Return the last layer and the last linear layer that a model defines, each with the heads defined beside it.

    Modules that are defined one after the other are heads of one network if they take the same number of inputs, and
    none has so many outputs that the next could take them.
    """
    layers = [module for module in model.modules() if is_head(module)]
    last = [layers[-1:], [layer for layer in layers if layer_kind(layer) == "linear"][-1:]]
    return [head for found in last for layer in found for head in (layer, *heads_beside(model, layer))]


def is_head(module: nn.Module) -> bool:
    """Return whether a module is a layer of which each output is one row or filter of its weight."""
    return layer_kind(module) in ("linear", "convolution")


def is_depthwise(module: nn.Module) -> bool:
    """Return whether a module is a convolution that maps each channel to one channel of its own."""
    if not isinstance(module, nn.modules.conv._ConvNd):
        return False
    return module.groups == module.in_channels == module.out_channels > 1


def heads_beside(model: nn.Module, layer: nn.Module) -> Iterator[nn.Module]:
    """Yield the last layers of the modules that are defined right before a layer, or its parents, and are heads too."""
    path = next(name for name, module in model.named_modules() if module is layer).split(".")
    for depth, child in enumerate(path if path != [""] else []):
        parent = model.get_submodule(".".join(path[:depth]))
        if isinstance(parent, nn.Sequential):
            continue
        siblings = [[m for m in module.modules() if is_head(m)] for _, module in parent.named_children()]
        names = [name for name, _ in parent.named_children()]
        before = [layers for layers in siblings[: names.index(child)] if layers]
        inputs = count_inputs(siblings[names.index(child)][0])
        for layers in reversed(before):
            if count_inputs(layers[0]) != inputs or count_outputs(layers[-1]) == inputs:
                break
            yield layers[-1]


def count_inputs(layer: nn.Module) -> int:
    """Return the number of inputs or input channels of a layer."""
    return channel_count(layer, "in")


def count_outputs(layer: nn.Module) -> int:
    """Return the number of outputs or output channels of a layer."""
    return channel_count(layer, "out")


def channel_count(layer: nn.Module, side: str) -> int:
    """Return `in_features`, `out_channels` or the like, or what the shape of the weight says."""
    for attribute in (f"{side}_features", f"{side}_channels", f"{side}1_features"):
        if hasattr(layer, attribute):
            return int(getattr(layer, attribute))
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    return weight.shape[int(stores_outputs_second(layer) == (side == "out"))]
