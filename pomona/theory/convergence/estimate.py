"""An upper bound of the convergence theorems, as a sum of terms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """A summand of an estimate: a constant of the proof times a measured quantity."""

    constant: float
    measured: float

    @property
    def value(self) -> float:
        """The product of the constant and the measured quantity."""
        return self.constant * self.measured


@dataclass(frozen=True)
class Estimate:
    """An upper bound by its terms; `trivial` is the bound that holds without the theorem."""

    name: str
    terms: Mapping[str, Term]
    trivial: float = math.inf

    @property
    def bound(self) -> float:
        """The sum of the terms."""
        return sum(term.value for term in self.terms.values())

    @property
    def vacuous(self) -> bool:
        """Whether the bound is not below the trivial one."""
        return not self.bound < self.trivial

    def __str__(self) -> str:
        terms = " + ".join(f"{term.value:.4g} ({name})" for name, term in self.terms.items())
        return f"{self.name}: ≤ {self.bound:.4g} = {terms}{', vacuous' if self.vacuous else ''}"
