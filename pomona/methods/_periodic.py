"""Methods that take a new mask every few steps until it comes to rest."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.method import Method, Time, check_every


@dataclass(frozen=True, kw_only=True)
class Periodic(Method):
    """An update every `every` steps; at the last one all of the sparsity is asked for."""

    every: int = 16  # steps between mask updates

    def __post_init__(self) -> None:
        super().__post_init__()
        check_every(self.every)

    @property
    def rest(self) -> float:
        """The share of training after which the mask does not change any more."""
        return 1.0

    def due(self, time: Time) -> bool:
        return time.each(self.every) and time.step <= self.rest * time.total

    def last(self, time: Time) -> bool:
        return time.step + self.every > self.rest * time.total

    def asked(self, time: Time) -> float:
        return self.target if self.last(time) else super().asked(time)
