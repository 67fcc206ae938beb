"""Hidden widths at which a random network contains a target: Theorem A.1 of Chijiwa et al. (2021)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ...errors import require
from .failure_probability import log_miss_probability, require_valid_parameters


def width_printed(d_in: int, d_out: int, layers: int, epsilon: float, delta: float, R: int) -> int:
    """Return Theorem A.1's width of the hidden layer between d_in and d_out, as printed."""
    require_valid_parameters(d_in=d_in, d_out=d_out, layers=layers, R=R, epsilon=epsilon, delta=delta)
    tau = epsilon / (4 * layers * d_in * math.sqrt(d_out))
    return 2 * d_in * math.ceil(math.log(2 * layers * d_in * d_out / delta) / (tau * R / 2) ** 2)


def width(
    d_in: int, d_out: int, layers: int, epsilon: float, delta: float, R: int, *, reach: float | None = None
) -> int:
    """Return the width that the proof needs: for each weight and sign one unit fits, except with probability δ/l.

    `reach` bounds the entries of the layer's input. By default it is √d_in + ε (1 where there is only one layer), which
    is valid wherever the network has no more inputs than this layer; see `widths`.
    """
    require_valid_parameters(d_in=d_in, d_out=d_out, layers=layers, R=R, epsilon=epsilon, delta=delta)
    if reach is None:
        reach = 1.0 if layers == 1 else math.sqrt(d_in) + epsilon
    require(0 < reach < math.inf, f"reach bounds what comes into the layer, and must be positive, got {reach:g}.")
    log_miss = float(log_miss_probability(1.0, tolerance(d_in, d_out, layers, epsilon, reach), R))
    p = -math.expm1(log_miss)
    # log(1 − p²), in the form that loses no digits.
    log_fails = math.log1p(-p * p) if p < 0.5 else log_miss + math.log1p(p)
    return 2 * d_in * math.ceil(math.log(2 * layers * d_in * d_out / delta) / -log_fails)


def widths(sizes: Sequence[int], epsilon: float, delta: float, R: int, *, printed: bool = False) -> list[int]:
    """Return the hidden widths of g for a target with layers of these sizes, d_0 … d_l."""
    layers = list(itertools.pairwise(sizes))
    require(bool(layers), f"a network has inputs and outputs, so at least two sizes, got {list(sizes)}.")
    if printed:
        return [width_printed(i, o, len(layers), epsilon, delta, R) for i, o in layers]
    return [
        width(i, o, len(layers), epsilon, delta, R, reach=reach)
        for (i, o), reach in zip(layers, reaches(sizes, epsilon), strict=True)
    ]


def reaches(sizes: Sequence[int], epsilon: float) -> list[float]:
    """Return a bound of the entries of each layer's input: 1 for the first, ‖x_0‖₂ + ε ≤ √d_0 + ε for all others."""
    return [1.0] + [math.sqrt(sizes[0]) + epsilon] * (len(sizes) - 2)


def tolerance(d_in: int, d_out: int, layers: int, epsilon: float, reach: float) -> float:
    """Return τ, half of the error that each weight may have for the layer's error to stay below ε/l.

    |w − uv| ≤ 2τ, and only one of the two units is active for any x, so their errors do not add.
    """
    return epsilon / (2 * layers * reach * d_in * math.sqrt(d_out))
