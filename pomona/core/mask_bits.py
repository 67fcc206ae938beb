"""Masks as bits in checkpoints, and hashes of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import require

# The constants of SplitMix64, as signed numbers.
GOLDEN_GAMMA = 0x9E37_79B9_7F4A_7C15 - 2**64
MIXING = ((30, 0xBF58_476D_1CE4_E5B9 - 2**64), (27, 0x94D0_49BB_1331_11EB - 2**64))  # shifts and factors


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


def hash_mask(mask: Tensor) -> Tensor:
    """Return 64 bits that differ, but for one chance in 2⁶⁴ or so, where two masks of one shape do.

    Each word of 64 entries is mixed with its position by SplitMix64 (Steele et al., 2014), and the words are added.
    """
    bits = pack_bits(mask)
    words = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(torch.int64)
    mixed = words + torch.arange(1, words.numel() + 1, device=mask.device) * GOLDEN_GAMMA
    for shift, factor in MIXING:
        mixed = (mixed ^ _shift_right(mixed, shift)) * factor
    return (mixed ^ _shift_right(mixed, 31)).sum()


def _shift_right(words: Tensor, shift: int) -> Tensor:
    """Return words shifted to the right with zeros from the left; torch's own shift repeats the sign."""
    return (words >> shift) & ((1 << (64 - shift)) - 1)
