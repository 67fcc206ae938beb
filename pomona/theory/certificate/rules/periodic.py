"""Sine and cosine, whose values and slopes turn again and again."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..intervals import EPS, Interval
from ..linear_form import Lines
from .scalar_function import ROUNDINGS, widen


@dataclass(frozen=True)
class Wave:
    """The function sin(x + quarters · π/2)."""

    quarters: int

    def value(self, x: Tensor) -> Tensor:
        """Return the wave at x."""
        sign = -1.0 if self.quarters % 4 >= 2 else 1.0
        return sign * (torch.cos(x) if self.quarters % 2 else torch.sin(x))

    def range(self, x: Interval) -> Interval:
        """Return the smallest and the largest value on an interval."""
        ends = torch.stack([self.value(x.low), self.value(x.high)])
        low = torch.where(self.reaches(x, 3 - self.quarters), -1.0, ends.amin(0))
        high = torch.where(self.reaches(x, 1 - self.quarters), 1.0, ends.amax(0))
        return widen(Interval(low, high), x)

    def reaches(self, x: Interval, quarters: int) -> Tensor:
        """Return where an interval contains quarters · π/2 + 2π k for a whole number k."""
        turns = (x.widen_by(ROUNDINGS * EPS * (1 + x.magnitude))).map(lambda end: end / (2 * math.pi) - quarters / 4)
        return torch.floor(turns.high) >= torch.ceil(turns.low)

    def slopes(self, x: Interval) -> Interval:
        """Return the smallest and the largest slope on an interval."""
        return Wave(self.quarters + 1).range(x)

    def jumps(self, x: Interval) -> Tensor:
        """Return zeros: a wave has no jumps."""
        return torch.zeros_like(x.low)

    def lines(self, x: Interval) -> Lines:
        """Return the tangent in the middle with the error of second order, or constants where these are closer."""
        values, curvature = self.range(x), self.range(x).magnitude
        tangent = Wave(self.quarters + 1).value(x.centre)
        touch = self.value(x.centre) - tangent * x.centre
        error = curvature * x.radius**2 / 2 + ROUNDINGS * EPS * (1 + x.magnitude)
        close = error < values.radius
        return Lines(
            torch.where(close, tangent, 0.0),
            torch.where(close, touch - error, values.low),
            torch.where(close, tangent, 0.0),
            torch.where(close, touch + error, values.high),
        )


SINE, COSINE = Wave(0), Wave(1)
