"""Pieces for soft methods: what is done to the masked weights, and to the gradient of the latent ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..compressors import COMPRESSORS, PLAIN_MASK, Compressor, FusedProjection, SoftThreshold, Threshold
from ..core.gradient_bound import output_factors
from ..core.method import GradientBound, Method
from ..core.sharded_outputs import output_norms
from ..errors import require
from ..sharding import replicate, sharding_mesh, whole

WEAK = 0.1  # the share of its layer's typical norm at which an output is weak: see BoundedFeedback


@dataclass(frozen=True, kw_only=True)
class Compressed(Method):
    """A soft method whose model runs on C(m ⊙ w) for a compressor C."""

    compressor: Compressor | None = None  # SoftThreshold(), PowerThreshold(), Quantize(bits), Binary(); None is m ⊙ w

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(compressor=self._resolve_compressor(self.compressor))
        if self.compressor is not None:
            self.compressor.validate_pattern(self.pattern)

    def _resolve_compressor(self, choice: Any) -> Compressor | None:
        """Return the compressor of a choice, which may also be "none" (a plain mask) or "auto".

        "auto" is soft thresholds where the pattern prunes single weights, and a plain mask elsewhere.
        """
        if choice == "auto":
            return SoftThreshold() if self.pattern.is_elementwise else None
        return None if choice in (None, "none") else COMPRESSORS.resolve(choice)

    def calibrate(self, latent: Tensor, mask: Tensor, output_dim: int) -> Tensor | None:
        return None if self.compressor is None else self.compressor.calibrate(latent, mask, output_dim)

    @property
    def calibrates_outputs(self) -> bool:
        return isinstance(self.compressor, Threshold)

    def project(self, latent: Tensor, mask: Tensor, out: Tensor, calibration: Tensor | None = None) -> None:
        if self.compressor is None:
            super().project(latent, mask, out)
        else:
            self.compressor.project(latent, mask, out, calibration)

    def clip_latent(self, latent: Tensor) -> None:
        if self.compressor is not None:
            self.compressor.clip_latent(latent)

    @property
    def fused_projection(self) -> FusedProjection | None:
        return PLAIN_MASK if self.compressor is None else self.compressor.fused_projection


@dataclass(frozen=True, kw_only=True)
class BoundedFeedback(Method):
    """A method that bounds the gradient of outputs that have almost died.

    Batch norm divides an output by its deviation, and its gradient with it: several hundredfold where the output has
    no weights, or reads only inputs that have none, and only √ε is left to divide by. Steps of that length destroy
    what the network has learned. The gradient is inversely proportional to the norm of the weights, so an output is
    *weak* where that norm is below a tenth of the layer's mean. Its gradient is at most `feedback` times as long as the
    median of the others, leaving out those without a gradient; the others' are at most ten times as long.
    """

    # The longest gradient of a weak output, in medians of the layer's other outputs; None or inf is no bound.
    feedback: float | None = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.feedback is None or self.feedback >= 0,
            f"feedback is a bound in median gradient norms, 0 or more, or None for no bound, got {self.feedback}.",
        )
        self._set(feedback=None if self.feedback == math.inf else self.feedback)

    @property
    def transforms_gradient(self) -> bool:
        return self.feedback is not None

    @property
    def fused_gradient_bound(self) -> GradientBound | None:
        return None if self.feedback is None else GradientBound(self.feedback, WEAK)

    def transform_gradient(self, gradient: Tensor, projected: Tensor, mask: Tensor, output_dim: int) -> Tensor:
        if gradient.ndim < 2:  # a bias or a gain: one weight for each output, whose scale no norm divides out
            return gradient
        weight_norm, norm = (whole(output_norms(values, output_dim)) for values in (projected, gradient))
        factors = self.gradient_factors(weight_norm.view(1, -1), norm.view(1, -1))
        if gradient.device.type == "cpu" and bool((factors == 1).all()):
            return gradient
        factors = factors.view(norm.shape).to(gradient.dtype)
        mesh = sharding_mesh([gradient])
        return gradient * (factors if mesh is None else replicate(factors, mesh))

    def gradient_factors(self, weight_norm: Tensor, norm: Tensor) -> Tensor:
        """Return the factor of each output's gradient from the norms of its weights and its gradient, one row each."""
        assert self.feedback is not None
        return output_factors(weight_norm, norm, GradientBound(self.feedback, WEAK))
