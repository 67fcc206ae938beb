"""The noisy top-k of Gradients Index Pruning (Yang et al., 2023): how far it wanders, what it costs.

Of d coordinates the m largest are kept, but for i of them, which trade places with i of the others, drawn
with the probability

    P(i) = a_i / ψ(θ),   a_i = C(m, i) C(d − m, i) e^{−2θi},   ψ(θ) = Σ a_i,   i = 0 … min(m, d − m).

The a_i are log-concave, so that all sums run only where the mass is: some ten standard deviations to either
side of the mode, a few √d terms. Wherever `d` and `m` are asked for, a sequence of each means independent
groups, one mechanism a group with the same θ; their results add.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import gammaln, ndtri

from ..errors import require
from . import balanced

Array = NDArray[np.float64]

TINY = 46.0  # nats under the mode where a window ends: e^−46 = 1e−20


@dataclass(frozen=True)
class Swaps:
    """The distribution of i on the window start … start + len(log_p) − 1, outside of which there is no mass."""

    start: int
    log_p: Array
    log_psi: float

    @property
    def p(self) -> Array:
        return np.exp(self.log_p)

    @property
    def mean(self) -> float:
        return self.start + float(self.p @ np.arange(len(self.log_p)))

    @property
    def variance(self) -> float:
        """Var(i), from the window's own mean, so that nothing cancels."""
        offset = np.arange(len(self.log_p)) - (self.mean - self.start)
        return float(self.p @ offset**2)


def swaps(theta: float, d: int, m: int) -> Swaps:
    """How many of the m kept coordinates are exchanged: P(i) for one group (equations 33, 36)."""
    check(theta)
    most = min(m, d - m)
    if math.isinf(theta) or most == 0:
        return Swaps(0, np.zeros(1), 0.0)
    top, width = mode(theta, d, m)
    while True:
        start, stop = max(top - width, 0), min(top + width, most)
        i = np.arange(start, stop, dtype=float)
        # log a_{i+1} − log a_i, summed away from the mode: next to it the steps are small, and so are their errors.
        step = np.log((m - i) * (d - m - i)) - 2 * (np.log1p(i) + theta)
        down = -np.cumsum(step[: top - start][::-1])[::-1]
        log_a = np.concatenate([down, [0.0], np.cumsum(step[top - start :])])
        if (start == 0 or log_a[0] < -TINY) and (stop == most or log_a[-1] < -TINY):
            break
        width *= 2
    total = float(np.logaddexp.reduce(log_a))
    anchor = log_binomial(m, top) + log_binomial(d - m, top) - 2 * theta * top
    return Swaps(start, log_a - total, anchor + total)


def mode(theta: float, d: int, m: int) -> tuple[int, int]:
    """The most likely i, where a_{i+1}/a_i falls through 1, and a first guess at the window's half-width."""
    q, most = math.exp(-2 * theta), min(m, d - m)
    # (1 − q) i² + (2 + q d) i = q m (d − m) − 1, solved in the form that is stable at q = 1.
    linear, free = 2 + q * d, q * m * (d - m) - 1
    root = math.ceil(2 * free / (linear + math.sqrt(max(linear**2 + 4 * (1 - q) * free, 0.0))))
    top = min(max(root, 0), most)
    curvature = 1 / (m - top + 1) + 1 / (d - m - top + 1) + 2 / (top + 1)
    return top, 16 + math.ceil(math.sqrt(2 * TINY / curvature))


def log_psi(theta: float, d: ArrayLike, m: ArrayLike) -> float:
    """log ψ(θ), the normaliser of the mechanism (equation 38)."""
    return total(d, m, lambda n, kept: swaps(theta, n, kept).log_psi)


def expected_swaps(theta: float, d: ArrayLike, m: ArrayLike) -> float:
    """F(θ) = E[i], how many of the top m are lost on average (Lemma 4)."""
    return total(d, m, lambda n, kept: swaps(theta, n, kept).mean)


def expected_swaps_derivative(theta: float, d: ArrayLike, m: ArrayLike) -> float:
    """F′(θ) = −2 Var(i), never positive (equations 39, 40)."""
    return -2 * total(d, m, lambda n, kept: swaps(theta, n, kept).variance)


# ---- what it costs


def sensitivity(d: ArrayLike, m: ArrayLike) -> int:
    """The largest ‖I − I′‖₁ between two masks with m ones of d: 2 min(m, d − m), added over groups."""
    return 2 * sum(count * min(kept, n - kept) for n, kept, count in groups(d, m))


def epsilon_for_theta(theta: float, d: ArrayLike, m: ArrayLike) -> float:
    """The pure ε of one draw: θ times the sensitivity, as ψ is the same for every centre."""
    check(theta)
    reach = sensitivity(d, m)
    return theta * reach if reach else 0.0  # a mask that cannot move tells nothing, even at θ = ∞


def theta_for_epsilon(epsilon: float, d: ArrayLike, m: ArrayLike) -> float:
    """The θ whose draw costs ε; ∞ where there is only one mask, which costs nothing."""
    require(epsilon >= 0, f"ε must not be negative, got {epsilon:g}: a budget of 0 draws the mask at random.")
    reach = sensitivity(d, m)
    return epsilon / reach if reach else math.inf


def theta_for_swaps(swapped: float, d: ArrayLike, m: ArrayLike) -> float:
    """The θ at which `swapped` of the kept coordinates are lost on average: F⁻¹."""
    most = expected_swaps(0.0, d, m)
    require(
        0 < swapped <= most,
        f"between 0 and {most:g} of the kept coordinates can be lost (all of it at θ = 0), got {swapped:g}.",
    )
    high = 1.0
    while expected_swaps(high, d, m) > swapped:
        high *= 2
    return float(brentq(lambda theta: expected_swaps(theta, d, m) - swapped, 0.0, high, xtol=1e-15, rtol=1e-14))


# ---- what it loses


def pruning_mse(
    theta: float, d: ArrayLike, m: ArrayLike, sigma: float = 1.0, *, exact: bool = False, printed: bool = False
) -> float:
    """E‖g − g ⊙ I‖² for d gradients of N(0, σ²) and a noisy mask I (Lemma 3, Theorem 3):

        MSE_0 + σ² ζ E[i],   MSE_0 = dσ² (1 − k − 2aφ(a)),   ζ = 2aφ(a) / (k (1 − k)),

    with k = m/d and a = Φ⁻¹(1 − k/2), the threshold for d → ∞; `exact` averages over the threshold that d
    draws really have. `printed` has the document's MSE_0, with a factor 1 − k too many, and its
    ζ = 1 + 2aφ(a)/k.
    """
    check(theta)
    require(0 <= sigma < math.inf, f"σ must be finite and not negative, got {sigma:g}.")
    require(not (exact and printed), "the printed form knows only d → ∞: leave out exact or printed.")

    def one(n: int, kept: int) -> float:
        if kept in (0, n):
            return float(n - kept)
        k = kept / n
        if exact:
            least = (n - kept) * balanced.removed_second_moment(1 - k, block=n)
            tail = 1 - k - least / n
        else:
            tail = tail_moment(k)
            least = n * (1 - k - tail) * (1 - k if printed else 1)
        zeta = 1 + tail / k if printed else tail / (k * (1 - k))
        return least + zeta * swaps(theta, n, kept).mean

    return sigma**2 * total(d, m, one)


def tail_moment(k: float) -> float:
    """2aφ(a) for a = Φ⁻¹(1 − k/2): what the tails of N(0, 1) with mass k hold of E[x²] beyond k."""
    a = -float(ndtri(k / 2))
    return a * math.sqrt(2 / math.pi) * math.exp(-(a**2) / 2)


# ---- what they share


def total(d: ArrayLike, m: ArrayLike, one: Callable[[int, int], float]) -> float:
    """Σ one(d_g, m_g) over groups, each size worked out once."""
    return float(sum(count * one(n, kept) for n, kept, count in groups(d, m)))


def groups(d: ArrayLike, m: ArrayLike) -> Iterator[tuple[int, int, int]]:
    """Each (d, m) that occurs, with how often it does."""
    sizes, kept = (np.asarray(x) for x in (d, m))
    for name, values in (("d", sizes), ("m", kept)):
        require(
            values.ndim < 2 and values.size > 0 and bool((values == np.floor(values)).all()),
            f"{name} must be a whole number, or a sequence of them, one for each group, got {values}.",
        )
    require(
        not sizes.ndim or not kept.ndim or sizes.shape == kept.shape,
        f"d has {sizes.size} groups and m has {kept.size}: give one of each for a group.",
    )
    pairs, counts = np.unique(np.stack(np.broadcast_arrays(np.atleast_1d(sizes), kept)), axis=1, return_counts=True)
    for n, k, count in zip(*pairs.astype(int).tolist(), counts.tolist(), strict=True):
        require(0 <= k <= n and n > 0, f"m={k} of d={n} coordinates cannot be kept: m runs from 0 to d.")
        yield n, k, count


def log_binomial(n: int, k: int) -> float:
    """log C(n, k) to full relative accuracy: by entropy and Stirling's remainders, where lgamma would cancel."""
    if k in (0, n):
        return 0.0
    p, rest = k / n, n - k
    entropy = -k * math.log(p) - rest * math.log1p(-p)
    return entropy + math.log(n / (2 * math.pi * k * rest)) / 2 + stirling(n) - stirling(k) - stirling(rest)


def stirling(n: int) -> float:
    """log n! − (n + ½) log n + n − ½ log 2π."""
    if n < 16:
        return float(gammaln(n + 1)) - (n + 0.5) * math.log(n) + n - math.log(2 * math.pi) / 2
    return (1 / 12 - (1 / 360 - (1 / 1260 - (1 / 1680 - 1 / 1188 / n**2) / n**2) / n**2) / n**2) / n


def check(theta: float) -> None:
    """Refuse a θ that rewards swaps."""
    require(theta >= 0, f"θ must not be negative, got {theta:g}: 0 draws the mask at random, ∞ is the top-m itself.")
