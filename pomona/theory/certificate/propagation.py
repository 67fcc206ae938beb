"""One pass through the graph of two networks that bounds how far their values can be apart."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from ...core.tracing import trace
from ...errors import PomonaError, require
from .affine_map import AFFINE_LAYERS, BATCH_NORMS, AffineMap, batch_norm_coefficients
from .gradient_attack import device_of
from .lipschitz import function_lipschitz, module_lipschitz, unsupported_operation
from .paired_value import PairedValue, add_values, apply_lipschitz, concatenate_values, euclidean_norm
from .regions import Region

SUMS = ("add", "iadd", "sub", "isub")
CONCATENATIONS = ("cat", "concat")
# In-place operators, and the ones that leave their operands unchanged.
OUT_OF_PLACE: dict[Any, Any] = {operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul}


@dataclass(frozen=True)
class Layer:
    """The norms of one layer: dense, pruned and of the removed part; `gap` bounds the distance of the outputs."""

    name: str
    dense: float
    pruned: float
    removed: float
    gap: float


class GapPropagation:
    """The pass through the graph of a dense and a pruned network; `layers` has one entry for each affine layer."""

    def __init__(self, dense: nn.Module, pruned: nn.Module) -> None:
        graph = trace(dense)
        if graph is None:
            raise PomonaError(
                f"{type(dense).__name__} cannot be traced by torch.fx, so there is no graph to certify: "
                "leave out control flow that depends on values."
            )
        self.graph, self.models = graph, (dense, pruned)
        self.layers: list[Layer] = []
        self.folded: set[fx.Node] = set()  # batch norms that were folded into the layer before them

    def run(self, shape: tuple[int, ...], region: Region) -> PairedValue:
        """Return the bounds of the networks' output, for inputs of this shape in the region."""
        centre, spread = region.centre(shape)
        centre = centre.to(device_of(self.models[0]))
        known: dict[fx.Node, Any] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                require(not known, "certify takes networks of one input.")
                known[node] = PairedValue(centre.clone(), centre.clone(), spread, spread, 0.0)
            elif node.op == "output":
                is_tensor = isinstance(known.get(node.args[0]), PairedValue)
                require(is_tensor, "certify takes networks of one output, a tensor.")
                return known[node.args[0]]
            else:
                value = self.propagate(node, known)
                known[node] = value.with_capped_gap() if isinstance(value, PairedValue) else value
                if self.is_in_place(node):  # later readers of the input see the new value
                    known[node.all_input_nodes[0]] = known[node]
        raise AssertionError("a graph ends with its output")

    def propagate(self, node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
        """Return the value of a node from those of its inputs: a PairedValue, or a plain value such as a shape."""
        if node in self.folded:
            return known[node.all_input_nodes[0]]
        if node.op == "get_attr":
            raise unsupported_operation(node, str(node.target))
        values = [value for n in operands(node) if isinstance(value := known[n], PairedValue)]
        if node.op == "call_module":
            modules = tuple(m.get_submodule(str(node.target)) for m in self.models)
            if isinstance(modules[0], AFFINE_LAYERS):
                return self.propagate_affine(node, values[0], modules)
            constant = module_lipschitz(modules[0], node, values[0].dense.shape)
            return apply_lipschitz(values[0], [modules[0](values[0].dense), modules[1](values[0].pruned)], constant)
        results = [
            evaluate_node(node, {n: select_side(known[n], side) for n in node.all_input_nodes})
            for side in ("dense", "pruned")
        ]
        if not isinstance(results[0], Tensor):
            return results[0]  # a shape
        name = (node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")).rstrip("_")
        if name in SUMS and "alpha" not in node.kwargs:
            return add_values(values, results)
        if name in CONCATENATIONS:
            return concatenate_values(values, results)
        require(len(values) == 1, str(unsupported_operation(node, name)))
        return apply_lipschitz(values[0], results, function_lipschitz(name, node, values[0].dense, results[0]))

    def is_in_place(self, node: fx.Node) -> bool:
        """Return whether a node overwrites its input."""
        if node.op == "call_module":
            return bool(getattr(self.models[0].get_submodule(str(node.target)), "inplace", False))
        if node.op == "call_method":
            return str(node.target).endswith("_")
        return node.target in OUT_OF_PLACE or bool(node.kwargs.get("inplace"))

    def propagate_affine(self, node: fx.Node, value: PairedValue, modules: tuple[nn.Module, ...]) -> PairedValue:
        """Return the value after a linear layer, a convolution or a batch norm, and add the layer to `layers`."""
        dense, pruned = self.affine_maps(node, value, modules)
        removed = pruned - dense
        shape = value.dense.shape
        dense_norm, pruned_norm = dense.norm_bound(shape), pruned.norm_bound(shape) if removed else None
        pruned_norm = dense_norm if pruned_norm is None else pruned_norm
        removed_norm = removed.norm_bound(shape) if removed else 0.0
        results = [dense(value.dense), pruned(value.pruned)]
        places = results[0].numel() // len(dense.bias)  # outputs that each bias is added to
        spreads = [
            norm * spread + affine.rounding_bound(at, places)
            for norm, spread, affine, at in (
                (dense_norm, value.dense_spread, dense, value.dense),
                (pruned_norm, value.pruned_spread, pruned, value.pruned),
            )
        ]
        # The removed part may act on the dense or on the pruned value; both bounds hold.
        gap = min(
            norm * value.gap + euclidean_norm(removed(at)) + removed.rounding_bound(at, places) + removed_norm * spread
            for norm, spread, at in (
                (pruned_norm, value.dense_spread, value.dense),
                (dense_norm, value.pruned_spread, value.pruned),
            )
        )
        result = PairedValue(results[0], results[1], spreads[0], spreads[1], gap).with_capped_gap()
        name = str(node.target).partition(".")[2] or type(modules[0]).__name__
        self.layers.append(Layer(name, dense_norm, pruned_norm, removed_norm, result.gap))
        return result

    def affine_maps(self, node: fx.Node, value: PairedValue, modules: tuple[nn.Module, ...]) -> list[AffineMap]:
        """Return the maps of both networks at a node, with the batch norm that follows folded in where possible."""
        maps = [AffineMap.of(module) for module in modules]
        after = next(iter(node.users)) if len(node.users) == 1 else node
        norms = [m.get_submodule(str(after.target)) for m in self.models] if after.op == "call_module" else []
        # A linear layer on more than two axes has its outputs on the last one, and a batch norm works on the second.
        channels_second = not isinstance(modules[0], nn.Linear) or value.dense.ndim == 2
        if after is not node and norms and isinstance(norms[0], BATCH_NORMS) and channels_second:
            maps = [m.then_scale(*batch_norm_coefficients(n)) for m, n in zip(maps, norms, strict=True)]
            self.folded.add(after)
        return maps


def operands(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a node takes as arguments, each as often as it is taken."""
    leaves, _ = tree_flatten((node.args, dict(node.kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node)]


def evaluate_node(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    """Return the result of a node's function or method on plain values, without changing them in place."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: known[n])
    if node.op == "call_method":
        return getattr(args[0], str(node.target).rstrip("_"))(*args[1:], **kwargs)
    function = OUT_OF_PLACE.get(node.target, node.target)
    return function(*args, **{k: v for k, v in kwargs.items() if k != "inplace"})


def select_side(value: Any, side: str) -> Any:
    """Return the dense or pruned tensor of a PairedValue, and any other value as it is."""
    return getattr(value, side) if isinstance(value, PairedValue) else value
