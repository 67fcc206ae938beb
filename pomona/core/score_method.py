"""The base of methods that train a score for each weight and leave the weights random."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from .fused.random_stream import RandomStream
from .method import Method, TrainingProgress


@dataclass(frozen=True, kw_only=True)
class ScoreMethod(Method):
    """A method whose optimizer moves scores; the highest scores select which random weights the model runs on.

    The engine selects masks at every step. `is_update_due` says when the history gets an entry.
    """

    @property
    @abstractmethod
    def stream(self) -> RandomStream:
        """The stream that the random weights and the initial scores are drawn from."""

    @property
    def redraw_limit(self) -> int:
        """The bound below which a pruned weight's random bits must lie for a re-draw (see `random_stream`); 0: none."""
        return 0

    def redraw_number(self, progress: TrainingProgress) -> int:
        """Return the number of the re-draw of pruned weights that comes after this step; 0 is none."""
        return 0
