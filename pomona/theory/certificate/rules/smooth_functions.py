"""The functions of one number that networks use, with the points where their values and slopes turn.

Constants that have no closed form are roots of the first or second derivative, rounded to float64. The tests prove by
interval arithmetic that there are no others.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..intervals import EPS
from .scalar_function import Piece, ScalarFunction

GELU_TURN = -0.7517915246935645
GELU_TANH_TURN, GELU_TANH_BEND = -0.7524614220710163, 1.4185040087908284
GELU_TANH_SCALE, GELU_TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715
SILU_TURN, SILU_BEND = -1.2784645427610738, 2.3993572805154677
MISH_TURN, MISH_BENDS = -1.1924312145154952, (-2.256376396360793, 1.4905711794854285)
SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def smooth(
    value: object, slope: object, turns: tuple[float, ...] = (), bends: tuple[float, ...] = ()
) -> ScalarFunction:
    """Return a function of one piece."""
    return ScalarFunction((Piece(value, slope, turns, bends),))  # type: ignore[arg-type]


def bell(x: Tensor) -> Tensor:
    """Return σ(x) σ(−x), the slope of the sigmoid, without cancellation."""
    return torch.sigmoid(x) * torch.sigmoid(-x)


def normal_share(x: Tensor) -> Tensor:
    """Return the standard normal distribution function."""
    return torch.erfc(-x / math.sqrt(2)) / 2


def gelu_slope(x: Tensor) -> Tensor:
    """Return Φ(x) + x φ(x)."""
    return normal_share(x) + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def gelu_tanh_gate(x: Tensor) -> Tensor:
    """Return (1 + tanh u) / 2 with u = √(2/π) (x + 0.044715 x³)."""
    return torch.sigmoid(2 * GELU_TANH_SCALE * (x + GELU_TANH_CUBIC * x**3))


def gelu_tanh_slope(x: Tensor) -> Tensor:
    """Return the slope of GELU's tanh approximation."""
    u = 2 * GELU_TANH_SCALE * (x + GELU_TANH_CUBIC * x**3)
    return torch.sigmoid(u) + x * bell(u) * 2 * GELU_TANH_SCALE * (1 + 3 * GELU_TANH_CUBIC * x * x)


def silu_slope(x: Tensor) -> Tensor:
    """Return σ(x) (1 + x σ(−x))."""
    return torch.sigmoid(x) * (1 + x * torch.sigmoid(-x))


def mish_gate(x: Tensor) -> Tensor:
    """Return tanh(softplus(x))."""
    return torch.tanh(torch.nn.functional.softplus(x, threshold=1e4))


def mish_slope(x: Tensor) -> Tensor:
    """Return t + x (1 − t²) σ(x) with t = tanh(softplus(x))."""
    t = mish_gate(x)
    return t + x * (1 - t * t) * torch.sigmoid(x)


GELU = smooth(lambda x: x * normal_share(x), gelu_slope, (GELU_TURN,), (-math.sqrt(2), math.sqrt(2)))
GELU_TANH = smooth(
    lambda x: x * gelu_tanh_gate(x), gelu_tanh_slope, (GELU_TANH_TURN,), (-GELU_TANH_BEND, GELU_TANH_BEND)
)
SILU = smooth(lambda x: x * torch.sigmoid(x), silu_slope, (SILU_TURN,), (-SILU_BEND, SILU_BEND))
MISH = smooth(lambda x: x * mish_gate(x), mish_slope, (MISH_TURN,), MISH_BENDS)
SIGMOID = smooth(torch.sigmoid, bell, bends=(0.0,))
TANH = smooth(torch.tanh, lambda x: 4 * bell(2 * x), bends=(0.0,))
LOG_SIGMOID = smooth(lambda x: -torch.logaddexp(-x, torch.zeros_like(x)), lambda x: torch.sigmoid(-x))
ERF = smooth(torch.erf, lambda x: 2 / math.sqrt(math.pi) * torch.exp(-x * x), bends=(0.0,))
ATAN = smooth(torch.atan, lambda x: 1 / (1 + x * x), bends=(0.0,))
EXP = smooth(torch.exp, torch.exp)
EXPM1 = smooth(torch.expm1, torch.exp)
LOG = ScalarFunction((Piece(torch.log, torch.reciprocal, start=0.0),))
LOG1P = ScalarFunction((Piece(torch.log1p, lambda x: 1 / (1 + x), start=-1.0),))
SQRT = ScalarFunction((Piece(torch.sqrt, lambda x: 0.5 * torch.rsqrt(x), start=0.0),))
RSQRT = ScalarFunction((Piece(torch.rsqrt, lambda x: -0.5 * torch.rsqrt(x) / x, start=0.0),))
HARDSIGMOID = ScalarFunction((
    Piece(torch.zeros_like, torch.zeros_like, end=-3.0),
    Piece(lambda x: x / 6 + 0.5, lambda x: torch.full_like(x, 1 / 6), start=-3.0, end=3.0),
    Piece(torch.ones_like, torch.zeros_like, start=3.0),
))  # fmt: skip
HARDSWISH = ScalarFunction((
    Piece(torch.zeros_like, torch.zeros_like, end=-3.0),
    Piece(lambda x: x * (x + 3) / 6, lambda x: (2 * x + 3) / 6, turns=(-1.5,), start=-3.0, end=3.0),
    Piece(lambda x: x, torch.ones_like, start=3.0),
))  # fmt: skip


def softplus(beta: float = 1.0, threshold: float = 20.0) -> ScalarFunction:
    """Return softplus with its jump: x where beta · x > threshold, log(1 + exp(beta · x)) / beta elsewhere."""
    curve = lambda x: torch.logaddexp(beta * x, torch.zeros_like(x)) / beta  # noqa: E731
    slope = lambda x: torch.sigmoid(beta * x)  # noqa: E731
    switch, jump = threshold / beta, softplus_jump(beta, threshold)
    identity = lambda x: x  # noqa: E731
    if beta > 0:
        pieces = Piece(curve, slope, end=switch), Piece(identity, torch.ones_like, start=switch)
    else:
        pieces = Piece(identity, torch.ones_like, end=switch), Piece(curve, slope, start=switch)
    return ScalarFunction(pieces, jump=jump)


def softplus_jump(beta: float, threshold: float) -> float:
    """Return log(1 + e^−t) / |β|, the jump of softplus at its threshold t, rounded up."""
    size = max(0.0, -threshold) + math.log1p(math.exp(-abs(threshold)))  # without overflow
    return size / abs(beta) * (1 + 16 * EPS)


def elu(alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> ScalarFunction:
    """Return ELU: scale · x for positive x, scale · alpha · (exp(input_scale · x) − 1) for negative x."""
    return ScalarFunction((
        Piece(
            lambda x: scale * alpha * torch.expm1(input_scale * x),
            lambda x: scale * alpha * input_scale * torch.exp(input_scale * x),
            end=0.0,
        ),
        Piece(lambda x: scale * x, lambda x: torch.full_like(x, scale), start=0.0),
    ))  # fmt: skip


def celu(alpha: float = 1.0) -> ScalarFunction:
    """Return CELU: x for positive x, alpha · (exp(x / alpha) − 1) for negative x."""
    return elu(alpha, 1.0, 1 / alpha)


def selu() -> ScalarFunction:
    """Return SELU."""
    return elu(SELU_ALPHA, SELU_SCALE)


def power(exponent: float) -> ScalarFunction:
    """Return x^exponent; for exponents that are not whole numbers on x ≥ 0 only."""
    value, slope = (lambda x: x**exponent), (lambda x: exponent * x ** (exponent - 1))
    if exponent == 0:
        return smooth(torch.ones_like, torch.zeros_like)
    if exponent != int(exponent):
        return ScalarFunction((Piece(value, slope, start=0.0),))
    if exponent < 0:
        return ScalarFunction((Piece(value, slope, end=0.0), Piece(value, slope, start=0.0)), poles=(0.0,))
    if exponent % 2 == 0:
        return smooth(value, slope, turns=(0.0,))
    return smooth(value, slope, bends=(0.0,) if exponent > 1 else ())
