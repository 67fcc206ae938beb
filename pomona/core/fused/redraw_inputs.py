"""What the kernels must know to draw the random weights of each slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .random_stream import RandomStream, name_words

if TYPE_CHECKING:
    from ..slot import Slot


def redraw_inputs(slots: Sequence[Slot], stream: RandomStream) -> tuple[Tensor, ...]:
    """Return key, name words, layout and bound of every slot, as one tensor for each column."""
    rows = [(*stream.key, *name_words(slot.name), *position_layout(slot.parameter)) for slot in slots]  # type: ignore[misc]
    bounds = torch.tensor([stream.bound(slot.target.fan_in) for slot in slots])
    integers = torch.tensor(rows, dtype=torch.int64).t().contiguous().pin_memory()
    device = slots[0].mask.device
    on_device = integers.to(device, non_blocking=True), bounds.pin_memory().to(device, non_blocking=True)
    return (*on_device[0], on_device[1])


def has_known_layouts(slots: Sequence[Slot]) -> bool:
    """Return whether the kernels can find a weight's position in all slots."""
    return all(position_layout(slot.parameter) is not None for slot in slots)


def position_layout(parameter: Tensor) -> tuple[int, int] | None:
    """Return (channels, spatial) to find a weight's row-major position from its place in memory.

    Memory counts (outer, spatial, channels) where a position counts (outer, channels, spatial); a contiguous
    tensor has one of both. None for layouts that the kernels do not know.
    """
    if parameter.is_contiguous():
        return 1, 1
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if parameter.ndim in formats and parameter.is_contiguous(memory_format=formats[parameter.ndim]):
        return parameter.shape[1], parameter.shape[2:].numel()
    return None
