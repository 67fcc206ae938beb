"""Dynamic pruning with feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core.method import Masks, Targets, method
from ..errors import require
from ..scores import magnitude
from ._latent import BoundedFeedback, Compressed
from ._periodic import Periodic


@method("dpf", paper="Lin et al., ICLR 2020", weights="soft")
@dataclass(frozen=True, kw_only=True)
class DPF(Compressed, BoundedFeedback, Periodic):
    """Dynamic pruning with feedback, Algorithm 1.

    The model runs on m ⊙ w; the gradient taken there moves the dense w, so that a weight pruned too early comes
    back. The mask follows w, and for the last tenth of training it is fixed.
    """

    ranks_by_magnitude: ClassVar[bool] = True

    every: int = 16  # p: steps between mask updates
    settle: float = 0.1  # share of training, at its end, with the mask fixed; 0 in the paper

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.settle < 1, f"settle is a share of training in [0, 1), got {self.settle}.")
        require(
            self.schedule.until <= self.fixed_from + 1e-9,
            f"the sparsity would still rise (until={self.schedule.until:g}) when the mask is fixed at "
            f"{self.fixed_from:g} of training: lower until or settle.",
        )

    @property
    def fixed_from(self) -> float:
        return 1 - self.settle

    def update(self, targets: Targets, sparsity: float) -> Masks:
        return self.select(targets, magnitude(targets.latent), sparsity)  # line 3: m ← m_t(w_t)
