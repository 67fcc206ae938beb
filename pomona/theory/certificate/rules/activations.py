"""Rules for smooth and piecewise smooth functions of one number, with all their settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....errors import require
from ..intervals import PairBounds
from ..linear_form import Form, Lines, Substitution, substitute_elementwise
from ..steps import Step, is_reference
from . import smooth_functions as functions
from .linearised import finite_substitution
from .periodic import COSINE, SINE
from .registry import Rule, register
from .scalar_function import RangedFunction, gap_range, lines_around

FIXED: dict[str, RangedFunction] = {
    "silu": functions.SILU, "mish": functions.MISH, "sigmoid": functions.SIGMOID, "tanh": functions.TANH,
    "log_sigmoid": functions.LOG_SIGMOID, "hardsigmoid": functions.HARDSIGMOID, "hardswish": functions.HARDSWISH,
    "erf": functions.ERF, "atan": functions.ATAN, "exp": functions.EXP, "expm1": functions.EXPM1,
    "log": functions.LOG, "log1p": functions.LOG1P, "sqrt": functions.SQRT, "rsqrt": functions.RSQRT,
    "reciprocal": functions.power(-1), "square": functions.power(2), "selu": functions.selu(),
    "sin": SINE, "cos": COSINE,
}  # fmt: skip


def gelu(step: Step) -> RangedFunction:
    """Return GELU, or its approximation by tanh."""
    kind = setting(step, 1, "approximate", "none")
    require(kind in ("none", "tanh"), f"GELU's approximation must be 'none' or 'tanh', got '{kind}'.")
    return functions.GELU_TANH if kind == "tanh" else functions.GELU


def softplus(step: Step) -> RangedFunction:
    """Return softplus; refuse a beta of zero."""
    beta, threshold = float(setting(step, 1, "beta", 1)), float(setting(step, 2, "threshold", 20))
    require(beta != 0, "a softplus with beta = 0 has no values: give a beta other than 0.")
    return functions.softplus(beta, threshold)


ELU_SETTINGS = ("alpha", "scale", "input_scale")
SETTINGS: dict[str, Callable[[Step], RangedFunction]] = {
    "gelu": gelu,
    "softplus": softplus,
    "elu": lambda step: functions.elu(*(float(setting(step, i, n, 1)) for i, n in enumerate(ELU_SETTINGS, 1))),
    "celu": lambda step: functions.celu(float(setting(step, 1, "alpha", 1))),
    "pow": lambda step: functions.power(float(setting(step, 1, "exponent", 1))),
}


def setting(step: Step, position: int, name: str, default: Any) -> Any:
    """Return a setting of a step, given by position or by name."""
    return step.args[position] if len(step.args) > position else step.kwargs.get(name, default)


def function_of(step: Step) -> RangedFunction:
    """Return the function of one number that a step computes."""
    return FIXED[step.op] if step.op in FIXED else SETTINGS[step.op](step)


def has_number_settings(step: Step) -> bool:
    """Return whether a step reads one value, and its settings are numbers."""
    return len(step.inputs) == 1 and not any(is_reference(leaf) for leaf in (*step.args[1:], *step.kwargs.values()))


def bounds(step: Step, inputs: list[PairBounds]) -> PairBounds:
    """Return the ranges of a function on both networks, and its slopes times the gap."""
    function, x = function_of(step), inputs[0]
    gap = gap_range(function, x.hull, x.gap)
    return PairBounds(function.range(x.dense), function.range(x.pruned), gap).tighten()


def relax(step: Step, inputs: list[PairBounds]) -> tuple[Lines, Lines, Lines]:
    """Return lines around a function in the dense and in the pruned network, and around its gap."""
    return lines_around(function_of(step), inputs[0])


def substitute(step: Step, form: Form, inputs: list[PairBounds], around: tuple[Lines, Lines, Lines]) -> Substitution:
    """Return forms on a function's result as forms on its input."""
    return finite_substitution(substitute_elementwise(form, inputs[0], *around))


register(Rule(bounds, relax=relax, substitute_relaxed=substitute), *FIXED, *SETTINGS, when=has_number_settings)
