"""Lipschitz constants of operations without weights: activations, pooling, and moves, sums and means of entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .paired_value import ROUNDING
from .rules.shared import is_selected_by_value
from .rules.smooth_functions import softplus_jump
from .steps import DENSE, Step, Value

# Each entry of the result is a sum of entries of the values, with coefficients that are not negative, and a constant.
NONNEGATIVE_SUMS = (
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "squeeze", "unsqueeze", "slice", "select", "split",
    "split_with_sizes", "unbind", "index", "index_select", "expand", "repeat", "flip", "roll", "cat", "clone", "alias",
    "detach", "pad", "constant_pad_nd", "slice_scatter", "select_scatter", "where", "pixel_shuffle",
    "pixel_unshuffle", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
    "upsample_bilinear2d", "diagonal", "_to_copy", "sum", "mean", "cumsum", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
)  # fmt: skip
MAX_POOLS = ("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices")
ADAPTIVE_MAX_POOLS = ("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
# The largest slopes of functions of one number.
SLOPES: dict[str, float] = {
    "relu": 1, "relu6": 1, "hardtanh": 1, "clamp": 1, "clamp_min": 1, "clamp_max": 1, "tanh": 1, "sigmoid": 0.25,
    "softplus": 1, "log_sigmoid": 1, "log_sigmoid_forward": 1, "abs": 1, "neg": 1, "sin": 1, "cos": 1, "atan": 1,
    "hardsigmoid": 1 / 6, "gelu": 1.13, "silu": 1.1, "mish": 1.09, "hardswish": 1.5, "selu": 1.76, "celu": 1,
    "softmax": 0.5, "_softmax": 0.5,
}  # fmt: skip


def lipschitz_constant(step: Step, shape: torch.Size) -> float | None:
    """Return a Lipschitz constant of an operation on one value of this shape, or None where it has none or is unknown.

    The weights of the operation, such as the slopes of a parametric ReLU, are equal in both networks.
    """
    if step.item not in (None, 0):
        return None  # positions of maxima
    if step.op in SLOPES:
        return SLOPES[step.op] if is_smooth(step) else None
    if step.op in ("leaky_relu", "prelu", "elu"):
        return steepest_slope(step)
    if step.op in MAX_POOLS:
        return math.sqrt(windows_per_entry(step))
    if step.op in ADAPTIVE_MAX_POOLS:
        return math.sqrt(adaptive_windows_per_entry(step, shape))
    if step.op in ("amax", "amin"):
        return 1.0
    if step.op == "_log_softmax":
        return math.sqrt(shape[step.settings["dim"]])  # ‖I − 1 pᵀ‖ = √n ‖p‖
    return scaling_constant(step)


def is_smooth(step: Step) -> bool:
    """Return whether an activation's settings keep the slope that is known for it."""
    if step.op == "celu":
        return bool(step.settings["alpha"] > 0)
    limits = [step.settings.get(name) for name in ("min", "max")]
    return step.op != "clamp" or not any(isinstance(limit, Value) for limit in limits)


def steepest_slope(step: Step) -> float | None:
    """Return the largest slope of a leaky ReLU or an exponential linear unit."""
    settings = step.settings
    if step.op == "leaky_relu":
        return max(1.0, abs(float(settings["negative_slope"])))
    if step.op == "prelu":
        weight = settings["weight"]
        return None if isinstance(weight, Value) else max(1.0, float(weight.dense.abs().max()))
    alpha, scale, inner = (float(settings[name]) for name in ("alpha", "scale", "input_scale"))
    return max(abs(scale), abs(alpha * scale * inner)) if inner > 0 else None


def jump(step: Step) -> float:
    """Return the largest jump of an activation, which its Lipschitz constant leaves out: softplus at its threshold."""
    if step.op != "softplus":
        return 0.0
    return softplus_jump(float(step.settings["beta"]), float(step.settings["threshold"]))


def scaling_constant(step: Step) -> float | None:
    """Return |c| for a product with a number c and 1/|c| for a quotient by it, and None for anything else."""
    if step.op not in ("mul", "div") or step.settings.get("rounding_mode") is not None:
        return None
    value, factor = step.args[:2]
    if step.op == "mul" and isinstance(factor, Value):
        value, factor = factor, value
    if not isinstance(value, Value) or not isinstance(factor, (int, float)) or not math.isfinite(factor):
        return None
    if step.op == "mul":
        return abs(float(factor))
    return 1 / abs(float(factor)) if factor else None


# ---- pooling


def windows_per_entry(step: Step) -> int:
    """Return the largest number of max-pooling windows that contain one entry."""
    settings = step.settings
    sides = settings["kernel_size"], settings["stride"] or settings["kernel_size"], settings["dilation"]
    count = max(len(side) for side in sides)
    per_axis = zip(*[list(side) * count if len(side) == 1 else list(side) for side in sides], strict=True)
    return math.prod(max(sum(j * d % s == r for j in range(k)) for r in range(s)) for k, s, d in per_axis)


def adaptive_windows_per_entry(step: Step, shape: torch.Size) -> int:
    """Return the largest number of adaptive max-pooling windows that contain one entry."""
    outputs = [int(n) for n in step.settings["output_size"]]
    sides = zip(shape[-len(outputs) :], outputs, strict=True)
    return math.prod(
        max(sum(k * n // m <= i < -(-(k + 1) * n // m) for k in range(m)) for i in range(n)) for n, m in sides
    )


# ---- sums of entries


def sum_constants(step: Step, values: Sequence[Tensor]) -> tuple[list[float], float] | None:
    """Return Lipschitz constants of a sum of entries in each value and in all of them, or None for other operations.

    The norm of a matrix A with entries that are not negative is at most √(‖A‖₁ ‖A‖_∞), from its row and column sums.
    """
    if step.op in ("add", "sub", "rsub"):
        return addition_constants(step, values)
    if step.op in ("maximum", "minimum") and all(torch.equal(w.dense, w.pruned) for w in step.weights):
        return addition_constants(step, values)  # an extremum moves by no more than the sum
    if step.op not in NONNEGATIVE_SUMS or is_selected_by_value(step):
        return None
    zeros = [torch.zeros_like(value) for value in values]
    rows, columns = [], []
    constant = step.call(DENSE, zeros)
    for position, zero in enumerate(zeros):
        sums, largest_column = row_and_column_sums(one_operand(step, zeros, position), zero, constant)
        rows.append(sums)
        columns.append(largest_column)
    singles = [math.sqrt(float(row.max()) * column) * (1 + ROUNDING) for row, column in zip(rows, columns, strict=True)]
    together = math.sqrt(float(sum(rows[1:], rows[0]).max()) * max(columns)) * (1 + ROUNDING)
    return singles, together


def one_operand(step: Step, operands: Sequence[Tensor], position: int) -> Callable[[Tensor], Tensor]:
    """Return a step as a function of one of its operands."""

    def function(x: Tensor) -> Tensor:
        return step.call(DENSE, [x if k == position else operand for k, operand in enumerate(operands)])

    return function


def row_and_column_sums(function: Callable[[Tensor], Tensor], zero: Tensor, constant: Tensor) -> tuple[Tensor, float]:
    """Return the row sums and the largest column sum of the matrix of an affine function."""
    result, pull_back = torch.func.vjp(function, torch.ones_like(zero))[:2]
    (columns,) = pull_back(torch.ones_like(result))
    # A constant may be infinite, as the padding before a max pool; no entry of a value is added to it.
    rows = torch.where(constant.isfinite(), result - constant, torch.zeros_like(result))
    return rows, float(columns.max()) if columns.numel() else 0.0


def addition_constants(step: Step, values: Sequence[Tensor]) -> tuple[list[float], float] | None:
    """Return the constants of a sum or difference; an operand that broadcasting repeats n times counts √n times."""
    factor: Any = step.settings.get("alpha", 1)
    if not isinstance(factor, (int, float)) or not math.isfinite(factor):
        return None
    scaled = 0 if step.op == "rsub" else 1
    factors = [abs(float(factor)) if k == scaled else 1.0 for k, a in enumerate(step.args[:2]) if isinstance(a, Value)]
    entries = math.prod(step.shape)
    singles = [c * math.sqrt(entries / v.numel()) for c, v in zip(factors, values, strict=True)]
    return singles, math.sqrt(sum(c**2 for c in singles))
