"""What DPF may do to the weights besides masking them: any compressor C(w) (section 4 of the paper)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .core.errors import require
from .core.method import masked
from .core.registry import Registry


class Compressor(ABC):
    """Replaces the masked weights by others that are cheaper to hold."""

    name: ClassVar[str]

    @abstractmethod
    def compress(self, weights: Tensor, mask: Tensor) -> None:
        """Replace the weights in place; entries off the mask stay zero."""

    def bound(self, latent: Tensor) -> None:  # noqa: B027 - only some compressors bound it
        """Bound the dense weights in place after a step."""


COMPRESSORS: Registry[Compressor] = Registry("compressor")


@COMPRESSORS.add("quantize")
@dataclass(frozen=True)
class Quantize(Compressor):
    """Round to 2^bits − 1 evenly spaced levels, symmetric around zero, up to the tensor's largest magnitude."""

    bits: int

    def __post_init__(self) -> None:
        require(
            2 <= self.bits <= 16,
            f"Quantize takes 2 to 16 bits, got {self.bits}; for one bit there is Binary().",
        )

    def compress(self, weights: Tensor, mask: Tensor) -> None:
        levels = 2 ** (self.bits - 1) - 1
        step = weights.abs().amax() / levels
        # A tensor of zeros has no step; 0 / 1 rounds to the zeros it is.
        weights.div_(torch.where(step > 0, step, 1)).round_().mul_(step).add_(0.0)  # + 0.0: −0.0 becomes 0.0


@COMPRESSORS.add("binary")
@dataclass(frozen=True)
class Binary(Compressor):
    """+1 or −1 by the weight's sign, as in BinaryConnect (Courbariaux et al., 2015); w is clipped to [−1, 1]."""

    def compress(self, weights: Tensor, mask: Tensor) -> None:
        masked(torch.where(weights < 0, -1.0, 1.0).to(weights), mask, weights)

    def bound(self, latent: Tensor) -> None:
        latent.clamp_(-1, 1)
