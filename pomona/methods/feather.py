"""Feather: power thresholds, with the gradient of pruned weights scaled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..compressors import Compressor, PowerThreshold
from ..core.method import GradientBound, method
from ..errors import require
from ..schedules import Cubic, Schedule
from .st3 import ST3


@method("feather", paper="Georgoulakis et al., BMVC 2023", weights="soft")
@dataclass(frozen=True, kw_only=True)
class Feather(ST3):
    """ST-3 with thresholds sign(w) · (|w|³ − t³)^⅓ and with the gradient of pruned weights times θ."""

    compressor: Compressor | None = PowerThreshold(power=3.0)
    schedule: Schedule = Cubic(until=0.5)
    theta: float | None = None  # θ; None is the authors' choice: 0.5 above 95 % sparsity, else 1

    def __post_init__(self) -> None:
        super().__post_init__()
        theta = self.theta if self.theta is not None else 0.5 if self.final_sparsity > 0.95 else 1.0
        require(0 <= theta <= 1, f"theta scales the gradient of pruned weights, in [0, 1], got {self.theta}.")
        self._set(theta=theta)

    @property
    def transforms_gradient(self) -> bool:
        return self.theta != 1 or super().transforms_gradient

    @property
    def fused_gradient_bound(self) -> GradientBound | None:
        return super().fused_gradient_bound if self.theta == 1 else None

    def transform_gradient(self, gradient: Tensor, projected: Tensor, mask: Tensor, output_dim: int) -> Tensor:
        if self.feedback is not None:
            gradient = super().transform_gradient(gradient, projected, mask, output_dim)
        return gradient if self.theta == 1 else torch.where(mask, gradient, gradient * self.theta)  # type: ignore[operator]
