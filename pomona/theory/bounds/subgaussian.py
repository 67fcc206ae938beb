"""Sub-Gaussian laws of the weights (Lemma 2 of Qian & Klabjan, 2021) and dependent ones (E.1), with proven constants.

A variable X is sub-Gaussian with variance proxy s² if E exp(tX) ≤ exp(s² t²/2) for all t; its mean is then zero. For
any u ≥ 0, E(X − su)₊ is at most s (√(1 + u²) − u)/2, by the variance, and at most s exp(v²/2 − uv − 1)/v for every
v > 0, by the definition. The smaller of the two is below E(G − su)₊ for a Gaussian G of standard deviation `DOMINATION`
· s. So X is smaller than G in the convex order, and so is a matrix of independent entries. ‖A‖ and exp ‖A‖ are convex:
a mean norm, and a tail by Chernoff's bound, are at most those of a Gaussian matrix. This is Lemma 2 with explicit
constants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.optimize import minimize_scalar

from ..validation import require_positive
from .distributions import Gaussian

DOMINATION = 1.36  # times s: the standard deviation of a Gaussian above every sub-Gaussian variable of proxy s²


@dataclass(frozen=True)
class SubGaussian:
    """Independent sub-Gaussian weights of variance proxy K/n each, of one law or of many; n is the longer side."""

    K: float = 1.0

    def __post_init__(self) -> None:
        require_positive(K=self.K)

    @property
    def dominating(self) -> Gaussian:
        """The Gaussian law above this one in the convex order."""
        return Gaussian(DOMINATION**2 * self.K)

    @property
    def K1(self) -> float:
        """The constant K1 of the dominating law: the tail of `exceeded` starts at that law's mean norm."""
        return self.dominating.K1

    @property
    def K2(self) -> float:
        """The constant K2 of the dominating law."""
        return self.dominating.K2

    def expected(self, rows: int, columns: int) -> float:
        """Return the dominating Gaussian's bound, 1.36 √K (√rows + √columns) / √n."""
        return self.dominating.expected(rows, columns)

    def exceeded(self, mean: float, longest: int, failure: float) -> float:
        """Return the dominating Gaussian's level; `mean` is a bound of the norm's mean under that law."""
        return self.dominating.exceeded(mean, longest, failure)


@dataclass(frozen=True)
class CorrelatedGaussian(Gaussian):
    """Dependent weights: jointly Gaussian with mean zero and any covariance whose eigenvalues are at most K/n.

    Adding an independent Gaussian of the missing covariance makes the weights independent, of N(0, K/n). That raises
    the mean norm (Jensen), and the norm is √(K/n)-Lipschitz: all bounds of `Gaussian` hold, also for a part of the
    entries.
    """


@dataclass(frozen=True)
class DependentRows:
    """Dependent weights: rows are independent, and each is a sub-Gaussian vector of variance proxy K/n.

    The weights of a row may depend on each other: only E exp⟨t, row⟩ ≤ exp(K ‖t‖²/2n) is needed for all vectors t.
    ‖Wx‖² of a unit vector x is at most K/n times a χ² of as many degrees as there are rows, in its exponential moments.
    A net of the sphere of inputs bounds ‖W‖ (Vershynin, 2012). Only tails are known, no mean norm.
    """

    K: float = 1.0

    def __post_init__(self) -> None:
        require_positive(K=self.K)

    def norm_level(self, rows: int, columns: int, failure: float) -> float:
        """Return a level that ‖W‖ exceeds with probability `failure` at most.

        (1 + 2/ε)^columns points are a net of angle 2 asin(ε/2), with the cosine 1 − ε²/2. The best ε is taken.
        """

        def level(step: float) -> float:
            points = columns * math.log1p(2 / step) + math.log(1 / failure)
            return (math.sqrt(rows) + math.sqrt(2 * points)) / (1 - step**2 / 2)

        best = minimize_scalar(level, bounds=(0.05, 1.2), method="bounded").x
        return math.sqrt(self.K / max(rows, columns)) * level(float(best))

    def removed_level(self, rows: int, columns: int, count: int, failure: float) -> float:
        """Return a level that the norm of `count` given entries, with zeros elsewhere, exceeds with this probability.

        It is the level of the whole matrix, or that of the Frobenius norm, whose square is at most K/n times a χ² of
        `count` degrees.
        """
        frobenius = math.sqrt(count) + math.sqrt(2 * math.log(1 / failure))
        return min(self.norm_level(rows, columns, failure), math.sqrt(self.K / max(rows, columns)) * frobenius)
