"""The result of a theorem of Qian & Klabjan (2021), and the three forms in which each theorem is available."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...errors import PomonaError
from ..validation import refuse_sharp_and_printed
from .lemmas import distinct
from .network import inner_layer_sizes

# The keyword arguments that select each form of a theorem.
FORMS: dict[str, dict[str, bool]] = {"printed": {"printed": True}, "corrected": {}, "sharp": {"sharp": True}}

PROBABILITY_ROUNDING = 1e-12  # by which a probability may miss 1 − δ


class TooNarrow(PomonaError):
    """Raised for widths that break an assumption of a theorem which wider layers could meet."""


class NotCovered(PomonaError):
    """Raised for weights or forms that a theorem says nothing about, whatever the widths."""


@dataclass(frozen=True)
class Bound:
    """An upper bound `error` of sup ‖f − F‖ that holds with at least `probability`."""

    name: str
    form: str
    error: float
    probability: float
    widths: tuple[int, ...]
    alpha: float
    pruned: tuple[int, ...]  # N_k of the layers 1 < k < l
    constants: Mapping[str, float] = field(default_factory=dict)
    repeated: bool = False  # whether the N_k are draws with replacement, of which some hit the same entry

    @property
    def vacuous(self) -> bool:
        """Whether the theorem guarantees nothing: its probability is not positive."""
        return self.probability <= 0

    @property
    def proven(self) -> bool:
        """Whether the bound uses proven constants only, and not the measured C of Lemma 4."""
        return "C" not in self.constants

    @property
    def sparsity(self) -> float:
        """The pruned fraction of the layers 1 < k < l together; its expectation for draws with replacement."""
        D = inner_layer_sizes(self.widths)
        removed = [distinct(n, d) * d if self.repeated else n for n, d in zip(self.pruned, D, strict=True)]
        return sum(removed) / sum(D)

    def meets(self, epsilon: float, delta: float) -> bool:
        """Return whether the error is at most ε with probability at least 1 − δ."""
        return self.error <= epsilon and self.probability >= 1 - delta - PROBABILITY_ROUNDING and not self.vacuous

    def loss_gap(self, lipschitz: float = math.sqrt(2)) -> float:
        """Return a bound on the difference of the losses of f and F; √2 is cross-entropy's Lipschitz constant."""
        return lipschitz * self.error


Theorem = Callable[..., Bound]


def select_form(printed: bool, sharp: bool) -> str:
    """Return the name of the form that the two flags select."""
    refuse_sharp_and_printed(sharp, printed)
    return "printed" if printed else "sharp" if sharp else "corrected"
