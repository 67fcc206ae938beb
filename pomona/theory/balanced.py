"""What balanced pruning removes: the appendix of Balanced Sparsity (Yao et al., AAAI 2019), put right.

Weights are N(0, σ_w²), inputs N(0, σ_x²), all independent; the smallest |w| are pruned, from the whole
matrix (`block=None`: as from infinitely many) or from each block of b alone, r = sparsity · b of them, rounded
as the pattern does. A pruned weight dw is ± one of the r smallest order statistics of b half-normal draws, and
z = dw · x is what the output loses by it.

One identity makes all of it exact: a draw is among the r smallest when it is under the r-th smallest of the
b − 1 others, whose quantile U is Beta(r, b − r). So, with q(u) = Φ⁻¹((1 + u)/2), for any h

    1/r Σ_{j≤r} E h(X_(j:b)) = b/r E[H(q(U))],   H(q) = ∫₀^q h(x) 2φ(x) dx,

and without blocks U is the sparsity itself, and b/r its inverse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import erf, erfinv, expit, gammainc, log_expit, ndtri

from ..errors import require
from ..patterns import Balanced

Array = NDArray[np.float64]


def removed_second_moment(sparsity: float, sigma_w: float = 1.0, block: int | None = None) -> float:
    """E[dw²] of a weight that was pruned; 0 where none is."""
    check(sparsity, sigma_w=sigma_w)
    # ∫₀^q x² 2φ(x) dx is the distribution function of χ² with three degrees, at q².
    return float(sigma_w**2 * removed(sparsity, block, lambda q: gammainc(1.5, q**2 / 2)))


def output_variance(sparsity: float, sigma_w: float, sigma_x: float, block: int | None = None) -> float:
    """Var(z) = σ_x² E[dw²] (Theorem 1); the mean is 0."""
    check(sparsity, sigma_x=sigma_x)
    return sigma_x**2 * removed_second_moment(sparsity, sigma_w, block)


def characteristic(t: ArrayLike, sparsity: float, sigma_w: float, sigma_x: float, block: int | None = None) -> Array:
    """E exp(itz) = E exp(−(t σ_x dw)² / 2) (Lemma 1), real because z is symmetric; 1 where nothing is pruned."""
    check(sparsity, sigma_w=sigma_w, sigma_x=sigma_x)
    s = np.sqrt(1 + (np.asarray(t, dtype=float) * sigma_w * sigma_x) ** 2)
    if count(sparsity, block) == 0:
        return np.ones_like(s)
    return np.asarray(removed(sparsity, block, lambda q: erf(np.multiply.outer(s, q) / math.sqrt(2)))) / s


def order_statistic(rank: int, size: int, power: float = 1.0, sigma_w: float = 1.0) -> float:
    """E[X^power] of the `rank`-th smallest of `size` weights by magnitude, exactly."""
    require(1 <= rank <= size, f"rank {rank} of {size} does not exist: ranks run from 1 to the size.")
    check(0.0, sigma_w=sigma_w)
    return sigma_w**power * float(beta_mean(lambda q: q**power, rank, size - rank + 1))


def asymptotic(rank: ArrayLike, size: int, sigma_w: float = 1.0, *, printed: bool = False) -> tuple[Array, Array]:
    """Mean and variance of an order statistic as the size grows (equation A.3), for 0 < rank < size.

    `printed` takes F and f of the Gaussian itself, where the order is that of |w|, which is half-normal.
    """
    p = np.asarray(rank, dtype=float) / size
    require(bool(((p > 0) & (p < 1)).all()), f"A.3 speaks of ranks above 0 and below {size}, got {p * size}.")
    q = ndtri(p) if printed else quantile(p, 1 - p)
    density = np.exp(-(q**2) / 2) / math.sqrt(2 * math.pi) * (1 if printed else 2)
    return sigma_w * q, sigma_w**2 * p * (1 - p) / (size * density**2)


# ---- as printed


def output_variance_printed(
    sparsity: float, sigma_w: float, sigma_x: float, size: int, blocks: int | None = None
) -> float:
    """Equations B.2 and, with `blocks` = MK of them, B.3, for a matrix of `size` = MN weights.

    σ_x stands for its square, the means μ_i² are dropped, and F, f are those of the Gaussian.
    """
    check(sparsity, sigma_w=sigma_w, sigma_x=sigma_x)
    step = blocks or 1
    require(size % step == 0, f"{size} weights cannot be split into {step} equal blocks: choose a divisor.")
    r = count(sparsity, size // step)
    # ⌈i/MK⌉ · MK takes each multiple of MK up to r MK as often as the others.
    return sigma_x * float(asymptotic(step * np.arange(1, r + 1), size, sigma_w, printed=True)[1].mean()) if r else 0.0


def characteristic_printed(
    t: ArrayLike, sparsity: float, sigma_w: float, sigma_x: float, size: int, blocks: int | None = None
) -> Array:
    """Equations A.1 and A.2: (1 + t²)^{−1/2} times the printed variance, which is not 1 at t = 0."""
    scale = output_variance_printed(sparsity, sigma_w, sigma_x, size, blocks)
    return scale / np.sqrt(1 + np.asarray(t, dtype=float) ** 2)


# ---- the identity


def removed(sparsity: float, block: int | None, H: Callable[[Array], Array]) -> Any:
    """1/r Σ_{j≤r} E h(X_(j:b)) from H, the integral of h."""
    r, b = (sparsity, 1.0) if block is None else (count(sparsity, block), block)
    if r == 0:
        return 0.0
    if block is None:
        return H(quantile(np.array([r]), np.array([1 - r])))[..., 0] / r
    return beta_mean(H, r, b - r) * b / r


def beta_mean(function: Callable[[Array], Array], a: float, b: float) -> Any:
    """E function(q(U)) for U ~ Beta(a, b), a and b at least 1, over the last axis of what the function returns.

    In t = log(u / (1 − u)) the density e^{at} (1 + e^t)^{−a−b} is analytic and falls off quickly on both sides,
    where the trapezoid rule converges exponentially; it is normalised by its own sum.
    """
    width = math.sqrt(1 / a + 1 / b)
    step, reach = min(width / 3, 0.15), math.sqrt(80) * width
    t = math.log(a / b) + np.arange(-reach - 40 / a, reach + 40 / b, step)
    log_density = a * log_expit(t) + b * log_expit(-t)
    density = np.exp(log_density - log_density.max())
    return function(quantile(expit(t), expit(-t))) @ density / density.sum()


def quantile(u: Array, rest: Array) -> Array:
    """q(u) = Φ⁻¹((1 + u)/2) of the half-normal, from u where it is small and from rest = 1 − u where that is."""
    return np.where(u < 0.5, math.sqrt(2) * erfinv(np.minimum(u, 0.5)), -ndtri(rest / 2))


def count(sparsity: float, block: int | None) -> float:
    """How many of a block the pattern prunes; without blocks, what share."""
    return sparsity if block is None else Balanced(block=block).pruned_per_block(sparsity, block)


def check(sparsity: float, **scale: float) -> None:
    """Refuse a sparsity that is no share, and a scale that is none."""
    require(0 <= sparsity <= 1, f"sparsity is the pruned share, from 0 to 1, got {sparsity:g}.")
    for name, value in scale.items():
        require(0 <= value < math.inf, f"{name} must be finite and not negative, got {value:g}.")
