"""Learning rates and averaging weights of Theorems 4.1 and 4.2 of Lin et al. (2020)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from .time_series import Array, gradient_second_moments, require_valid_run


def rates(mu: float, T: int) -> Array:
    """Return γ_t = 4 / (μ (t + 2)), the learning rates of Theorem 4.1."""
    require_valid_run(T, mu=mu)
    return 4 / (mu * (np.arange(T + 1.0) + 2))


def weights(T: int) -> Array:
    """Return p_t = 2 (t + 1) / ((T + 1) (T + 2)), with which Theorem 4.1 averages over the iterates."""
    require_valid_run(T)
    return 2 * np.arange(1.0, T + 2) / ((T + 1) * (T + 2))


def rate(*, L: float, G: ArrayLike, gap: float, T: int, printed: bool = False) -> float:
    """Return γ = √(2Δ / (L G² (T + 1))), the constant rate that minimizes Theorem 4.2's bound; Δ is `gap`.

    The printed rate lacks the 2, and has √t for √(T + 1), with which the proof does not hold.
    """
    require_valid_run(T, L=L, gap=gap)
    second_moment = float(gradient_second_moments(G, T).mean())
    require_valid_run(T, G=second_moment)
    return math.sqrt((1 if printed else 2) * gap / (L * second_moment * (T + 1)))
