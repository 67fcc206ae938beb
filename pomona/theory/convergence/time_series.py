"""Quantities measured at each step t = 0 … T of a run: validation, and averages over runs."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...errors import require
from ..validation import require_positive

Array = NDArray[np.float64]


def gradient_second_moments(G: ArrayLike, T: int) -> Array:
    """Return E‖g(w̃_t)‖² for each t."""
    return average_over_runs(np.square(np.asarray(G, dtype=float)), T, "G")


def pruning_errors(delta: ArrayLike, norm: ArrayLike, T: int) -> Array:
    """Return E‖w_t − w̃_t‖² = E δ_t ‖w_t‖² for each t."""
    shares, norms = np.asarray(delta, dtype=float), np.asarray(norm, dtype=float)
    # Each is validated alone, so that broadcasting cannot take runs for steps.
    for name, values in (("delta", shares), ("norm", norms)):
        average_over_runs(values, T, name)
    require(bool((shares >= 0).all()), f"δ = ‖w − w̃‖² / ‖w‖² cannot be negative, got {shares.min():g}.")
    return average_over_runs(shares * norms**2, T, "delta")


def average_over_runs(values: Array, T: int, name: str) -> Array:
    """Return one number for each t, averaged over runs; raise PomonaError for a wrong length or a value not finite."""
    require(
        values.ndim == 0 or values.shape[-1] == T + 1,
        f"{name} has {values.shape[-1] if values.ndim else 1} entries along its last axis, and t = 0 … T={T} needs "
        f"{T + 1}: give one for each step, or a single number.",
    )
    require(bool(np.isfinite(values).all()), f"{name} must be finite for every t: has the run diverged, or w been 0?")
    return np.broadcast_to(values, (*values.shape[:-1], T + 1)).reshape(-1, T + 1).mean(0)


def require_valid_run(T: int, **positives: float) -> None:
    """Raise PomonaError for a run without steps, and for constants that are not positive."""
    require(T >= 0, f"T is the last step's number, counted from 0, got {T}.")
    require_positive(**positives)


def require_mu_at_most_L(L: float, mu: float) -> None:
    """Raise PomonaError for a strong convexity above the smoothness, which no function has."""
    require(mu <= L, f"μ={mu:g} exceeds L={L:g}, but a function is never more convex than smooth: exchange them?")
