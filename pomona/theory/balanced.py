"""The error of balanced pruning: the appendix of Balanced Sparsity (Yao et al., AAAI 2019), corrected.

Weights are N(0, σ_w²), inputs N(0, σ_x²), all independent. The smallest |w| are pruned, from the whole matrix
(`block=None`: the limit of infinitely many weights) or from each block of b separately, r = sparsity · b of them,
rounded as the pattern does. A pruned weight dw is ± one of the r smallest order statistics of b half-normal draws, and
z = dw · x is its contribution to the output, which pruning removes.

One identity makes all results exact: a draw is among the r smallest when it is below the r-th smallest of the b − 1
others, whose quantile U is Beta(r, b − r). So, with q(u) = Φ⁻¹((1 + u)/2), for any h

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
    """Return E[dw²] of a pruned weight; 0 where none is pruned."""
    require_valid_scales(sparsity, sigma_w=sigma_w)
    # ∫₀^q x² 2φ(x) dx is the distribution function of χ² with three degrees, at q².
    return float(sigma_w**2 * mean_over_removed(sparsity, block, lambda q: gammainc(1.5, q**2 / 2)))


def output_variance(sparsity: float, sigma_w: float, sigma_x: float, block: int | None = None) -> float:
    """Return Var(z) = σ_x² E[dw²] (Theorem 1); the mean is 0."""
    require_valid_scales(sparsity, sigma_x=sigma_x)
    return sigma_x**2 * removed_second_moment(sparsity, sigma_w, block)


def characteristic(t: ArrayLike, sparsity: float, sigma_w: float, sigma_x: float, block: int | None = None) -> Array:
    """Return E exp(itz) = E exp(−(t σ_x dw)² / 2) (Lemma 1), real because z is symmetric; 1 if nothing is pruned."""
    require_valid_scales(sparsity, sigma_w=sigma_w, sigma_x=sigma_x)
    s = np.sqrt(1 + (np.asarray(t, dtype=float) * sigma_w * sigma_x) ** 2)
    if pruned_per_block(sparsity, block) == 0:
        return np.ones_like(s)
    return np.asarray(mean_over_removed(sparsity, block, lambda q: erf(np.multiply.outer(s, q) / math.sqrt(2)))) / s


def order_statistic(rank: int, size: int, power: float = 1.0, sigma_w: float = 1.0) -> float:
    """Return the exact E[X^power] of the `rank`-th smallest of `size` weights by magnitude."""
    require(1 <= rank <= size, f"rank {rank} of {size} does not exist: ranks run from 1 to the size.")
    require_valid_scales(0.0, sigma_w=sigma_w)
    return sigma_w**power * float(expectation_under_beta(lambda q: q**power, rank, size - rank + 1))


def asymptotic(rank: ArrayLike, size: int, sigma_w: float = 1.0, *, printed: bool = False) -> tuple[Array, Array]:
    """Return the limits of an order statistic's mean and variance for large size (equation A.3), 0 < rank < size.

    `printed` takes F and f of the Gaussian, although the weights are ordered by |w|, which is half-normal.
    """
    p = np.asarray(rank, dtype=float) / size
    require(bool(((p > 0) & (p < 1)).all()), f"A.3 is about ranks above 0 and below {size}, got {p * size}.")
    q = ndtri(p) if printed else half_normal_quantile(p, 1 - p)
    density = np.exp(-(q**2) / 2) / math.sqrt(2 * math.pi) * (1 if printed else 2)
    return sigma_w * q, sigma_w**2 * p * (1 - p) / (size * density**2)


# ---- printed forms


def output_variance_printed(
    sparsity: float, sigma_w: float, sigma_x: float, size: int, blocks: int | None = None
) -> float:
    """Return the printed output variance for a matrix of `size` = MN weights: B.2, or B.3 with `blocks` = MK blocks.

    The paper has σ_x in place of its square, drops the means μ_i², and takes F and f of the Gaussian.
    """
    require_valid_scales(sparsity, sigma_w=sigma_w, sigma_x=sigma_x)
    step = blocks or 1
    require(size % step == 0, f"{size} weights cannot be split into {step} equal blocks: choose a divisor.")
    r = pruned_per_block(sparsity, size // step)
    # ⌈i/MK⌉ · MK takes each multiple of MK up to r MK as often as the others.
    return sigma_x * float(asymptotic(step * np.arange(1, r + 1), size, sigma_w, printed=True)[1].mean()) if r else 0.0


def characteristic_printed(
    t: ArrayLike, sparsity: float, sigma_w: float, sigma_x: float, size: int, blocks: int | None = None
) -> Array:
    """Return the printed characteristic function (A.1, A.2): (1 + t²)^{−1/2} times the printed variance.

    At t = 0 it is not 1, as a characteristic function must be.
    """
    scale = output_variance_printed(sparsity, sigma_w, sigma_x, size, blocks)
    return scale / np.sqrt(1 + np.asarray(t, dtype=float) ** 2)


# ---- order statistics of half-normal draws


def mean_over_removed(sparsity: float, block: int | None, H: Callable[[Array], Array]) -> Any:
    """Return 1/r Σ_{j≤r} E h(X_(j:b)), the mean of h over the removed draws, from H, the integral of h."""
    r, b = (sparsity, 1.0) if block is None else (pruned_per_block(sparsity, block), block)
    if r == 0:
        return 0.0
    if block is None:
        return H(half_normal_quantile(np.array([r]), np.array([1 - r])))[..., 0] / r
    return expectation_under_beta(H, r, b - r) * b / r


def expectation_under_beta(function: Callable[[Array], Array], a: float, b: float) -> Any:
    """Return E function(q(U)) for U ~ Beta(a, b), a and b at least 1, over the last axis of the function's result.

    In t = log(u / (1 − u)) the density e^{at} (1 + e^t)^{−a−b} is analytic and falls off quickly on both sides, so the
    trapezoid rule converges exponentially. The density is normalized by its own sum.
    """
    width = math.sqrt(1 / a + 1 / b)
    step, reach = min(width / 3, 0.15), math.sqrt(80) * width
    t = math.log(a / b) + np.arange(-reach - 40 / a, reach + 40 / b, step)
    log_density = a * log_expit(t) + b * log_expit(-t)
    density = np.exp(log_density - log_density.max())
    return function(half_normal_quantile(expit(t), expit(-t))) @ density / density.sum()


def half_normal_quantile(u: Array, rest: Array) -> Array:
    """Return q(u) = Φ⁻¹((1 + u)/2) of the half-normal, from u where u is small and else from rest = 1 − u."""
    return np.where(u < 0.5, math.sqrt(2) * erfinv(np.minimum(u, 0.5)), -ndtri(rest / 2))


def pruned_per_block(sparsity: float, block: int | None) -> float:
    """Return the number of weights that the pattern prunes from a block; without blocks, the pruned share."""
    return sparsity if block is None else Balanced(block=block).pruned_per_block(sparsity, block)


def require_valid_scales(sparsity: float, **scale: float) -> None:
    """Raise PomonaError for a sparsity outside [0, 1], and for a negative or infinite scale."""
    require(0 <= sparsity <= 1, f"sparsity is the pruned share, from 0 to 1, got {sparsity:g}.")
    for name, value in scale.items():
        require(0 <= value < math.inf, f"{name} must be finite and not negative, got {value:g}.")
