"""Masks as bits, for checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import require


def pack(mask: Tensor) -> Tensor:
    """Eight entries a byte, the first in the lowest bit, on the mask's own device."""
    bits = torch.nn.functional.pad(mask.flatten().to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, shape: torch.Size) -> Tensor:
    """The mask of that shape again."""
    size = shape.numel()
    require(
        packed.dtype == torch.uint8 and packed.numel() == (size + 7) // 8,
        f"a packed mask of {tuple(shape)} takes {(size + 7) // 8} bytes, got {packed.numel()} of {packed.dtype}.",
    )
    bits = (packed.view(-1, 1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return bits.flatten()[:size].view(shape).bool()
