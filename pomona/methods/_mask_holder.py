"""A pruner that holds given masks."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch import Tensor, nn

from ..core.attachment import find_length
from ..core.method import Masks, Method
from ..core.pruner import Pruner
from ..core.targets import unwrap
from ..errors import require


class MaskHolder(Pruner):
    """Holds the masks it is given, and takes a snapshot of the weights after `rewind` steps."""

    def __init__(self, method: Method, masks: Masks, rewind: int | None) -> None:
        super().__init__(method)
        self.given_masks = masks
        self.rewind = rewind
        self.snapshot: dict[str, Tensor] = {}

    def attach(
        self,
        model: nn.Module,
        optimizer: Any,
        total_steps: int | None = None,
        steps_per_epoch: int | None = None,
        *,
        loader: Sized | None = None,
        epochs: int | None = None,
        **options: Any,
    ) -> Pruner:
        """Attach as every pruner does, after validating that `rewind` lies within training."""
        total_steps, steps_per_epoch = find_length(total_steps, steps_per_epoch, loader, epochs)
        require(
            not self.rewind or total_steps is None or self.rewind <= total_steps,
            f"rewind={self.rewind} lies past the end of training, which has {total_steps} steps.",
        )
        super().attach(model, optimizer, total_steps, steps_per_epoch, **options)
        self._take_snapshot()
        return self

    def _install_initial_masks(self, loss: Any) -> None:
        """Install the given masks: a weight may be zero and kept."""
        self._install({slot.name: self.given_masks[slot.name].to(slot.mask.device) for slot in self.slots}, 0.0)

    def complete_step(self, replayed: bool = False) -> None:
        """Count a step, and take the snapshot when it is due."""
        super().complete_step(replayed)
        self._take_snapshot()

    def _take_snapshot(self) -> None:
        if self.step == self.rewind and self.model is not None:
            self.snapshot = {name: value.detach().clone() for name, value in unwrap(self.model).state_dict().items()}

    def finish(self, *args: Any, **kw: Any) -> None:
        """Finish as every pruner does, after validating that the snapshot was taken."""
        require(
            self.rewind is None or bool(self.snapshot),
            f"rewind={self.rewind} lies past the end of training, which took {self.step} steps.",
        )
        super().finish(*args, **kw)
