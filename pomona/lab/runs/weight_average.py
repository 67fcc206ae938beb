"""The average of a model's weights: over the last epochs of a stage, or an exponential one over its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class WeightAverage:
    """A mean of the weights that a model had at each call of `add`, on the model's device."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters())
        self.values: dict[str, Tensor] = {}
        self.count = 0

    @torch.no_grad()
    def add(self, share: float | None = None) -> None:
        """Add the present weights to the mean, with a share of it; by default all weights have the same share."""
        self.count += 1
        if self.count == 1:
            self.values = {name: parameter.clone() for name, parameter in self.parameters.items()}
        else:
            torch._foreach_lerp_(list(self.values.values()), list(self.parameters.values()), share or 1 / self.count)

    @torch.no_grad()
    def install(self) -> None:
        """Copy the mean into the model."""
        torch._foreach_copy_(list(self.parameters.values()), list(self.values.values()))

    def state_dict(self) -> dict[str, Any]:
        """Return the mean and how many weights it is of."""
        return {"count": self.count, "values": self.values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, in the memory layout of the model."""
        self.count = state["count"]
        self.values = {
            name: torch.empty_like(self.parameters[name], requires_grad=False).copy_(value)
            for name, value in state["values"].items()
        }
