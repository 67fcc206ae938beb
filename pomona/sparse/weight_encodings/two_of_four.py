"""2:4 sparsity: of every four weights along a row the two that may be nonzero, and two bits for the place of each.

A weight is the matrix out × (in · kh · kw), with rows padded by zeros to whole groups of four. The places of a group
take four bits, the smaller place in the lower two; a byte holds two groups, the first in its lower half.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...errors import require
from ...masking import matrix_shape

GROUP, KEPT = 4, 2


def encode(weight: Tensor) -> dict[str, Tensor] | None:
    """Return values and places of a weight, or None where a group has more than two nonzeros. A −0.0 becomes 0.0."""
    rows, columns = matrix_shape(weight.shape)
    padded = torch.nn.functional.pad(weight.reshape(rows, columns), (0, -columns % GROUP))
    groups = padded.reshape(-1, GROUP)
    nonzero = groups != 0
    if int(nonzero.sum(1).max()) > KEPT:
        return None
    # Nonzeros come first, then zeros of the group fill it up to two; both in their order.
    places = (~nonzero).byte().argsort(dim=1, stable=True)[:, :KEPT].sort(dim=1).values
    nibbles = places[:, 0] | places[:, 1] << 2
    nibbles = torch.nn.functional.pad(nibbles, (0, len(nibbles) % 2)).view(-1, 2)
    return {"values": groups.gather(1, places), "places": (nibbles[:, 0] | nibbles[:, 1] << 4).to(torch.uint8)}


def decode(parts: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
    """Return the dense weight; raise PomonaError for parts that are not those of such a matrix."""
    rows, columns = matrix_shape(shape)
    values, packed = parts["values"], parts["places"]
    width = -(-columns // GROUP)
    groups = rows * width
    fits = values.shape == (groups, KEPT) and packed.shape == (-(-groups // 2),) and packed.dtype == torch.uint8
    require(fits, f"2:4 parts of a weight {tuple(shape)} have {groups} groups of two values and two places.")
    nibbles = torch.stack((packed & 0xF, packed >> 4), 1).flatten()[:groups].long()
    places = torch.stack((nibbles & 3, nibbles >> 2), 1)
    require(bool((places[:, 0] < places[:, 1]).all()), "the two places of a 2:4 group do not increase.")
    dense = values.new_zeros(groups, GROUP).scatter_(1, places, values).view(rows, width * GROUP)
    require(not bool(dense[:, columns:].any()), "a value of a 2:4 weight is outside the matrix.")
    return dense[:, :columns].reshape(shape)
