"""What DPF may do to the weights besides masking them: any compressor C(w) (section 4 of the paper)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .errors import require
from .masking import apply_mask
from .patterns import Pattern
from .registry import Registry


class Compressor(ABC):
    """Replaces the masked weights by others that are cheaper to hold."""

    name: ClassVar[str]
    lasts: ClassVar[bool] = True  # whether there is still something to do once the mask is at rest

    @abstractmethod
    def compress(self, weights: Tensor, mask: Tensor, gauge: Tensor | None = None) -> None:
        """Replace the weights in place; entries off the mask stay zero."""

    def gauge(self, latent: Tensor, mask: Tensor, rows: int) -> Tensor | None:
        """What `compress` is to know of the dense weights at the moment a mask was taken; None: nothing."""
        return None

    def check(self, pattern: Pattern) -> None:  # noqa: B027 - most compressors fit every pattern
        """Refuse a pattern that the compressor does not fit."""

    def bound(self, latent: Tensor) -> None:  # noqa: B027 - only some compressors bound it
        """Bound the dense weights in place after a step."""


COMPRESSORS: Registry[Compressor] = Registry("compressor")


@COMPRESSORS.register("quantize")
@dataclass(frozen=True)
class Quantize(Compressor):
    """Round to 2^bits − 1 evenly spaced levels, symmetric around zero, up to the tensor's largest magnitude."""

    bits: int

    def __post_init__(self) -> None:
        require(
            2 <= self.bits <= 16,
            f"Quantize takes 2 to 16 bits, got {self.bits}; for one bit there is Binary().",
        )

    def compress(self, weights: Tensor, mask: Tensor, gauge: Tensor | None = None) -> None:
        levels = 2 ** (self.bits - 1) - 1
        step = weights.abs().amax() / levels
        # A tensor of zeros has no step; 0 / 1 rounds to the zeros it is.
        weights.div_(torch.where(step > 0, step, 1)).round_().mul_(step).add_(0.0)  # + 0.0: −0.0 becomes 0.0


@COMPRESSORS.register("binary")
@dataclass(frozen=True)
class Binary(Compressor):
    """+1 or −1 by the weight's sign, as in BinaryConnect (Courbariaux et al., 2015); w is clipped to [−1, 1]."""

    def compress(self, weights: Tensor, mask: Tensor, gauge: Tensor | None = None) -> None:
        apply_mask(torch.where(weights < 0, -1.0, 1.0).to(weights), mask, weights)

    def bound(self, latent: Tensor) -> None:
        latent.clamp_(-1, 1)


@COMPRESSORS.register("soft")
@dataclass(frozen=True)
class Soft(Compressor):
    """w̃ = s · sign(w) · max(|w| − t, 0), as in ST-3 (Vanderschueren & De Vleeschouwer, WACV 2023).

    So weights come and go by way of zero. t is the largest magnitude that the mask cut off in a tensor. With `rescale`
    s makes up for what the mask took from an output, by the authors' rule: s = 1.01 / (0.01 + the share of Σ |w| that
    is kept). Both are measured when a mask is taken. With the last one w̃ becomes w, as where the authors fix their
    network: from there on it is masked and nothing else, so that no weight is held back by a threshold of the past.
    """

    lasts: ClassVar[bool] = False

    rescale: bool = True

    def check(self, pattern: Pattern) -> None:
        require(
            pattern.is_elementwise,
            f"Soft shrinks by the magnitude at which single weights were cut, and {pattern} cuts no single ones: "
            "take pattern='unstructured'.",
        )

    def gauge(self, latent: Tensor, mask: Tensor, rows: int) -> Tensor:
        """s and t, for each output; `arena_triton` has the same for all layers at once."""
        magnitude = latent.abs()
        inner = [dim for dim in range(latent.ndim) if dim != rows] or [0]
        whole = magnitude.mean(inner, keepdim=True) + 1e-6
        kept = (magnitude * mask).mean(inner, keepdim=True) + 1e-6
        share = kept / whole
        # 1.01 / (share + 0.01), written so that it is exactly 1 where all is kept.
        scale = 1 + (1 - share) / (share + 0.01) if self.rescale else torch.ones_like(share)
        return torch.stack([scale, magnitude.masked_fill(mask, 0).amax().expand_as(scale)])

    def compress(self, weights: Tensor, mask: Tensor, gauge: Tensor | None = None) -> None:
        assert gauge is not None
        scale, threshold = gauge
        weights.sub_(weights.clamp(-threshold, threshold)).mul_(scale)
