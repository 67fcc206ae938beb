"""The randomized top-k mask of Gradients Index Pruning (Yang et al., 2023): its distribution, privacy cost and error.

Of d coordinates the m largest are kept, except for i of them, which are swapped with i of the others. The number of
swaps i has the probability

    P(i) = a_i / ψ(θ),   a_i = C(m, i) C(d − m, i) e^{−2θi},   ψ(θ) = Σ a_i,   i = 0 … min(m, d − m).

The a_i are log-concave, so all sums run over a window that holds the mass: about ten standard deviations to either side
of the mode, a few √d terms. A sequence for `d` and `m` means independent groups, one mechanism for each with the same
θ; their results add.
"""

from __future__ import annotations

import functools
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

WINDOW_DEPTH = 46.0  # nats below the mode at which a window ends: e^−46 = 1e−20
EXACT_LIMIT = 10**9  # d from which rounding hides the difference between the exact and the asymptotic pruning error
STIRLING_FROM = 16  # n from which five terms of Stirling's series are exact in float64


@dataclass(frozen=True)
class Swaps:
    """The distribution of the number of swaps i on a window from `start`, outside of which the mass is negligible."""

    start: int
    log_p: Array
    log_psi: float

    @property
    def p(self) -> Array:
        """P(i) for each i of the window."""
        return np.exp(self.log_p)

    @property
    def mean(self) -> float:
        """E[i]."""
        return self.start + float(self.p @ np.arange(len(self.log_p)))

    @property
    def variance(self) -> float:
        """Var(i), summed around the mean so that nothing cancels."""
        offset = np.arange(len(self.log_p)) - (self.mean - self.start)
        return float(self.p @ offset**2)


def swaps(theta: float, d: int, m: int) -> Swaps:
    """Return the distribution of the number of swapped coordinates of one group, P(i) (equations 33, 36)."""
    require_valid_theta(theta)
    most = min(m, d - m)
    if math.isinf(theta) or most == 0:
        return Swaps(0, np.zeros(1), 0.0)
    mode, width = find_mode(theta, d, m)
    while True:
        start, stop = max(mode - width, 0), min(mode + width, most)
        i = np.arange(start, stop, dtype=float)
        # log a_{i+1} − log a_i, summed outwards from the mode, where the steps and their rounding errors are small.
        step = np.log((m - i) * (d - m - i)) - 2 * (np.log1p(i) + theta)
        down = -np.cumsum(step[: mode - start][::-1])[::-1]
        log_a = np.concatenate([down, [0.0], np.cumsum(step[mode - start :])])
        if (start == 0 or log_a[0] < -WINDOW_DEPTH) and (stop == most or log_a[-1] < -WINDOW_DEPTH):
            break
        width *= 2
    log_sum = float(np.logaddexp.reduce(log_a))
    log_a_mode = log_binomial(m, mode) + log_binomial(d - m, mode) - 2 * theta * mode
    return Swaps(start, log_a - log_sum, log_a_mode + log_sum)


def find_mode(theta: float, d: int, m: int) -> tuple[int, int]:
    """Return the most likely i, where a_{i+1}/a_i falls through 1, and a first guess of the window's half-width."""
    q, most = math.exp(-2 * theta), min(m, d - m)
    # (1 − q) i² + (2 + q d) i = q m (d − m) − 1, solved in a form that is stable at q = 1.
    linear, free = 2 + q * d, q * m * (d - m) - 1
    root = math.ceil(2 * free / (linear + math.sqrt(max(linear**2 + 4 * (1 - q) * free, 0.0))))
    mode = min(max(root, 0), most)
    curvature = 1 / (m - mode + 1) + 1 / (d - m - mode + 1) + 2 / (mode + 1)
    return mode, 16 + math.ceil(math.sqrt(2 * WINDOW_DEPTH / curvature))


def log_psi(theta: float, d: ArrayLike, m: ArrayLike) -> float:
    """Return log ψ(θ), the normalizer of the mechanism (equation 38)."""
    return sum_over_groups(d, m, lambda n, kept: swaps(theta, n, kept).log_psi)


def expected_swaps(theta: float, d: ArrayLike, m: ArrayLike) -> float:
    """Return F(θ) = E[i], the mean number of the top m that are swapped out (Lemma 4)."""
    return sum_over_groups(d, m, lambda n, kept: swaps(theta, n, kept).mean)


def expected_swaps_derivative(theta: float, d: ArrayLike, m: ArrayLike) -> float:
    """Return F′(θ) = −2 Var(i), which is never positive (equations 39, 40)."""
    return -2 * sum_over_groups(d, m, lambda n, kept: swaps(theta, n, kept).variance)


# ---- privacy cost


def sensitivity(d: ArrayLike, m: ArrayLike) -> int:
    """Return the largest ‖I − I′‖₁ between two masks with m ones of d: 2 min(m, d − m), added over groups."""
    return 2 * sum(count * min(kept, n - kept) for n, kept, count in distinct_groups(d, m))


def epsilon_for_theta(theta: float, d: ArrayLike, m: ArrayLike) -> float:
    """Return the pure ε of one draw: θ times the sensitivity, because ψ is the same for every true mask."""
    require_valid_theta(theta)
    distance = sensitivity(d, m)
    return theta * distance if distance else 0.0  # a mask that cannot change reveals nothing, even at θ = ∞


def theta_for_epsilon(epsilon: float, d: ArrayLike, m: ArrayLike) -> float:
    """Return the θ whose draw costs ε; ∞ where only one mask exists, which costs nothing."""
    require(epsilon >= 0, f"ε must not be negative, got {epsilon:g}: a budget of 0 draws the mask at random.")
    distance = sensitivity(d, m)
    return epsilon / distance if distance else math.inf


def theta_for_swaps(swapped: float, d: ArrayLike, m: ArrayLike) -> float:
    """Return the θ at which `swapped` of the kept coordinates are swapped out on average: F⁻¹."""
    most = expected_swaps(0.0, d, m)
    require(
        0 < swapped <= most,
        f"between 0 and {most:g} of the kept coordinates can be lost (all of it at θ = 0), got {swapped:g}.",
    )
    high = 1.0
    while expected_swaps(high, d, m) > swapped:
        high *= 2
    return float(brentq(lambda theta: expected_swaps(theta, d, m) - swapped, 0.0, high, xtol=1e-15, rtol=1e-14))


# ---- pruning error


def pruning_mse(
    theta: float, d: ArrayLike, m: ArrayLike, sigma: float = 1.0, *, exact: bool | None = None, printed: bool = False
) -> float:
    """Return E‖g − g ⊙ I‖² for d gradients of N(0, σ²) and a randomized mask I (Lemma 3, Theorem 3):

        MSE_0 + σ² ζ E[i],   MSE_0 = dσ² (1 − k − τ),   ζ = τ / (k (1 − k)),   k = m/d.

    The exact form has dτ + m for the expected energy of the m largest of d draws. The asymptotic form (exact=False) has
    its limit τ = 2aφ(a) with a = Φ⁻¹(1 − k/2), which misses the energy of a finite d by a constant: about
    σ² k (1 − k) a / 2φ(a). By default each group up to EXACT_LIMIT is exact, and a larger one is asymptotic.

    `printed` has the paper's MSE_0, with an extra factor 1 − k, and its ζ = 1 + 2aφ(a)/k, both for d → ∞.
    """
    require_valid_theta(theta)
    require(0 <= sigma < math.inf, f"σ must be finite and not negative, got {sigma:g}.")
    require(not (exact and printed), "the printed form knows only d → ∞: leave out exact or printed.")
    if exact:
        require_exact_sizes(d, m)

    def group_error(n: int, kept: int) -> float:
        if kept in (0, n):
            return float(n - kept)
        k = kept / n
        if printed or exact is False or n > EXACT_LIMIT:
            tail = tail_moment(k)
            least = n * (1 - k - tail) * (1 - k if printed else 1)
        else:
            least = smallest_energy(n, kept)
            tail = 1 - k - least / n
        zeta = 1 + tail / k if printed else tail / (k * (1 - k))
        return least + zeta * swaps(theta, n, kept).mean

    return sigma**2 * sum_over_groups(d, m, group_error)


def require_exact_sizes(d: ArrayLike, m: ArrayLike) -> None:
    """Raise PomonaError for a group that is too large for the exact form of the pruning error."""
    largest = max(n for n, _, _ in distinct_groups(d, m))
    require(
        largest <= EXACT_LIMIT,
        f"the exact error is computed up to d = {EXACT_LIMIT:,}, got {largest:,}: use the asymptotic one, which "
        "agrees with it to nine digits there.",
    )


@functools.lru_cache(maxsize=1024)
def smallest_energy(d: int, m: int) -> float:
    """Return the expected sum of squares of all but the m largest of d draws of N(0, 1), by order statistics.

    A draw is removed when it is below the (d − m)-th smallest of the others, whose quantile is Beta(d − m, m): one
    quadrature at any d.
    """
    return (d - m) * balanced.removed_second_moment(1 - m / d, block=d)


def tail_moment(k: float) -> float:
    """Return 2aφ(a) for a = Φ⁻¹(1 − k/2): E[x²] over the tails of N(0, 1) with mass k, minus k."""
    a = -float(ndtri(k / 2))
    return a * math.sqrt(2 / math.pi) * math.exp(-(a**2) / 2)


# ---- groups and binomials


def sum_over_groups(d: ArrayLike, m: ArrayLike, function: Callable[[int, int], float]) -> float:
    """Return Σ function(d_g, m_g) over groups, with each distinct pair computed once."""
    return float(sum(count * function(n, kept) for n, kept, count in distinct_groups(d, m)))


def distinct_groups(d: ArrayLike, m: ArrayLike) -> Iterator[tuple[int, int, int]]:
    """Yield each distinct (d, m) with the number of groups that have it; raise PomonaError for invalid ones."""
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
    """Return log C(n, k) to full relative accuracy, by entropy and Stirling remainders where lgamma would cancel."""
    if k in (0, n):
        return 0.0
    p, rest = k / n, n - k
    entropy = -k * math.log(p) - rest * math.log1p(-p)
    half_log = math.log(n / (2 * math.pi * k * rest)) / 2
    return entropy + half_log + stirling_remainder(n) - stirling_remainder(k) - stirling_remainder(rest)


def stirling_remainder(n: int) -> float:
    """Return log n! − (n + ½) log n + n − ½ log 2π."""
    if n < STIRLING_FROM:
        return float(gammaln(n + 1)) - (n + 0.5) * math.log(n) + n - math.log(2 * math.pi) / 2
    return (1 / 12 - (1 / 360 - (1 / 1260 - (1 / 1680 - 1 / 1188 / n**2) / n**2) / n**2) / n**2) / n


def require_valid_theta(theta: float) -> None:
    """Raise PomonaError for a negative θ, which would favour swaps."""
    require(theta >= 0, f"θ must not be negative, got {theta:g}: 0 draws the mask at random, ∞ is the top-m itself.")
