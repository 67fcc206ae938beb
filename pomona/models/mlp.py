"""Fully connected networks."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from .registry import register


class MLP(nn.Module):
    """Linear layers with ReLU between them; images are flattened.

    Weights are Glorot-normal and biases zero, as in Frankle & Carbin (2019).
    """

    def __init__(self, *, num_classes: int = 10, in_features: int = 784, hidden: tuple[int, ...] = (300, 100)) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise((in_features, *hidden, num_classes)):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_normal_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


register("mlp", "Rumelhart et al., Nature 1986", (1, 28, 28), MLP, hidden=(512, 512))
register("lenet300", "LeCun et al., Proc. IEEE 1998", (1, 28, 28), MLP)
