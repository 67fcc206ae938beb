"""Lemmas of Qian & Klabjan (2021) on order statistics and random draws, as printed and as corrected."""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy.special import ndtr

from .distributions import Uniform

LEMMA6_EXPONENT = 3 * math.log(3) - 3  # 0.296 in place of 1/3: Chernoff's exponent at δ = 2 is 3 ln 3 − 2, not 4/3


def lemma1(r: int, n: int, power: int = 1, a: float = 1.0) -> float:
    """Return E X_(r)^p of the r-th smallest of n squares of U[−a, a]: a^2p (r+2p−1)! n! / ((r−1)! (n+2p)!)."""
    return a ** (2 * power) * math.prod((r + i) / (n + 1 + i) for i in range(2 * power))


def lemma3(law: Uniform, depth: int, d: int, delta: float) -> tuple[float, float]:
    """Return c0 and δ0 such that all norms of a network of width d or more are below c0 with probability 1 − δ/10."""
    tau = math.sqrt(8 * math.log(10 * depth / delta) / d)
    return law.K * (math.sqrt(math.pi / 2) + tau), tau**2 / 32


def lemma5(mu: float, excess: float, *, printed: bool = False) -> float:
    """Return the logarithm of Chernoff's bound of P(X ≥ (1 + δ) μ), δ = `excess`: −μ ((1 + δ) log(1 + δ) − δ).

    `printed` returns −μ δ²/(1 + δ), which does not hold.
    """
    if printed:
        return -mu * excess**2 / (1 + excess)
    return -mu * ((1 + excess) * math.log1p(excess) - excess)


def lemma6(bins: int, *, printed: bool = False) -> float:
    """Return a bound of the probability that one of n bins gets more than three times its share of N ≥ n log n balls.

    `printed` returns n^(−1/3), which rests on the printed Lemma 5.
    """
    return bins ** (-1 / 3) if printed else float(bins) ** -LEMMA6_EXPONENT


def theorem4(x: float, m: int, n: int, cdf: Callable[[float], float], *, printed: bool = False) -> float:
    """Return Chibisov's limit of P(X_(m) < x), X_(m) the m-th smallest of n: Φ((n F(x) − m)/√m).

    `printed` leaves out the m in the numerator.
    """
    return float(ndtr((n * cdf(x) - (0 if printed else m)) / math.sqrt(m)))


def no_repeat(draws: int, size: int) -> float:
    """Return log D!/((D − N)! D^N), the log-probability that N draws with replacement from D are all different."""
    if draws > size:
        return -math.inf
    return math.lgamma(size + 1) - math.lgamma(size - draws + 1) - draws * math.log(size)


def distinct(draws: int, size: int) -> float:
    """Return the expected fraction of D entries that N draws with replacement hit: 1 − (1 − 1/D)^N."""
    return -math.expm1(draws * math.log1p(-1 / size)) if size > 1 else float(draws > 0)


def bin_count_bound(balls: int, bins: int, failure: float) -> float:
    """Return a count that no bin's number of balls reaches, except with probability `failure`.

    It is Bernstein's form of Chernoff's bound, with a union bound over the bins.
    """
    mean, g = balls / bins, math.log(bins / failure)
    return mean + g / 3 + math.sqrt(g**2 / 9 + 2 * g * mean)


def order_statistic_bound(rank: int, size: int, failure: float) -> float:
    """Return a level that the (r + 1)-th smallest of n uniform numbers exceeds with probability `failure` at most.

    P(U > x) = P(Bin(n, x) ≤ r) ≤ exp(−n KL(r/n, x)), and KL(p, x) ≥ (x − p)² / 2x.
    """
    p, g = rank / size, math.log(1 / failure) / size
    return min(1.0, p + g + math.sqrt(g * g + 2 * p * g))
