"""Pieces for soft methods: what is done to the masked weights, and to the gradient of the latent ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..compressors import COMPRESSORS, PLAIN_MASK, Compressor, FusedProjection
from ..core.method import Method
from ..errors import require


@dataclass(frozen=True, kw_only=True)
class Compressed(Method):
    """A soft method whose model runs on C(m ⊙ w) for a compressor C."""

    compressor: Compressor | None = None  # SoftThreshold(), PowerThreshold(), Quantize(bits), Binary(); None is m ⊙ w

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compressor is not None:
            self._set(compressor=COMPRESSORS.resolve(self.compressor))
            self.compressor.validate_pattern(self.pattern)

    def calibrate(self, latent: Tensor, mask: Tensor, output_dim: int) -> Tensor | None:
        return None if self.compressor is None else self.compressor.calibrate(latent, mask, output_dim)

    def project(self, latent: Tensor, mask: Tensor, out: Tensor, calibration: Tensor | None = None) -> None:
        super().project(latent, mask, out)
        if self.compressor is not None:
            self.compressor.compress(out, mask, calibration)

    def clip_latent(self, latent: Tensor) -> None:
        if self.compressor is not None:
            self.compressor.clip_latent(latent)

    @property
    def fused_projection(self) -> FusedProjection | None:
        return PLAIN_MASK if self.compressor is None else self.compressor.fused_projection


@dataclass(frozen=True, kw_only=True)
class BoundedFeedback(Method):
    """A soft method that bounds the gradient of outputs without weights.

    An output that lost all its weights sends zeros to the batch norm after it, which divides by √(0 + ε): the gradient
    of these weights is hundreds of times that of others. With `feedback` its norm is at most so many mean norms.
    """

    feedback: float | None = None  # in mean gradient norms of the layer's other outputs; None: no bound

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.feedback is None or self.feedback >= 0,
            f"feedback is a bound in mean gradient norms, 0 or more, or None for no bound, got {self.feedback}.",
        )

    @property
    def transforms_gradient(self) -> bool:
        return self.feedback is not None

    def transform_gradient(self, gradient: Tensor, mask: Tensor, output_dim: int) -> Tensor:
        assert self.feedback is not None
        inner = [dim for dim in range(gradient.ndim) if dim != output_dim]
        kept = mask.any(inner, keepdim=True)
        norm = torch.linalg.vector_norm(gradient.float(), dim=inner, keepdim=True)
        largest = self.feedback * (norm * kept).sum() / kept.sum()
        factor = (largest / norm).clamp(max=1)  # NaN for 0 / 0, and where no output is kept to compare with: no bound
        return gradient * factor.masked_fill(kept | factor.isnan(), 1).to(gradient.dtype)
