"""Compressors: what a soft method may do to the masked weights, C(m ⊙ w) (section 4 of Lin et al., 2020)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .errors import require
from .masking import apply_mask
from .native import step
from .patterns import Pattern
from .registry import Registry

MEAN_FLOOR = 1e-6  # added to mean magnitudes, so that the kept share of an output without weights is defined
SCALE_DAMPING = 0.01  # of Vanderschueren & De Vleeschouwer (2023): bounds the scale of an emptied output


@dataclass(frozen=True)
class FusedProjection:
    """A projection that the fused kernels compute: m ⊙ w, or a soft threshold of it with a scale for each output."""

    soft_threshold: bool = False
    rescale: bool = False


PLAIN_MASK = FusedProjection()


class Compressor(ABC):
    """A function that replaces masked weights by others that are cheaper to store."""

    name: ClassVar[str]
    needed_after_training: ClassVar[bool] = True  # whether weights must stay compressed once the mask is fixed

    def project(self, latent: Tensor, mask: Tensor, out: Tensor, calibration: Tensor | None = None) -> None:
        """Write what the model runs on, C(m ⊙ w), into `out`, which may be `latent` itself."""
        apply_mask(latent, mask, out)
        self.compress(out, mask, calibration)

    @abstractmethod
    def compress(self, weights: Tensor, mask: Tensor, calibration: Tensor | None = None) -> None:
        """Replace the weights in place; entries off the mask stay zero."""

    def calibrate(self, latent: Tensor, mask: Tensor, output_dim: int) -> Tensor | None:
        """Return what `compress` must know of the dense weights when a mask is installed; None for nothing."""
        return None

    def validate_pattern(self, pattern: Pattern) -> None:  # noqa: B027 - most compressors fit every pattern
        """Raise PomonaError for a pattern that the compressor does not fit."""

    def clip_latent(self, latent: Tensor) -> None:  # noqa: B027 - few compressors bound the latent
        """Clip the dense weights in place after a step."""

    @property
    def fused_projection(self) -> FusedProjection | None:
        """What the fused kernels compute in place of `compress`; None where they cannot."""
        return None


COMPRESSORS: Registry[Compressor] = Registry("compressor")


@COMPRESSORS.register("quantize")
@dataclass(frozen=True)
class Quantize(Compressor):
    """Round to 2^bits − 1 evenly spaced levels, symmetric around zero, up to the tensor's largest magnitude."""

    bits: int

    def __post_init__(self) -> None:
        require(
            2 <= self.bits <= 16,
            f"Quantize takes 2 to 16 bits, got {self.bits}; use Binary() for one bit.",
        )

    def compress(self, weights: Tensor, mask: Tensor, calibration: Tensor | None = None) -> None:
        levels = 2 ** (self.bits - 1) - 1
        step = weights.abs().amax() / levels
        # A tensor of zeros has step 0; dividing by 1 instead keeps its zeros.
        weights.div_(torch.where(step > 0, step, 1)).round_().mul_(step).add_(0.0)  # + 0.0 turns −0.0 into 0.0


@COMPRESSORS.register("binary")
@dataclass(frozen=True)
class Binary(Compressor):
    """Replace weights by +1 or −1 by their sign, as BinaryConnect does (Courbariaux et al., 2015).

    The dense weights are clipped to [−1, 1].
    """

    def compress(self, weights: Tensor, mask: Tensor, calibration: Tensor | None = None) -> None:
        apply_mask(torch.where(weights < 0, -1.0, 1.0).to(weights), mask, weights)

    def clip_latent(self, latent: Tensor) -> None:
        latent.clamp_(-1, 1)


class Threshold(Compressor):
    """A compressor that shrinks weights towards zero by the magnitude at which the mask cut them off.

    Weights enter and leave the mask through zero. The threshold t is the largest magnitude that the mask pruned in a
    tensor. It is measured when a mask is installed. With the last mask the projected weights become the latent ones.
    """

    needed_after_training: ClassVar[bool] = False

    def validate_pattern(self, pattern: Pattern) -> None:
        require(
            pattern.is_elementwise,
            f"{type(self).__name__} shrinks by the magnitude at which single weights were pruned, and {pattern} prunes "
            "groups of weights: use pattern='unstructured'.",
        )

    def calibrate(self, latent: Tensor, mask: Tensor, output_dim: int) -> Tensor:
        """Return the scale of each output and the threshold of the tensor, stacked."""
        measured = step.measure_magnitudes(latent, mask)
        if measured is None:
            whole = latent.abs()
            measured = whole, whole.masked_fill(mask, 0).amax()
        magnitude, largest_pruned = measured
        inner = [dim for dim in range(latent.ndim) if dim != output_dim] or [0]
        scale = self.output_scales(magnitude, mask, inner)
        return torch.stack([scale, largest_pruned.expand_as(scale)])

    def output_scales(self, magnitude: Tensor, mask: Tensor, inner: list[int]) -> Tensor:
        """Return the factor of each output's weights, given |w|, which may be changed: 1."""
        return torch.ones_like(magnitude.mean(inner, keepdim=True))


@COMPRESSORS.register("soft")
@dataclass(frozen=True)
class SoftThreshold(Threshold):
    """Soft thresholds, s · sign(w) · max(|w| − t, 0), as in ST-3 (Vanderschueren & De Vleeschouwer, WACV 2023).

    With `rescale` the scale s compensates for what the mask took from an output, by the authors' rule:
    s = 1.01 / (0.01 + the share of Σ |w| that is kept).
    """

    rescale: bool = True

    def output_scales(self, magnitude: Tensor, mask: Tensor, inner: list[int]) -> Tensor:
        """Return s for each output; `flat_buffers_triton` computes the same for all layers at once."""
        total = magnitude.mean(inner, keepdim=True) + MEAN_FLOOR
        if not step.scale_by_mask(magnitude, mask):
            magnitude.mul_(mask)
        share = (magnitude.mean(inner, keepdim=True) + MEAN_FLOOR) / total
        # 1.01 / (share + 0.01), written so that it is exactly 1 where everything is kept.
        return 1 + (1 - share) / (share + SCALE_DAMPING) if self.rescale else torch.ones_like(share)

    def project(self, latent: Tensor, mask: Tensor, out: Tensor, calibration: Tensor | None = None) -> None:
        assert calibration is not None
        if not step.project_rows(latent, mask, out, calibration):
            super().project(latent, mask, out, calibration)

    def compress(self, weights: Tensor, mask: Tensor, calibration: Tensor | None = None) -> None:
        assert calibration is not None
        scale, threshold = calibration
        shrunk = weights.sub(weights.clamp(-threshold, threshold)).mul_(scale)
        apply_mask(shrunk, mask, weights)  # zero also where a diverged layer has a scale of NaN

    @property
    def fused_projection(self) -> FusedProjection:
        return FusedProjection(soft_threshold=True, rescale=self.rescale)


@COMPRESSORS.register("power")
@dataclass(frozen=True)
class PowerThreshold(Threshold):
    """Thresholds sign(w) · (|w|ᵖ − tᵖ)^(1/p), as in Feather (Georgoulakis et al., BMVC 2023).

    The power p lies between soft thresholds (p = 1) and hard ones (p = ∞).
    """

    power: float = 3.0

    def __post_init__(self) -> None:
        require(1 <= self.power < float("inf"), f"power is p, a finite number of at least 1, got {self.power}.")

    def compress(self, weights: Tensor, mask: Tensor, calibration: Tensor | None = None) -> None:
        assert calibration is not None
        threshold = calibration[1]
        # |w| · (1 − (t/|w|)ᵖ)^(1/p) does not overflow or underflow where |w|ᵖ would.
        ratio = torch.where(weights == 0, 1.0, threshold / weights.abs()).clamp_(max=1)
        shrunk = weights * (1 - ratio**self.power) ** (1 / self.power)
        apply_mask(shrunk, mask, weights)


Soft = SoftThreshold  # the name in recipes is "soft"
