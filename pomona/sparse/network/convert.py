"""The conversion of a traced model to steps, as far as every node from the input on is one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn

from ...core.tracing import LayerTracer, called_name, trace
from ..conv_geometry import ConvGeometry
from ..layers import Conv2dReLU, PackedLayer
from ..layers.conv2d import PackedConv2d
from ..layers.linear import PackedLinear
from .snapshot import ModelSnapshot
from .steps import Activation, Convolution, MaxPool, Mean, SparseWeight, Step, UnsupportedError

PASSED_MODULES = (nn.Identity, nn.Dropout, nn.Dropout2d)  # which return their input in evaluation mode
ONE = (1, 1)
POINTWISE = ConvGeometry(ONE, ONE, (0, 0), ONE)
LARGE_LINEAR = 1 << 16  # survivors of a linear layer from which on it is a step only if it is sparse
LINEAR_DENSITY = 0.3


class PackedLayerTracer(LayerTracer):
    """A tracer for which packed layers, too, are one call, and which refuses a forward that assigns attributes."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (PackedLayer, Conv2dReLU)) or super().is_leaf_module(m, module_qualified_name)

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        before = ModelSnapshot(root)
        graph = super().trace(root, concrete_args)
        if not before.has_same_structure():  # what a forward stores or creates has no place in a graph
            raise UnsupportedError(root)
        return graph


@dataclass
class Network:
    """The begin of a model as steps, and the rest as a module, or None where nothing is left."""

    input: Activation
    steps: list[Step]
    output: Activation
    is_flat: bool  # whether the output is (n, channels)
    make_begin: Callable[[], nn.Module]  # what the steps compute, as a module
    rest: nn.Module | None


def trace_network(model: nn.Module) -> fx.Graph | None:
    """Return the graph of a model's forward, for images of any shape, or None where it has none."""
    forwards = [vars(module).get("forward") for module in list(model.modules())[1:]]
    if any(isinstance(forward, (FunctionType, MethodType)) for forward in forwards):  # of no class
        return None
    graph = trace(model, PackedLayerTracer)
    if graph is not None:
        remove_passed_modules(model, graph)
    return graph


def convert_network(model: nn.Module, shape: tuple[int, int, int], graph: fx.Graph | None = None) -> Network | None:
    """Return the model for images of a shape, channels first, as steps; None where it does not begin with any.

    `graph` is that of its forward, which is traced where it is not given.
    """
    graph = trace_network(model) if graph is None else graph
    if graph is None:
        return None
    nodes = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder" and node.users]
    if len(inputs) != 1:
        return None
    nodes = [inputs[0], *(node for node in nodes if node.op != "placeholder")]
    cut = find_cut(nodes, count_convertible(model, nodes, shape))
    if cut is None:
        return None
    end, last = cut
    converter = Converter(model, nodes[0], shape)
    for node in nodes[1:end]:
        converter.convert(node)
    if not any(isinstance(step, Convolution) for step in converter.steps):
        return None
    output, is_flat = converter.results[last]
    make_begin = partial(copy_nodes, model, nodes[1:end], nodes[0], last)
    rest = None if nodes[end].op == "output" and nodes[end].args[0] is last else copy_nodes(model, nodes[end:], last)
    return Network(converter.input, converter.steps, output, is_flat, make_begin, rest)


def remove_passed_modules(model: nn.Module, graph: fx.Graph) -> None:
    """Remove the calls of modules that return their input."""
    for node in list(graph.nodes):
        if node.op == "call_module" and isinstance(model.get_submodule(str(node.target)), PASSED_MODULES):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def count_convertible(model: nn.Module, nodes: Sequence[fx.Node], shape: tuple[int, int, int]) -> int:
    """Return how many of the nodes from the first on are steps."""
    converter = Converter(model, nodes[0], shape)
    for count, node in enumerate(nodes[1:], 1):
        try:
            converter.convert(node)
        except UnsupportedError:
            return count
    return len(nodes)


def find_cut(nodes: Sequence[fx.Node], limit: int) -> tuple[int, fx.Node] | None:
    """Return the last place, at most `limit`, where one result alone is used further on, and that result's node."""
    places = {node: place for place, node in enumerate(nodes)}
    for end in range(limit, 1, -1):
        used = [node for node in nodes[:end] if any(places.get(user, 0) >= end for user in node.users)]
        if len(used) == 1 and used[0] is not nodes[0]:
            return end, used[0]
    return None


def copy_nodes(
    model: nn.Module, nodes: Sequence[fx.Node], first: fx.Node, last: fx.Node | None = None
) -> fx.GraphModule:
    """Return nodes as a module that shares the layers of the model: a function of `first`, which returns `last`."""
    graph = fx.Graph()
    copies = {first: graph.placeholder("x")}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda used: copies[used])
    if last is not None:
        graph.output(copies[last])
    return fx.GraphModule(model, graph)


class Converter:
    """The steps of the nodes that were converted so far, and the results of these nodes."""

    def __init__(self, model: nn.Module, first: fx.Node, shape: tuple[int, int, int]) -> None:
        self.model = model
        self.input = Activation(*shape)
        self.steps: list[Step] = []
        self.results: dict[Any, tuple[Activation, bool]] = {first: (self.input, False)}  # and whether it is flat

    def convert(self, node: fx.Node) -> None:
        """Add the step of a node, or make it part of the one before; raise UnsupportedError where it is none."""
        if node.op == "call_module":
            self.convert_module(node, self.model.get_submodule(str(node.target)))
            return
        convert = FUNCTIONS.get(called_name(node)) if node.op in ("call_function", "call_method") else None
        try:
            call = inspect.signature(convert).bind(self, node, *node.args, **node.kwargs)  # type: ignore[arg-type]
        except TypeError as error:  # no such conversion, or not of these arguments
            raise UnsupportedError(node) from error
        convert(*call.args, **call.kwargs)  # type: ignore[misc]

    def convert_module(self, node: fx.Node, layer: nn.Module) -> None:
        """Convert the call of a module."""
        arguments = node.all_input_nodes
        if len(arguments) != 1 or len(node.args) + len(node.kwargs) != 1:
            raise UnsupportedError(node)
        x = arguments[0]
        if isinstance(layer, (PackedConv2d, nn.Conv2d)):
            self.add_conv2d(node, x, layer)
        elif isinstance(layer, (PackedLinear, nn.Linear)):
            self.add_linear(node, x, layer)
        elif type(layer) is nn.BatchNorm2d:
            self.add_norm(node, x, layer)
        elif type(layer) is nn.ReLU:
            self.add_relu(node, x, layer.inplace)
        elif type(layer) is nn.MaxPool2d:
            self.add_max_pool(node, x, layer)
        elif type(layer) is nn.AvgPool2d:
            self.add_average_pool(node, x, layer)
        elif type(layer) is nn.AdaptiveAvgPool2d and layer.output_size in (1, ONE):
            self.add_mean(node, x, is_flat=False)
        elif type(layer) is nn.Flatten:
            self.flatten(node, x, layer.start_dim, layer.end_dim)
        else:
            raise UnsupportedError(node)

    def add_step(self, node: fx.Node, step: Step, is_flat: bool = False) -> None:
        """Add a step, whose output is the result of a node."""
        self.steps.append(step)
        self.results[node] = step.output, is_flat

    def read_result(self, x: Any) -> tuple[Activation, bool]:
        """Return the result of a node, and whether it is flat; raise UnsupportedError for anything else."""
        if not isinstance(x, fx.Node) or x not in self.results:
            raise UnsupportedError(x)
        return self.results[x]

    def read_images(self, x: Any) -> Activation:
        """Return the result of a node; raise UnsupportedError unless it is of images."""
        activation, is_flat = self.read_result(x)
        if is_flat:
            raise UnsupportedError(x)
        return activation

    def has_other_readers(self, x: fx.Node) -> bool:
        """Return whether more than one node reads the result of a node, under any of its names."""
        activation, _ = self.results[x]
        names = [node for node, (result, _) in self.results.items() if result is activation]
        return sum(user not in names for node in names for user in node.users) > 1

    def open_convolution(self, x: fx.Node) -> Convolution | None:
        """Return the convolution whose output is this node's, if nothing else reads it and no ReLU is part of it."""
        activation, _ = self.results[x]
        step = next((step for step in self.steps if step.output is activation), None)
        is_open = isinstance(step, Convolution) and not step.relu and not self.has_other_readers(x)
        return step if is_open else None  # type: ignore[return-value]

    def convolution_of(self, node: fx.Node, x: fx.Node) -> Convolution:
        """Return a convolution whose output is `node`: the one of x where that can compute it, else a copy of x."""
        images = self.read_images(x)
        step = self.open_convolution(x)
        if step is None or step.residual is not None:
            step = Convolution(images, POINTWISE, SparseWeight.identity(images.channels))
            self.add_step(node, step)
        self.results[node] = step.output, False
        return step

    def add_conv2d(self, node: fx.Node, x: fx.Node, layer: PackedConv2d | nn.Conv2d) -> None:
        """Add a convolution, dense or packed."""
        images = self.read_images(x)
        known = isinstance(layer, PackedConv2d) or type(layer) is nn.Conv2d or isinstance(layer, Conv2dReLU)
        if not known or getattr(layer, "groups", 1) != 1 or layer.padding_mode != "zeros":
            raise UnsupportedError(node)
        left, right, top, bottom = (
            layer.border if isinstance(layer, PackedConv2d) else layer._reversed_padding_repeated_twice
        )
        if left != right or top != bottom or images.channels != layer.in_channels:
            raise UnsupportedError(node)
        geometry = ConvGeometry(layer.kernel_size, layer.stride, (top, left), layer.dilation)  # type: ignore[arg-type]
        self.add_step(node, Convolution(images, geometry, SparseWeight.from_dense(layer.weight, layer.bias)))

    def add_linear(self, node: fx.Node, x: fx.Node, layer: PackedLinear | nn.Linear) -> None:
        """Add a linear layer on flattened images of one pixel, as a convolution."""
        vector, is_flat = self.read_result(x)
        if not is_flat or type(layer) not in (PackedLinear, nn.Linear) or vector.channels != layer.in_features:
            raise UnsupportedError(node)
        weight = SparseWeight.from_dense(layer.weight, layer.bias)
        if len(weight.values) > max(LARGE_LINEAR, LINEAR_DENSITY * layer.in_features * layer.out_features):
            raise UnsupportedError(node)
        self.add_step(node, Convolution(vector, POINTWISE, weight), is_flat=True)

    def add_norm(self, node: fx.Node, x: fx.Node, norm: nn.BatchNorm2d) -> None:
        """Fold a batch norm into the convolution before it."""
        mean, variance = norm.running_mean, norm.running_var
        if mean is None or variance is None or norm.training:
            raise UnsupportedError(node)
        scale = (variance.detach().double() + norm.eps).rsqrt()
        if norm.weight is not None:
            scale = scale * norm.weight.detach().double()
        shift = -mean.detach().double() * scale
        if norm.bias is not None:
            shift = shift + norm.bias.detach().double()
        self.convolution_of(node, x).weight.scale_rows(scale, shift)

    def add_relu(self, node: fx.Node, x: fx.Node, inplace: bool = False) -> None:
        """Let the convolution before it compute a ReLU."""
        _, is_flat = self.read_result(x)
        if inplace and self.has_other_readers(x):  # they see its result
            raise UnsupportedError(node)
        step = self.open_convolution(x)
        if step is None:
            step = self.convolution_of(node, x)
        step.relu = True
        self.results[node] = step.output, is_flat

    def add_sum(self, node: fx.Node, x: Any, other: Any, inplace: bool = False) -> None:
        """Let a convolution add the other summand to its output."""
        first, second = self.read_images(x), self.read_images(other)
        shapes = {(a.channels, a.height, a.width) for a in (first, second)}
        if len(shapes) > 1 or x is other or (inplace and self.has_other_readers(x)):
            raise UnsupportedError(node)
        step, residual = self.open_convolution(x), second
        if step is None or step.residual is not None:
            step, residual = self.open_convolution(other), first
        if step is None or step.residual is not None:
            step, residual = self.convolution_of(node, x), second
        self.steps.remove(step)  # the other summand may be computed after it
        self.steps.append(step)
        step.residual = residual
        self.results[node] = step.output, False

    def add_max_pool(self, node: fx.Node, x: fx.Node, pool: nn.MaxPool2d) -> None:
        """Add a max pool."""
        if pool.ceil_mode or pool.return_indices:
            raise UnsupportedError(node)
        geometry = ConvGeometry.from_pairs(*map(as_pair, (pool.kernel_size, pool.stride, pool.padding, pool.dilation)))
        self.add_step(node, MaxPool(self.read_images(x), geometry))

    def add_average_pool(self, node: fx.Node, x: fx.Node, pool: nn.AvgPool2d) -> None:
        """Add an average pool, as a convolution of every channel with itself."""
        images = self.read_images(x)
        kernel, stride, padding = map(as_pair, (pool.kernel_size, pool.stride, pool.padding))
        if pool.ceil_mode or pool.divisor_override or (max(padding) and not pool.count_include_pad):
            raise UnsupportedError(node)
        geometry, channels = ConvGeometry(kernel, stride, padding, ONE), images.channels
        columns = torch.arange(channels * geometry.taps)
        values = torch.full((len(columns),), 1 / geometry.taps).double()
        weight = SparseWeight(columns // geometry.taps, columns, values, torch.zeros(channels).double())
        self.add_step(node, Convolution(images, geometry, weight))

    def add_mean(self, node: fx.Node, x: fx.Node, is_flat: bool) -> None:
        """Add the mean over all pixels."""
        self.add_step(node, Mean(self.read_images(x)), is_flat)

    def add_mean_method(self, node: fx.Node, x: fx.Node, dim: Any = None, keepdim: bool = False) -> None:
        """Add `x.mean(dim, keepdim)` over both dimensions of images."""
        if dim not in ((2, 3), [2, 3], (-2, -1), [-2, -1]) or type(keepdim) is not bool:
            raise UnsupportedError(node)
        self.add_mean(node, x, not keepdim)

    def flatten(self, node: fx.Node, x: fx.Node, start_dim: int = 0, end_dim: int = -1) -> None:
        """Flatten images of one pixel."""
        images, is_flat = self.read_result(x)
        if start_dim != 1 or end_dim not in (-1, 1 if is_flat else 3) or images.pixels != 1:
            raise UnsupportedError(node)
        self.results[node] = images, True

    def add_subsampling(self, node: fx.Node, x: fx.Node, index: Any) -> None:
        """Add `x[:, :, ::i, ::j]`, as a convolution of stride (i, j) that copies."""
        images = self.read_images(x)
        slices = index if isinstance(index, tuple) and all(isinstance(part, slice) for part in index) else ()
        ends = [part for one in slices for part in (one.start, one.stop)]
        steps = [1 if one.step is None else one.step for one in slices]
        plain = len(slices) == 4 and ends == [None] * 8 and all(type(step) is int and step > 0 for step in steps)
        if not plain or steps[:2] != [1, 1]:
            raise UnsupportedError(node)
        geometry = ConvGeometry(ONE, (steps[2], steps[3]), (0, 0), ONE)
        self.add_step(node, Convolution(images, geometry, SparseWeight.identity(images.channels)))

    def add_channels(self, node: fx.Node, x: fx.Node, pad: Any, mode: str = "constant", value: Any = None) -> None:
        """Add `F.pad(x, …)` of zero channels, as rows of zeros of the convolution before it."""
        self.read_images(x)
        sizes = list(pad) if isinstance(pad, (tuple, list)) else []
        counts = [size for size in sizes if type(size) is int and size >= 0]
        if len(counts) != 6 or len(sizes) != 6 or sizes[:4] != [0] * 4 or mode != "constant" or value not in (None, 0):
            raise UnsupportedError(node)
        step = self.convolution_of(node, x)
        step.weight.pad_rows(*sizes[4:])
        step.update_output()
        self.results[node] = step.output, False


def as_pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return a size given as one number or two."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


# The conversions of functions and methods, by the names of those.
FUNCTIONS: dict[str, Callable[..., None]] = {
    "relu": Converter.add_relu,
    "relu_": lambda self, node, x: self.add_relu(node, x, True),
    "add": Converter.add_sum,
    "iadd": lambda self, node, x, other: self.add_sum(node, x, other, True),
    "mean": Converter.add_mean_method,
    "flatten": Converter.flatten,
    "getitem": Converter.add_subsampling,
    "pad": Converter.add_channels,
}
