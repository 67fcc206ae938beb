"""Parameters on a CPU that use the memory of their latents while the optimizer steps, so that nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from ..slot import Slot


class LatentMemory:
    """The parameters that point to their latents right now, with their own memory."""

    def __init__(self) -> None:
        self.own: dict[Slot, Tensor] = {}

    @property
    def is_used(self) -> bool:
        """Whether parameters point to their latents."""
        return bool(self.own)

    def point(self, slots: Sequence[Slot]) -> bool:
        """Point all parameters to the memory of their latents; return False where one of them cannot."""
        if not all(map(can_point, slots)):
            return False
        for slot in slots:
            if slot.latent is not None:
                self.own[slot] = slot.parameter.data
                slot.parameter.data = slot.latent
        return True

    def restore(self) -> None:
        """Point parameters to their own memory again."""
        while self.own:
            slot, values = self.own.popitem()
            slot.parameter.data = values


def can_point(slot: Slot) -> bool:
    """Return whether a parameter can use the memory of its latent during a step, because nothing else uses its own."""
    parameter, latent = slot.parameter, slot.latent
    return latent is None or (
        parameter.device.type == "cpu"
        and type(parameter) is nn.Parameter
        and parameter.stride() == latent.stride()
        and parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
    )
