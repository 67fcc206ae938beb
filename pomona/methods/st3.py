"""ST-3: soft thresholds with straight-through gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compressors import Compressor, SoftThreshold
from ..core.method import Masks, Targets, method
from ._latent import BoundedFeedback, Compressed
from ._periodic import Periodic


@method("st3", paper="Vanderschueren & De Vleeschouwer, WACV 2023", weights="soft")
@dataclass(frozen=True, kw_only=True)
class ST3(Compressed, BoundedFeedback, Periodic):
    """Soft thresholds with straight-through gradients: the model runs on s · sign(w) · max(|w| − t, 0).

    A threshold t is taken at every step, at a sparsity that rises along a cubic, and s rescales each output. The
    gradient passes straight through to the dense w. The last update makes the shrunk weights the trained ones.
    """

    ranks_by_magnitude: ClassVar[bool] = True

    every: int = 1  # steps between mask updates
    compressor: Compressor | None = SoftThreshold()

    def update(self, targets: Targets, sparsity: float) -> Masks:
        return self.select_magnitudes(targets, sparsity)
