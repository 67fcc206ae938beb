"""The bound on gradients for hard methods that grow weights from zero."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core.gradient_bound import growth_factors
from ..core.method import GradientBound
from ._latent import WEAK, BoundedFeedback


@dataclass(frozen=True, kw_only=True)
class BoundedGrowth(BoundedFeedback):
    """A hard method with the bound of `BoundedFeedback`, in a form for layers in which most outputs have no weights.

    Many outputs grow from zero at once there, and the mean of all norms is near zero. So an output is weak where its
    norm is below a tenth of Σ‖w‖² / Σ‖w‖, which outputs without weights do not lower. Where none of the other outputs
    has a gradient, that of a weak one is `feedback` hundredths of its length.
    """

    @property
    def fused_gradient_bound(self) -> GradientBound | None:
        return None

    def gradient_factors(self, weight_norm: Tensor, norm: Tensor) -> Tensor:
        assert self.feedback is not None
        return growth_factors(weight_norm, norm, GradientBound(self.feedback, WEAK))
