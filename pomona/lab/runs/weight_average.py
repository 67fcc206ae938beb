"""The mean of a model's weights over the last epochs of a stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class WeightAverage:
    """The mean of the weights that a model had each time it was asked to look; it stays on the device."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters())
        self.values: dict[str, Tensor] = {}
        self.count = 0

    @torch.no_grad()
    def add(self) -> None:
        """Take in the weights as they are now."""
        self.count += 1
        if self.count == 1:
            self.values = {name: parameter.clone() for name, parameter in self.parameters.items()}
        else:
            torch._foreach_lerp_(list(self.values.values()), list(self.parameters.values()), 1 / self.count)

    @torch.no_grad()
    def install(self) -> None:
        """Give the model the mean."""
        torch._foreach_copy_(list(self.parameters.values()), list(self.values.values()))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "values": self.values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]
        like = self.parameters
        self.values = {k: torch.empty_like(like[k], requires_grad=False).copy_(v) for k, v in state["values"].items()}
