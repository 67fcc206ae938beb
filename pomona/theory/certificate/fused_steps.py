"""One step in place of several that compute a known function by parts, which has tighter bounds as a whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from .attention_steps import expand_product_attention, expand_softmax
from .rewriting import Rewriting, live_steps, operation
from .steps import Step, Value, Weight

GELU_SCALE, GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715


def root_mean_square_norm(x: Tensor, epsilon: float) -> Tensor:
    """Return x / √(mean x² + ε) over the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)


ROOT_MEAN_SQUARE_NORM = operation("root_mean_square_norm(Tensor x, float epsilon) -> Tensor", root_mean_square_norm)


def rewrite_steps(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the steps of a network with attention in parts and known functions as wholes, without unread steps."""
    new = Rewriting(steps)
    for step in steps:
        if not any(rewrite(new, step) for rewrite in REWRITES.get(step.op, ())):
            new.copy(step)
        new.place.append(Value(len(new.steps) - 1))
    return live_steps(new.steps)


def fuse_gelu(new: Rewriting, step: Step) -> bool:
    """Add GELU's tanh approximation in place of 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))."""
    for half, gate in permutations(step.args[:2]):
        x = with_number(new.old, half, "mul", 0.5)
        angle = argument(new.old, with_number(new.old, gate, "add", 1.0), "tanh")
        total = with_number(new.old, angle, "mul", GELU_SCALE)
        for one, cubic in permutations(operands(new.old, total, "add")):
            cube = with_number(new.old, cubic, "mul", GELU_CUBIC)
            if x is not None and x == one == with_number(new.old, cube, "pow", 3.0):
                new.add(step.name, torch.ops.aten.gelu.default, (new.move(x),), step.shape, approximate="tanh")
                return True
    return False


def fuse_root_mean_square(new: Rewriting, step: Step) -> bool:
    """Add a norm by root mean square in place of x · rsqrt(mean x² + ε)."""
    for x, factor in permutations(step.args[:2]):
        total = argument(new.old, factor, "rsqrt")
        mean, epsilon = number_of(new.old, total, "add")
        square = argument(new.old, mean, "mean")
        if square is None or x is None or x != squared(new.old, square):
            continue
        settings = new.old[mean.index].args[1:]
        if settings not in (([-1], True), ([len(step.shape) - 1], True)):
            continue
        new.add(step.name, ROOT_MEAN_SQUARE_NORM, (new.move(x), epsilon), step.shape)
        return True
    return False


def fuse_square(new: Rewriting, step: Step) -> bool:
    """Add a square in place of the product of a value with itself, whose factors are not independent."""
    if step.args[0] != step.args[1] or not isinstance(step.args[0], Value):
        return False
    new.add(step.name, torch.ops.aten.pow.Tensor_Scalar, (new.move(step.args[0]), 2), step.shape)
    return True


def squared(steps: Sequence[Step], value: Any) -> Any:
    """Return the value whose square a value is, or None."""
    one, other = operands(steps, value, "mul")
    return one if isinstance(one, Value) and one == other else with_number(steps, value, "pow", 2.0)


def operands(steps: Sequence[Step], value: Any, op: str) -> tuple[Any, ...]:
    """Return the two arguments of the step that computes a value if it is this operation, or twice None."""
    if not isinstance(value, Value) or steps[value.index].op != op or steps[value.index].kwargs:
        return None, None
    args = steps[value.index].args
    return args if len(args) == 2 else (None, None)


def argument(steps: Sequence[Step], value: Any, op: str) -> Any:
    """Return the first argument of the step that computes a value if it is this operation, or None."""
    return steps[value.index].args[0] if isinstance(value, Value) and steps[value.index].op == op else None


def number_of(steps: Sequence[Step], value: Any, op: str) -> tuple[Any, float]:
    """Return the value and the number that a step combines by this operation, or None and NaN."""
    for one, other in permutations(operands(steps, value, op)):
        if isinstance(other, Weight) and other.dense.numel() == 1 and torch.equal(other.dense, other.pruned):
            other = other.dense.item()
        if (
            isinstance(one, Value)
            and isinstance(other, (int, float))
            and (op != "pow" or one is operands(steps, value, op)[0])
        ):
            return one, float(other)
    return None, math.nan


def with_number(steps: Sequence[Step], value: Any, op: str, number: float) -> Any:
    """Return the value that a step combines with this number by this operation, or None."""
    one, found = number_of(steps, value, op)
    return one if found == number else None


REWRITES = {
    "scaled_dot_product_attention": (expand_product_attention,),
    "softmax": (expand_softmax,),
    "mul": (fuse_gelu, fuse_root_mean_square, fuse_square),
}
