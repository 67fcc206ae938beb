"""Store masks as bits in checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import require


def pack_bits(mask: Tensor) -> Tensor:
    """Return a mask as bytes of eight entries, the first in the lowest bit, on the mask's device."""
    bits = torch.nn.functional.pad(mask.flatten().to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, shape: torch.Size) -> Tensor:
    """Return the mask of the given shape that `pack_bits` stored."""
    size = shape.numel()
    require(
        bits.dtype == torch.uint8 and bits.numel() == (size + 7) // 8,
        f"a mask of shape {tuple(shape)} is stored in {(size + 7) // 8} bytes, got {bits.numel()} of {bits.dtype}.",
    )
    entries = (bits.view(-1, 1) >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1
    return entries.flatten()[:size].view(shape).bool()
