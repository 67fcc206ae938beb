"""Factors that change over the steps of a private run, fixed before it begins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import PomonaError, require

MAX_PARTS = 64  # each part with a factor of its own is one more composition for the accountant


@dataclass(frozen=True)
class Ramp:
    """A factor that goes from `start` to `end` along a line, in `parts` of equal length.

    It is constant within a part, so that an accountant composes few kinds of steps.
    """

    start: float = 1.0
    end: float = 1.0
    parts: int = 16

    def __post_init__(self) -> None:
        require(
            0 < self.start < math.inf and 0 < self.end < math.inf,
            f"the factors of a ramp must be above 0 and finite, got {self.start:g} and {self.end:g}.",
        )
        require(2 <= self.parts <= MAX_PARTS, f"a ramp has 2 to {MAX_PARTS} parts, got {self.parts}.")

    def __call__(self, step: int, steps: int) -> float:
        """Return the factor of a step, numbered from 0."""
        part = min(step * self.parts // steps, self.parts - 1)
        return self.start + (self.end - self.start) * part / (self.parts - 1)

    @property
    def is_constant(self) -> bool:
        """Return whether the factor is always 1."""
        return self.start == self.end == 1

    @classmethod
    def of(cls, value: RampLike) -> Ramp:
        """Return a ramp given as one, as its fields, as (start, end), or as None for the factor 1."""
        if value is None or isinstance(value, Ramp):
            return value or cls()
        try:
            if isinstance(value, Mapping):
                return cls(**value)
            start, end = value
            return cls(float(start), float(end))
        except PomonaError:
            raise
        except (TypeError, ValueError):
            raise PomonaError(f"a ramp has a start and an end, and perhaps parts, got {value!r}.") from None

    def to_dict(self) -> dict[str, Any]:
        """Return the ramp as values that JSON and TOML can hold."""
        return asdict(self)


RampLike = Ramp | Mapping[str, Any] | Sequence[float] | None
CONSTANT = Ramp()
EPSILON_RAMP = Ramp(1 / 3, 5 / 3)  # of the index draws of ResNet-18 in the code of Yang et al. (2023)
