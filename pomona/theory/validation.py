"""Argument checks that several modules of the theory share."""

from __future__ import annotations

import math

from ..errors import require


def require_positive(**values: float) -> None:
    """Raise PomonaError unless every named value is positive and finite."""
    for name, value in values.items():
        require(0 < value < math.inf, f"{name} must be positive and finite, got {value:g}.")


def refuse_sharp_and_printed(sharp: bool, printed: bool) -> None:
    """Raise PomonaError where both the sharp and the printed form of a theorem are asked for."""
    require(not (printed and sharp), "the printed form has its own constants: leave out sharp or printed.")
