"""Random matrices and random draws: what the theorems of Qian & Klabjan, ICML 2021, rest on.

A variable uniform on [−a, a] is smaller in the convex order than a Gaussian of standard deviation a√(2π)/4, since
E(U − t)₊ ≤ E(G − t)₊ for all t, with equality at 0. A norm is convex, so E‖U‖ ≤ a √(2π)/4 (√rows + √columns); it is
1-Lipschitz, so that P(‖U‖ > E‖U‖ + s) ≤ exp(−s²/8a²) (Boucheron, Lugosi & Massart 2013, Theorem 6.10). This is Lemma 3
with its constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from scipy.special import ndtr

from ..errors import require

KURTOSIS = 1.8  # E w⁴/(E w²)² of a uniform variable
LATALA = 2 / (2 + KURTOSIS**0.25)  # Lemma 4's C: the limit of ‖A‖ over its right-hand side, uniform and square
LEMMA6 = 3 * math.log(3) - 3  # n^−0.296 in place of n^−1/3: Chernoff's exponent at δ = 2 is 3 ln 3 − 2, not 4/3


# ---- what the weights are drawn from


class Law(Protocol):
    """Independent entries of mean zero, E w² ≤ K1/n and E w⁴ ≤ K2/n² with n the longer side."""

    @property
    def K1(self) -> float: ...

    @property
    def K2(self) -> float: ...

    def expected(self, rows: int, columns: int) -> float:
        """A bound of E‖W‖."""

    def exceeded(self, mean: float, longest: int, failure: float) -> float:
        """What a norm of expectation `mean` exceeds with at most this probability."""


@dataclass(frozen=True)
class Uniform:
    """U[−K/√n, K/√n], Theorem 1's assumption; K = √3 has variance 1/n."""

    K: float = math.sqrt(3)

    def __post_init__(self) -> None:
        positive(K=self.K)

    @property
    def K1(self) -> float:
        return self.K**2 / 3

    @property
    def K2(self) -> float:
        return self.K**4 / 5

    def expected(self, rows: int, columns: int) -> float:
        return math.sqrt(math.pi / 2) * self.K * shape_factor(rows, columns)

    def exceeded(self, mean: float, longest: int, failure: float) -> float:
        return mean + self.K * math.sqrt(8 * math.log(1 / failure) / longest)


@dataclass(frozen=True)
class Gaussian:
    """N(0, K/n)."""

    K: float = 1.0

    def __post_init__(self) -> None:
        positive(K=self.K)

    @property
    def K1(self) -> float:
        return self.K

    @property
    def K2(self) -> float:
        return 3 * self.K**2

    def expected(self, rows: int, columns: int) -> float:
        return 2 * math.sqrt(self.K) * shape_factor(rows, columns)

    def exceeded(self, mean: float, longest: int, failure: float) -> float:
        return mean + math.sqrt(2 * self.K * math.log(1 / failure) / longest)


@dataclass(frozen=True)
class Moments:
    """Any independent entries with these moments, Theorem 2's assumption (iii): Lemma 4, and Markov's inequality."""

    K1: float = 1.0
    K2: float = 1.8
    C: float = LATALA

    def __post_init__(self) -> None:
        positive(K1=self.K1, K2=self.K2, C=self.C)
        require(self.K2 >= self.K1**2, f"no law has E w⁴ < (E w²)²: give K2 ≥ {self.K1**2:g}, not {self.K2:g}.")

    def expected(self, rows: int, columns: int) -> float:
        return latala(self, self.C, rows, columns, columns, rows, rows * columns)

    def exceeded(self, mean: float, longest: int, failure: float) -> float:
        return mean / failure


def shape_factor(rows: int, columns: int) -> float:
    """(√rows + √columns) / 2√n, at most 1."""
    return (math.sqrt(rows) + math.sqrt(columns)) / (2 * math.sqrt(max(rows, columns)))


def latala(law: Law, C: float, rows: int, columns: int, in_row: float, in_column: float, count: float) -> float:
    """Lemma 4 for a matrix with at most so many entries in a row, in a column and in all; C is that of a square one.

    A law of smaller fourth moment than a uniform one's has a larger C; it is taken for a uniform one.
    """
    n, K2 = max(rows, columns), max(law.K2, KURTOSIS * law.K1**2)
    terms = math.sqrt(law.K1 * in_row / n) + math.sqrt(law.K1 * in_column / n) + (K2 * count) ** 0.25 / math.sqrt(n)
    return oblong(C, min(rows, columns) / n) * terms


def oblong(C: float, aspect: float) -> float:
    """Lemma 4's C for m × n matrices, from that of square ones: up to 1, for a single row is as long as its norm.

    It goes as its limit for wide matrices, (1 + √y)/(1 + √y + (κy)^¼) for y = m/n and E w⁴ = κ (E w²)².
    """
    root = aspect**0.25
    return max(C, (1 + root**2) / (1 + root**2 + 2 * root * (1 / C - 1)))


# ---- lemmas


def lemma1(r: int, n: int, power: int = 1, a: float = 1.0) -> float:
    """E X_(r)^p of the r-th smallest of n squares of U[−a, a]: a^2p (r+2p−1)! n! / ((r−1)! (n+2p)!)."""
    return a ** (2 * power) * math.prod((r + i) / (n + 1 + i) for i in range(2 * power))


def lemma3(law: Uniform, depth: int, d: int, delta: float) -> tuple[float, float]:
    """c0 and δ0 with which all norms of a network of width d and more hold but for δ/10."""
    tau = math.sqrt(8 * math.log(10 * depth / delta) / d)
    return law.K * (math.sqrt(math.pi / 2) + tau), tau**2 / 32


def lemma5(mu: float, excess: float, *, printed: bool = False) -> float:
    """log of Chernoff's bound of P(X ≥ (1 + excess) μ): (1 + δ) log(1 + δ) − δ times −μ; printed: δ²/(1 + δ)."""
    if printed:
        return -mu * excess**2 / (1 + excess)
    return -mu * ((1 + excess) * math.log1p(excess) - excess)


def lemma6(bins: int, *, printed: bool = False) -> float:
    """The probability that one of n bins gets more than thrice its share of N ≥ n log n balls, at most."""
    return bins ** (-1 / 3) if printed else float(bins) ** -LEMMA6


def theorem4(x: float, m: int, n: int, cdf: Callable[[float], float], *, printed: bool = False) -> float:
    """Chibisov's limit of P(X_(m) < x), X_(m) the m-th smallest of n: Φ((n F(x) − m)/√m); printed without the m."""
    return float(ndtr((n * cdf(x) - (0 if printed else m)) / math.sqrt(m)))


def no_repeat(draws: int, size: int) -> float:
    """log D!/((D − N)! D^N): N draws with replacement from D have no repetition."""
    if draws > size:
        return -math.inf
    return math.lgamma(size + 1) - math.lgamma(size - draws + 1) - draws * math.log(size)


def distinct(draws: int, size: int) -> float:
    """The expected fraction of D entries that N draws with replacement hit: 1 − (1 − 1/D)^N."""
    return -math.expm1(draws * math.log1p(-1 / size)) if size > 1 else float(draws > 0)


def crowded(balls: int, bins: int, failure: float) -> float:
    """What no bin's number of balls reaches, but for this probability: Bernstein's form of Chernoff's bound."""
    mean, g = balls / bins, math.log(bins / failure)
    return mean + g / 3 + math.sqrt(g**2 / 9 + 2 * g * mean)


def quantile(rank: int, size: int, failure: float) -> float:
    """What the (r + 1)-th smallest of n uniform numbers in [0, 1] exceeds with at most this probability.

    P(U > x) = P(Bin(n, x) ≤ r) ≤ exp(−n KL(r/n, x)), and KL(p, x) ≥ (x − p)² / 2x.
    """
    p, g = rank / size, math.log(1 / failure) / size
    return min(1.0, p + g + math.sqrt(g * g + 2 * p * g))


def positive(**values: float) -> None:
    for name, value in values.items():
        require(0 < value < math.inf, f"{name} must be positive and finite, got {value:g}.")
