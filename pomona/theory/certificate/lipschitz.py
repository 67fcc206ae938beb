"""Lipschitz constants of modules and functions that are not affine layers: activations, pooling, reshaping."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...errors import PomonaError, require
from .. import spectral
from .paired_value import ROUNDING

# Operations that move each number to at most one place.
MOVES = ("flatten", "view", "reshape", "permute", "transpose", "contiguous", "squeeze", "unsqueeze", "getitem", "clone")
IDENTITY_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
# The largest slope of each function of one number, by its lower-case name.
SLOPES: dict[str, float] = {
    "relu": 1, "relu6": 1, "hardtanh": 1, "tanh": 1, "sigmoid": 0.25, "softplus": 1, "logsigmoid": 1, "softsign": 1,
    "celu": 1, "abs": 1, "hardsigmoid": 1 / 6, "gelu": 1.13, "silu": 1.1, "mish": 1.09, "hardswish": 1.5, "selu": 1.76,
}  # fmt: skip
POOLING_FUNCTIONS: dict[str, Callable[..., nn.Module]] = {
    "max_pool2d": nn.MaxPool2d,
    "avg_pool2d": nn.AvgPool2d,
    "adaptive_avg_pool2d": nn.AdaptiveAvgPool2d,
}


def module_lipschitz(module: nn.Module, node: fx.Node, shape: torch.Size) -> float:
    """Return a Lipschitz constant of a module on inputs of this shape; raise PomonaError for an unknown module."""
    if isinstance(module, IDENTITY_MODULES):
        return 1.0
    if isinstance(module, (nn.LeakyReLU, nn.ELU)):
        return max(1.0, abs(module.negative_slope if isinstance(module, nn.LeakyReLU) else module.alpha))
    if isinstance(module, (nn.MaxPool2d, nn.AdaptiveMaxPool2d)):
        return math.sqrt(max_windows_per_pixel(module, shape))
    if isinstance(module, (nn.AvgPool2d, nn.AdaptiveAvgPool2d)):
        return average_pool_lipschitz(module, shape)
    name = type(module).__name__.lower()
    if name in SLOPES:
        return float(SLOPES[name])
    raise unsupported_operation(node, type(module).__name__)


def function_lipschitz(name: str, node: fx.Node, before: Tensor, after: Tensor) -> float:
    """Return a Lipschitz constant of a function or method of one value; raise PomonaError for an unknown one.

    `before` and `after` are its input and output at the region's centre.
    """
    if name in ("mul", "imul", "truediv", "div"):
        return scaling_lipschitz(name, node)
    if name in MOVES:
        repeats = name == "getitem" and any(isinstance(i, (list, Tensor, fx.Node)) for i in as_tuple(node.args[1]))
        require(not repeats, str(unsupported_operation(node, "indexing by lists, which may repeat entries")))
        return 1.0
    if name in SLOPES:
        return float(SLOPES[name])
    if name == "dropout":
        return 1.0
    if name == "pad":
        mode = node.kwargs.get("mode", node.args[2] if len(node.args) > 2 else "constant")
        require(mode == "constant", str(unsupported_operation(node, f"padding by {mode}")))
        return 1.0
    if name == "mean":
        return math.sqrt(after.numel() / before.numel())
    if name in POOLING_FUNCTIONS:
        return module_lipschitz(POOLING_FUNCTIONS[name](*node.args[1:], **node.kwargs), node, before.shape)
    raise unsupported_operation(node, name)


def scaling_lipschitz(name: str, node: fx.Node) -> float:
    """Return |c| for a product with a number c and 1/|c| for a quotient; raise PomonaError for anything else."""
    factor = next((abs(float(a)) for a in node.args if isinstance(a, (int, float))), math.inf)
    divides_number = not isinstance(node.args[0], fx.Node) and not name.endswith("mul")  # a number over a value
    require(math.isfinite(factor) and not divides_number, str(unsupported_operation(node, name)))
    return factor if name.endswith("mul") else 1 / factor


def max_windows_per_pixel(pool: nn.MaxPool2d | nn.AdaptiveMaxPool2d, shape: torch.Size) -> float:
    """Return the largest number of pooling windows that contain one pixel."""
    if isinstance(pool, nn.AdaptiveMaxPool2d):
        sides = zip(shape[-2:], spectral.as_pair(pool.output_size), strict=True)  # type: ignore[arg-type]
        return math.prod(
            max(sum(k * n // m <= i < -(-(k + 1) * n // m) for k in range(m)) for i in range(n)) for n, m in sides
        )
    given = (pool.kernel_size, pool.stride or pool.kernel_size, pool.dilation)
    per_side = zip(*map(spectral.as_pair, given), strict=True)
    return math.prod(max(sum(j * d % s == r for j in range(k)) for r in range(s)) for k, s, d in per_side)


def average_pool_lipschitz(pool: nn.Module, shape: torch.Size) -> float:
    """Return √(‖A‖₁ ‖A‖_∞) of an average pool, from its row and column sums; exact where windows do not overlap."""
    with torch.enable_grad():
        image = torch.ones(1, 1, *shape[-2:], dtype=torch.float64, requires_grad=True)
        means = pool(image)
        (columns,) = torch.autograd.grad(means.sum(), image)
    return math.sqrt(float(means.detach().max()) * float(columns.max())) * (1 + ROUNDING)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a tuple as it is, and any other value as a tuple of one."""
    return value if isinstance(value, tuple) else (value,)


def unsupported_operation(node: fx.Node, what: str) -> PomonaError:
    """Return the error for an operation that has no known Lipschitz constant."""
    return PomonaError(
        f"certify cannot bound {what} at '{node.name}': it knows linear and convolutional layers, batch norm, pooling, "
        "activations of bounded slope, sums and reshaping."
    )
