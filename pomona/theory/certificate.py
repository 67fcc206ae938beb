"""How far a pruned network can be from the one it came from: a certificate from measured norms, and an attack.

Theorem 1 of Qian & Klabjan (ICML 2021) follows ‖f − F‖ from layer to layer with norms that hold for most random
matrices. Here the norms are those of the two networks at hand, so that the bound holds for certain:

    ‖W y − W* y*‖ ≤ ‖W‖ ‖y − y*‖ + ‖(W − W*) y*‖,        and ‖y*‖ is known near the value at the region's centre.

Three numbers travel through the network's graph: how far the values of f and of F can be from those at the centre, and
from each other. Biases and the shifts of batch norm are in the values at the centre; a batch norm is folded into the
layer before it. Everything is float64, with proven upper bounds of the norms (`spectral`) and room for rounding.

The attack climbs ‖f(x) − F(x)‖ by projected gradient steps. The truth lies between the two.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from ..core.tracing import trace
from ..errors import PomonaError, require
from . import spectral

ROUNDING = 1e-12  # relative, of an operation that is no layer: more than summing 4000 numbers errs by


@dataclass(frozen=True)
class Ball:
    """‖x‖₂ ≤ radius."""

    radius: float = 1.0

    def __post_init__(self) -> None:
        require(0 < self.radius < math.inf, f"radius must be positive and finite, got {self.radius:g}.")

    def centre(self, shape: tuple[int, ...]) -> tuple[Tensor, float]:
        """The middle of the region, and the distance to its farthest point."""
        return torch.zeros(1, *shape, dtype=torch.float64), self.radius

    def step(self, x: Tensor, gradient: Tensor, size: float) -> Tensor:
        """A step uphill, projected back."""
        x = x + size * self.radius * direction(gradient)
        return x * (self.radius / length(x)).clamp(max=1)

    def sample(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Points on the sphere, every second one on few axes: where all inputs are small, many units may sleep."""
        x = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
        x[1::2] *= torch.rand(x[1::2].shape, generator=generator) < 0.05
        return self.radius * direction(x)


@dataclass(frozen=True)
class Cube:
    """low ≤ x_i ≤ high for every input."""

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        require(self.low < self.high, f"a cube needs low < high, got {self.low:g} and {self.high:g}.")

    def centre(self, shape: tuple[int, ...]) -> tuple[Tensor, float]:
        middle = torch.full((1, *shape), (self.low + self.high) / 2, dtype=torch.float64)
        return middle, (self.high - self.low) / 2 * math.sqrt(math.prod(shape))

    def step(self, x: Tensor, gradient: Tensor, size: float) -> Tensor:
        return (x + size * (self.high - self.low) * gradient.sign()).clamp(self.low, self.high)

    def sample(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        x = torch.rand(count, *shape, generator=generator, dtype=torch.float64)
        return self.low + (self.high - self.low) * x


Region = Ball | Cube


@dataclass(frozen=True)
class Layer:
    """The norms of a layer: of F's, of f's and of what was removed; and how far the outputs can be apart."""

    name: str
    dense: float
    pruned: float
    removed: float
    gap: float


@dataclass(frozen=True)
class Certificate:
    """sup ‖f − F‖ over the region is at most `error` and at least `found`."""

    error: float
    found: float
    output: float  # a bound of ‖F(x) − F(centre)‖, to measure the error by
    layers: tuple[Layer, ...] = field(repr=False)


@dataclass(frozen=True)
class Value:
    """What is known of a value in the graph: of F and f at the centre, how far each can go, and how far apart."""

    dense: Tensor
    pruned: Tensor
    dense_spread: float
    pruned_spread: float
    gap: float

    def capped(self) -> Value:
        """The gap is never more than that of the centres and both spreads."""
        most = float(torch.linalg.vector_norm(self.pruned - self.dense)) * (1 + ROUNDING)
        gap = min(self.gap, most + self.dense_spread + self.pruned_spread)
        return Value(self.dense, self.pruned, self.dense_spread, self.pruned_spread, gap)


def certify(
    dense: nn.Module,
    pruned: nn.Module | Mapping[str, Tensor],
    input_shape: tuple[int, ...],
    *,
    region: Region | None = None,
    steps: int = 100,
    starts: int = 8,
    seed: int = 0,
) -> Certificate:
    """Bound how far `pruned`, a network like `dense` or the state of one, can be from it, and search for the worst.

    Both are taken in evaluation mode. `steps=0` leaves the attack out.
    """
    region = region or Ball()
    target, other = prepared(dense), prepared(dense if isinstance(pruned, Mapping) else pruned)
    if isinstance(pruned, Mapping):
        other[0].load_state_dict(pruned)
    layers: list[Layer] = []
    with torch.no_grad():
        value = Walk(target, other, layers).run(tuple(input_shape), region)
    found = attack(target, other, tuple(input_shape), region=region, steps=steps, starts=starts, seed=seed)
    return Certificate(value.gap, found, value.dense_spread, tuple(layers))


def prepared(model: nn.Module) -> nn.Sequential:
    """A copy in float64 and evaluation mode; in a box, so that a single layer is one node of its graph."""
    return nn.Sequential(copy.deepcopy(model).double().eval())


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def cut(model: nn.Module, sparsity: float, *, pattern: Any = "unstructured", allocation: str = "uniform") -> nn.Module:
    """A copy of a model without its smallest weights, as `pm.OneShot` chooses them."""
    from ..methods import OneShot

    pruned = copy.deepcopy(model)
    pruner = OneShot(sparsity=sparsity, pattern=pattern, allocation=allocation)
    pruner.attach(pruned, torch.optim.SGD(pruned.parameters(), lr=0.0), total_steps=1)
    pruner.finish()
    return pruned


def largest(
    model: nn.Module,
    input_shape: tuple[int, ...],
    epsilon: float,
    *,
    region: Region | None = None,
    pattern: Any = "unstructured",
    allocation: str = "uniform",
    halvings: int = 10,
) -> float | None:
    """The largest sparsity, to 2^−halvings, whose cut is certified to err by at most ε; None where none is."""
    require(epsilon > 0, f"epsilon must be positive, got {epsilon:g}.")
    low, high = 0.0, 1.0
    for _ in range(halvings):
        middle = (low + high) / 2
        pruned = cut(model, middle, pattern=pattern, allocation=allocation)
        error = certify(model, pruned, input_shape, region=region, steps=0).error
        low, high = (middle, high) if error <= epsilon else (low, middle)
    return low or None


# ---- the attack


def attack(
    dense: nn.Module,
    pruned: nn.Module,
    input_shape: tuple[int, ...],
    *,
    region: Region | None = None,
    steps: int = 100,
    starts: int = 8,
    seed: int = 0,
) -> float:
    """The largest ‖f(x) − F(x)‖ that projected gradient ascent finds in the region."""
    region, best = region or Ball(), 0.0
    generator = torch.Generator().manual_seed(seed)
    x = region.sample(max(starts, 1), input_shape, generator).to(device_of(dense))
    for step in range(steps):
        x = x.detach().requires_grad_()
        distance = length(pruned(x) - dense(x)).flatten()
        best = max(best, float(distance.detach().max()))
        (gradient,) = torch.autograd.grad(distance.sum(), x)
        # From steps that forget where they came from, as a power iteration does, to small ones.
        x = region.step(x, gradient, 2 * 0.01 ** (step / max(1, steps - 1)))
    return best


def length(x: Tensor) -> Tensor:
    """The norm of each sample, shaped to multiply with it."""
    return torch.linalg.vector_norm(x.flatten(1), dim=1).view(-1, *[1] * (x.ndim - 1))


def direction(x: Tensor) -> Tensor:
    return x / length(x).clamp(min=torch.finfo(x.dtype).tiny)


# ---- the graph


class Walk:
    """One pass through the graph of two networks."""

    def __init__(self, dense: nn.Module, pruned: nn.Module, layers: list[Layer]) -> None:
        graph = trace(dense)
        if graph is None:
            raise PomonaError(
                f"{type(dense).__name__} cannot be traced by torch.fx, so there is no graph to certify: "
                "leave out control flow that depends on values."
            )
        self.graph, self.models, self.layers = graph, (dense, pruned), layers
        self.folded: set[fx.Node] = set()

    def run(self, shape: tuple[int, ...], region: Region) -> Value:
        centre, spread = region.centre(shape)
        centre = centre.to(device_of(self.models[0]))
        known: dict[fx.Node, Any] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                require(not known, "certify takes networks of one input.")
                known[node] = Value(centre.clone(), centre.clone(), spread, spread, 0.0)
            elif node.op == "output":
                require(isinstance(known.get(node.args[0]), Value), "certify takes networks of one output, a tensor.")
                return known[node.args[0]]
            else:
                value = self.step(node, known)
                known[node] = value.capped() if isinstance(value, Value) else value
                if self.in_place(node):  # whoever reads the old value later reads the new one
                    known[node.all_input_nodes[0]] = known[node]
        raise AssertionError("a graph ends with its output")

    def step(self, node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
        if node in self.folded:
            return known[node.all_input_nodes[0]]
        if node.op == "get_attr":
            raise unsure(node, str(node.target))
        values = [value for n in operands(node) if isinstance(value := known[n], Value)]
        if node.op == "call_module":
            modules = tuple(m.get_submodule(str(node.target)) for m in self.models)
            if isinstance(modules[0], AFFINE):
                return self.affine(node, values[0], modules)
            by = stretch_of(modules[0], node, values[0].dense.shape)
            return stretched(values[0], [modules[0](values[0].dense), modules[1](values[0].pruned)], by)
        results = [call(node, {n: pick(known[n], side) for n in node.all_input_nodes}) for side in ("dense", "pruned")]
        if not isinstance(results[0], Tensor):
            return results[0]  # a shape
        name = (node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")).rstrip("_")
        if name in SUMS and "alpha" not in node.kwargs:
            return combined(values, results, 1)
        if name in ("cat", "concat"):
            return combined(values, results, 2)
        require(len(values) == 1, str(unsure(node, name)))
        return stretched(values[0], results, function_stretch(name, node, values[0].dense, results[0]))

    def in_place(self, node: fx.Node) -> bool:
        """Whether a node writes over its input."""
        if node.op == "call_module":
            return bool(getattr(self.models[0].get_submodule(str(node.target)), "inplace", False))
        if node.op == "call_method":
            return str(node.target).endswith("_")
        return node.target in IN_PLACE or bool(node.kwargs.get("inplace"))

    def affine(self, node: fx.Node, value: Value, modules: tuple[nn.Module, ...]) -> Value:
        """A linear layer, a convolution or a batch norm, with the batch norm behind it."""
        maps = [Map.of(module) for module in modules]
        after = next(iter(node.users)) if len(node.users) == 1 else node
        norms = [m.get_submodule(str(after.target)) for m in self.models] if after.op == "call_module" else []
        channels_second = not isinstance(modules[0], nn.Linear) or value.dense.ndim == 2
        if after is not node and norms and isinstance(norms[0], NORMS) and channels_second:
            maps = [m.scaled(*coefficients(n)) for m, n in zip(maps, norms, strict=True)]
            self.folded.add(after)
        dense, pruned = maps
        gone = pruned - dense
        shape = value.dense.shape
        ours, theirs = dense.bound(shape), pruned.bound(shape) if gone else None
        theirs = ours if theirs is None else theirs
        lost = gone.bound(shape) if gone else 0.0
        results = [dense(value.dense), pruned(value.pruned)]
        places = results[0].numel() // len(dense.bias)  # where each bias is added
        spreads = [
            norm * spread + m.rounding(at, places)
            for norm, spread, m, at in (
                (ours, value.dense_spread, dense, value.dense),
                (theirs, value.pruned_spread, pruned, value.pruned),
            )
        ]
        gap = min(
            norm * value.gap + size(gone(at)) + gone.rounding(at, places) + lost * spread
            for norm, spread, at in (
                (theirs, value.dense_spread, value.dense),
                (ours, value.pruned_spread, value.pruned),
            )
        )
        result = Value(results[0], results[1], spreads[0], spreads[1], gap).capped()
        self.layers.append(
            Layer(str(node.target).partition(".")[2] or type(modules[0]).__name__, ours, theirs, lost, result.gap)
        )
        return result


@dataclass(frozen=True)
class Map:
    """x ↦ W x + b, W a matrix, a convolution or a diagonal."""

    weight: Tensor
    bias: Tensor
    module: nn.Module

    @staticmethod
    def of(module: nn.Module) -> Map:
        if isinstance(module, NORMS):
            return Map(*coefficients(module), module)
        assert isinstance(module, (nn.Linear, nn.Conv2d))
        weight = module.weight.detach()
        bias = weight.new_zeros(len(weight)) if module.bias is None else module.bias.detach()
        return Map(weight, bias, module)

    def scaled(self, scale: Tensor, shift: Tensor) -> Map:
        """With a batch norm behind it."""
        return Map(self.weight * along(scale, self.weight, 0), self.bias * scale + shift, self.module)

    def __sub__(self, other: Map) -> Map:
        return Map(self.weight - other.weight, self.bias - other.bias, self.module)

    def __bool__(self) -> bool:
        return bool(self.weight.any() or self.bias.any())

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.module, nn.Linear):
            return F.linear(x, self.weight, self.bias)
        if isinstance(self.module, nn.Conv2d):
            return self.module._conv_forward(x, self.weight, self.bias)
        return x * along(self.weight, x, 1) + along(self.bias, x, 1)

    def bound(self, shape: torch.Size) -> float:
        """‖W‖₂ on inputs of this shape, or more."""
        if isinstance(self.module, nn.Linear):
            return spectral.bound(self.weight)
        if isinstance(self.module, nn.Conv2d):
            return conv_bound(self.module, self.weight, shape)
        return float(self.weight.abs().max())

    def rounding(self, x: Tensor, places: int) -> float:
        """How far the computed W x + b can be from the true one."""
        taps = self.weight[0, 0].numel() if self.weight.ndim == 4 else 1
        terms = max(1, self.weight[0].numel()) + 4
        eps = torch.finfo(torch.float64).eps
        spread = math.sqrt(taps) * size(self.weight) * size(x) if self.weight.ndim > 1 else size(x) * size(self.weight)
        return 4 * terms * eps * (spread + math.sqrt(places) * size(self.bias))


def conv_bound(conv: nn.Conv2d, weight: Tensor, shape: torch.Size) -> float:
    """A convolution's norm, however it is padded."""
    image: tuple[int, int] = (shape[-2], shape[-1])
    options: dict[str, Any] = {"stride": conv.stride, "dilation": conv.dilation, "groups": conv.groups}
    edges = conv._reversed_padding_repeated_twice
    if conv.padding_mode == "zeros":
        return spectral.conv_bound(weight, image, **options)
    if conv.padding_mode == "circular":
        # A pixel that the padding repeats is seen by as many outputs more.
        reach = [n + a + b for n, a, b in zip(image, edges[2::-2], edges[3::-2], strict=True)]
        span = [d * (k - 1) for d, k in zip(conv.dilation, weight.shape[2:], strict=True)]
        turns = [max(1, -(-(r - s) // n)) for r, s, n in zip(reach, span, image, strict=True)]
        return spectral.conv_bound(weight, image, padding="circular", **options) * math.sqrt(math.prod(turns))
    # Padding is a linear map; a column of it has as many ones as it makes copies of a pixel.
    with torch.enable_grad():
        pixels = torch.ones(1, 1, *image, dtype=torch.float64, requires_grad=True)
        padded = F.pad(pixels, edges, mode=conv.padding_mode)
        (copies,) = torch.autograd.grad(padded.sum(), pixels)
    inside: tuple[int, int] = (padded.shape[-2], padded.shape[-1])
    return math.sqrt(float(copies.max())) * spectral.conv_bound(weight, inside, **options)


def coefficients(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Scale and shift of a batch norm in evaluation mode."""
    assert isinstance(norm, NORMS)
    mean, variance = norm.running_mean, norm.running_var
    if mean is None or variance is None:
        raise PomonaError("a batch norm without running statistics depends on the batch, and has no certificate.")
    scale = (variance + norm.eps).rsqrt()
    scale = scale if norm.weight is None else scale * norm.weight.detach()
    shift = -mean * scale if norm.bias is None else norm.bias.detach() - mean * scale
    return scale, shift


def along(vector: Tensor, like: Tensor, axis: int) -> Tensor:
    """A vector shaped to multiply along one axis."""
    return vector.view(*[1] * axis, -1, *[1] * (like.ndim - axis - 1))


def size(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x))


# ---- what stretches how much

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
AFFINE = (nn.Linear, nn.Conv2d, *NORMS)
SUMS = ("add", "iadd", "sub", "isub")
IN_PLACE: dict[Any, Any] = {operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul}
# Moves numbers, each at most to one place.
MOVES = ("flatten", "view", "reshape", "permute", "transpose", "contiguous", "squeeze", "unsqueeze", "getitem", "clone")
STILL = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
# The steepest slope of a function of one number.
SLOPES: dict[str, float] = {
    "relu": 1, "relu6": 1, "hardtanh": 1, "tanh": 1, "sigmoid": 0.25, "softplus": 1, "logsigmoid": 1, "softsign": 1,
    "celu": 1, "abs": 1, "hardsigmoid": 1 / 6, "gelu": 1.13, "silu": 1.1, "mish": 1.09, "hardswish": 1.5, "selu": 1.76,
}  # fmt: skip


def stretch_of(module: nn.Module, node: fx.Node, shape: torch.Size) -> float:
    """How much farther apart a module can put two inputs."""
    if isinstance(module, STILL):
        return 1.0
    if isinstance(module, (nn.LeakyReLU, nn.ELU)):
        return max(1.0, abs(module.negative_slope if isinstance(module, nn.LeakyReLU) else module.alpha))
    if isinstance(module, (nn.MaxPool2d, nn.AdaptiveMaxPool2d)):
        return math.sqrt(windows(module, shape))
    if isinstance(module, (nn.AvgPool2d, nn.AdaptiveAvgPool2d)):
        return averaging(module, shape)
    name = type(module).__name__.lower()
    if name in SLOPES:
        return float(SLOPES[name])
    raise unsure(node, type(module).__name__)


def function_stretch(name: str, node: fx.Node, before: Tensor, after: Tensor) -> float:
    """How much farther apart a function or method can put two inputs."""
    if name in ("mul", "imul", "truediv", "div"):
        factor = next((abs(float(a)) for a in node.args if isinstance(a, (int, float))), math.inf)
        over = not isinstance(node.args[0], fx.Node) and not name.endswith("mul")  # a number divided by a value
        require(math.isfinite(factor) and not over, str(unsure(node, name)))
        return factor if name.endswith("mul") else 1 / factor
    if name in MOVES:
        repeats = name == "getitem" and any(isinstance(i, (list, Tensor, fx.Node)) for i in as_tuple(node.args[1]))
        require(not repeats, str(unsure(node, "indexing by lists, which may repeat entries")))
        return 1.0
    if name in SLOPES:
        return float(SLOPES[name])
    if name == "dropout":
        return 1.0
    if name == "pad":
        mode = node.kwargs.get("mode", node.args[2] if len(node.args) > 2 else "constant")
        require(mode == "constant", str(unsure(node, f"padding by {mode}")))
        return 1.0
    if name == "mean":
        return math.sqrt(after.numel() / before.numel())
    pools: dict[str, Callable[..., nn.Module]] = {
        "max_pool2d": nn.MaxPool2d,
        "avg_pool2d": nn.AvgPool2d,
        "adaptive_avg_pool2d": nn.AdaptiveAvgPool2d,
    }
    if name in pools:
        return stretch_of(pools[name](*node.args[1:], **node.kwargs), node, before.shape)
    raise unsure(node, name)


def windows(pool: nn.MaxPool2d | nn.AdaptiveMaxPool2d, shape: torch.Size) -> float:
    """The most windows that one pixel is in."""
    if isinstance(pool, nn.AdaptiveMaxPool2d):
        sides = zip(shape[-2:], spectral.pair(pool.output_size), strict=True)  # type: ignore[arg-type]
        return math.prod(
            max(sum(k * n // m <= i < -(-(k + 1) * n // m) for k in range(m)) for i in range(n)) for n, m in sides
        )
    given = (pool.kernel_size, pool.stride or pool.kernel_size, pool.dilation)
    per_side = zip(*map(spectral.pair, given), strict=True)
    return math.prod(max(sum(j * d % s == r for j in range(k)) for r in range(s)) for k, s, d in per_side)


def averaging(pool: nn.Module, shape: torch.Size) -> float:
    """√(‖A‖₁ ‖A‖_∞) of an average pool, by its row and column sums; exact where windows do not overlap."""
    with torch.enable_grad():
        image = torch.ones(1, 1, *shape[-2:], dtype=torch.float64, requires_grad=True)
        means = pool(image)
        (columns,) = torch.autograd.grad(means.sum(), image)
    return math.sqrt(float(means.detach().max()) * float(columns.max())) * (1 + ROUNDING)


def stretched(value: Value, results: list[Tensor], by: float) -> Value:
    """A value after an operation that puts inputs at most `by` times farther apart."""
    slack = [ROUNDING * size(r) for r in results]
    spreads = by * value.dense_spread + slack[0], by * value.pruned_spread + slack[1]
    return Value(results[0], results[1], *spreads, by * value.gap)


def combined(values: list[Value], results: list[Tensor], power: int) -> Value:
    """Values added up (power 1), or side by side (power 2)."""
    copies = [math.sqrt(results[0].numel() / v.dense.numel()) if power == 1 else 1.0 for v in values]  # broadcasting
    parts = [(c * v.dense_spread, c * v.pruned_spread, c * v.gap) for c, v in zip(copies, values, strict=True)]
    total = [math.fsum(p**power for p in part) ** (1 / power) for part in zip(*parts, strict=True)]
    slack = [ROUNDING * size(r) for r in results]
    return Value(results[0], results[1], total[0] + slack[0], total[1] + slack[1], total[2])


def operands(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node takes, as often as it takes them."""
    leaves, _ = tree_flatten((node.args, dict(node.kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node)]


def call(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    """The node's function or method on plain values."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: known[n])
    if node.op == "call_method":
        return getattr(args[0], str(node.target).rstrip("_"))(*args[1:], **kwargs)
    return IN_PLACE.get(node.target, node.target)(*args, **{k: v for k, v in kwargs.items() if k != "inplace"})


def pick(value: Any, side: str) -> Any:
    return getattr(value, side) if isinstance(value, Value) else value


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def unsure(node: fx.Node, what: str) -> PomonaError:
    return PomonaError(
        f"certify cannot bound {what} at '{node.name}': it knows linear and convolutional layers, batch norm, pooling, "
        "activations of bounded slope, sums and reshaping."
    )
