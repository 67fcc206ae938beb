"""A linear layer with a packed weight."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import PomonaError
from .base import PackedWeightLayer, cast_for_autocast, needs_gradient


class PackedLinear(PackedWeightLayer):
    """A linear layer with a packed weight."""

    options = ("in_features", "out_features")
    in_features: int
    out_features: int

    def forward(self, input: Tensor) -> Tensor:
        x = cast_for_autocast(input)
        if needs_gradient(x):
            y = F.linear(x, self.unpack_for_autograd("weight", x.dtype), self.bias)
            return y.relu() if self.relu else y
        *outer, features = x.shape
        if features != self.in_features:
            raise PomonaError(f"the input has {features} features where the layer has {self.in_features}.")
        if len(outer) == 1:
            return self.multiply_packed("weight", x, self.read_buffer("bias"), self.relu)
        y = self.multiply_packed("weight", x.reshape(-1, features), self.bias, self.relu)
        return y.view(*outer, self.out_features)

    def empty_dense_layer(self) -> nn.Linear:
        return nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
