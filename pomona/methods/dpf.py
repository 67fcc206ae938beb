"""Dynamic pruning with feedback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar

from ..compressors import Compressor
from ..core.method import Masks, Targets, method
from ..errors import require
from ._latent import BoundedFeedback, Compressed
from ._periodic import LONGEST_INTERVAL, Periodic

PRINTED: dict[str, Any] = {"settle": 0, "compressor": None, "feedback": None}  # the options of Algorithm 1


@method("dpf", paper="Lin et al., ICLR 2020", weights="soft")
@dataclass(frozen=True, kw_only=True)
class DPF(Compressed, BoundedFeedback, Periodic):
    """Dynamic pruning with feedback, Algorithm 1.

    The model runs on the pruned weights; the gradient taken there moves the dense w, so that a weight pruned too early
    comes back. The mask follows w. Four things are not in the paper, and `printed=True` leaves them out: soft
    thresholds, a mask that is fixed for the last tenth of training, a bound on the gradient of weak outputs, and mask
    updates at shorter intervals where training has fewer than 1,600 steps.
    """

    ranks_by_magnitude: ClassVar[bool] = True

    # p: steps between mask updates. None is the paper's 16, and in trainings below 1,600 steps a hundredth of them.
    every: int | None = None
    settle: float = 0.1  # share of training, at its end, with the mask fixed; 0 in the paper
    # "auto" is soft thresholds for single weights, a plain mask for other patterns; None or "none" is a plain mask.
    compressor: Compressor | None = "auto"  # type: ignore[assignment]
    # The algorithm as printed: settle=0, compressor=None, feedback=None, and every=16 where no other number is given.
    printed: InitVar[bool] = False

    def __post_init__(self, printed: bool) -> None:
        given = {key: getattr(self, key) for key in PRINTED}
        super().__post_init__()
        if printed:
            self._set_printed(given)
        require(0 <= self.settle < 1, f"settle is a share of training in [0, 1), got {self.settle}.")
        require(
            self.schedule.until <= self.fixed_from + 1e-9,
            f"the sparsity would still rise (until={self.schedule.until:g}) when the mask is fixed at "
            f"{self.fixed_from:g} of training: lower until or settle.",
        )

    def _set_printed(self, given: Mapping[str, Any]) -> None:
        """Set the options of the printed algorithm; raise PomonaError where one of them was given another value."""
        for key, value in PRINTED.items():
            require(
                given[key] == getattr(type(self), key) or getattr(self, key) == value,
                f"printed=True is the algorithm with {key}={value}, got {key}={given[key]!r}: leave out one of them.",
            )
        self._set(every=LONGEST_INTERVAL if self.every is None else self.every, **PRINTED)

    @property
    def fixed_from(self) -> float:
        return 1 - self.settle

    def update(self, targets: Targets, sparsity: float) -> Masks:
        return self.select_magnitudes(targets, sparsity)  # line 3: m ← m_t(w_t)
