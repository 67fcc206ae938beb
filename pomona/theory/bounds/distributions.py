"""Distributions of random weights, with bounds on the norm of a random matrix.

A variable uniform on [−a, a] is smaller in the convex order than a Gaussian of standard deviation a√(2π)/4, since
E(U − t)₊ ≤ E(G − t)₊ for all t, with equality at 0. A norm is convex, so E‖U‖ ≤ a √(2π)/4 (√rows + √columns). It is
1-Lipschitz, so P(‖U‖ > E‖U‖ + s) ≤ exp(−s²/8a²) (Boucheron, Lugosi & Massart 2013, Theorem 6.10). Together they are
Lemma 3 of Qian & Klabjan (2021) with explicit constants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from ...errors import require
from ..validation import require_positive

KURTOSIS = 1.8  # E w⁴/(E w²)² of a uniform variable
LATALA = 2 / (2 + KURTOSIS**0.25)  # Lemma 4's C: the limit of ‖A‖ over its right-hand side, uniform and square


class Law(Protocol):
    """A distribution of independent weights: mean zero, E w² ≤ K1/n and E w⁴ ≤ K2/n², n the longer side."""

    @property
    def K1(self) -> float:
        """The constant K1 in E w² ≤ K1/n."""

    @property
    def K2(self) -> float:
        """The constant K2 in E w⁴ ≤ K2/n²."""

    def expected(self, rows: int, columns: int) -> float:
        """Return an upper bound of E‖W‖ for a matrix of this shape."""

    def exceeded(self, mean: float, longest: int, failure: float) -> float:
        """Return a level that a norm of expectation `mean` exceeds with probability `failure` at most.

        `longest` is the longer side of the matrix.
        """


@dataclass(frozen=True)
class Uniform:
    """The uniform distribution on [−K/√n, K/√n], Theorem 1's assumption; K = √3 has variance 1/n."""

    K: float = math.sqrt(3)

    def __post_init__(self) -> None:
        require_positive(K=self.K)

    @property
    def K1(self) -> float:
        """The constant K1 in E w² ≤ K1/n."""
        return self.K**2 / 3

    @property
    def K2(self) -> float:
        """The constant K2 in E w⁴ ≤ K2/n²."""
        return self.K**4 / 5

    def expected(self, rows: int, columns: int) -> float:
        """Return √(π/2) K (√rows + √columns) / 2√n, from the convex order."""
        return math.sqrt(math.pi / 2) * self.K * shape_factor(rows, columns)

    def exceeded(self, mean: float, longest: int, failure: float) -> float:
        """Return mean + K √(8 log(1/failure) / n), from the tail of a convex Lipschitz function."""
        return mean + self.K * math.sqrt(8 * math.log(1 / failure) / longest)


@dataclass(frozen=True)
class Gaussian:
    """The normal distribution N(0, K/n)."""

    K: float = 1.0

    def __post_init__(self) -> None:
        require_positive(K=self.K)

    @property
    def K1(self) -> float:
        """The constant K1 in E w² ≤ K1/n."""
        return self.K

    @property
    def K2(self) -> float:
        """The constant K2 in E w⁴ ≤ K2/n²."""
        return 3 * self.K**2

    def expected(self, rows: int, columns: int) -> float:
        """Return √K (√rows + √columns) / √n."""
        return 2 * math.sqrt(self.K) * shape_factor(rows, columns)

    def exceeded(self, mean: float, longest: int, failure: float) -> float:
        """Return mean + √(2K log(1/failure) / n), from Gaussian concentration."""
        return mean + math.sqrt(2 * self.K * math.log(1 / failure) / longest)


@dataclass(frozen=True)
class Moments:
    """Any distribution with these moments, Theorem 2's assumption (iii); bounded by Lemma 4 and Markov's inequality."""

    K1: float = 1.0
    K2: float = 1.8
    C: float = LATALA

    def __post_init__(self) -> None:
        require_positive(K1=self.K1, K2=self.K2, C=self.C)
        require(
            self.K2 >= self.K1**2, f"no distribution has E w⁴ < (E w²)²: give K2 ≥ {self.K1**2:g}, not {self.K2:g}."
        )

    def expected(self, rows: int, columns: int) -> float:
        """Return Lemma 4's bound for a full matrix."""
        return latala(self, self.C, rows, columns, columns, rows, rows * columns)

    def exceeded(self, mean: float, longest: int, failure: float) -> float:
        """Return mean / failure, Markov's inequality."""
        return mean / failure


def shape_factor(rows: int, columns: int) -> float:
    """Return (√rows + √columns) / 2√n, which is at most 1."""
    return (math.sqrt(rows) + math.sqrt(columns)) / (2 * math.sqrt(max(rows, columns)))


def latala(law: Law, C: float, rows: int, columns: int, in_row: float, in_column: float, count: float) -> float:
    """Return Lemma 4's bound of E‖A‖ for a matrix with zeros; C is the constant of a square matrix.

    `in_row`, `in_column` and `count` are the most nonzero entries of a row, of a column and of the whole matrix. A
    distribution whose fourth moment is below the uniform one's has a larger C; it is treated as a uniform one.
    """
    n, K2 = max(rows, columns), max(law.K2, KURTOSIS * law.K1**2)
    terms = math.sqrt(law.K1 * in_row / n) + math.sqrt(law.K1 * in_column / n) + (K2 * count) ** 0.25 / math.sqrt(n)
    return oblong(C, min(rows, columns) / n) * terms


def oblong(C: float, aspect: float) -> float:
    """Return Lemma 4's C for m × n matrices with y = m/n = `aspect`, from the C of square ones.

    It approaches 1 as y → 0, because the norm of a single row is its length. The dependence on y is that of the limit
    for wide matrices, (1 + √y)/(1 + √y + (κy)^¼) with E w⁴ = κ (E w²)².
    """
    root = aspect**0.25
    return max(C, (1 + root**2) / (1 + root**2 + 2 * root * (1 / C - 1)))
