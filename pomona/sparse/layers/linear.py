"""Linear layers with a packed weight: `nn.Linear`, and the `Conv1D` of Hugging Face's GPT-2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import PomonaError
from ..packed_tensor import PackedTensor
from .base import PackedWeightLayer, cast_for_autocast, needs_gradient

if TYPE_CHECKING:
    from .shared_input import SharedInput


class PackedLinear(PackedWeightLayer):
    """A linear layer with a packed weight."""

    options = ("in_features", "out_features")
    in_features: int
    out_features: int
    shared: SharedInput | None = None  # the layers that read the same input, which one product may compute

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        super()._apply(fn, recurse)
        if self.shared is not None and not self.shared.is_intact():
            self.shared = None
        return self

    def forward(self, input: Tensor, relu: bool = False) -> Tensor:
        x = cast_for_autocast(input)
        if needs_gradient(x):
            y = F.linear(x, self.unpack_for_autograd("weight", x.dtype), self.bias)
            return y.relu() if relu else y
        *outer, features = x.shape
        if features != self.in_features:
            raise PomonaError(f"the input has {features} features where the layer has {self.in_features}.")
        if self.shared is not None and x is input and not torch.compiler.is_compiling():
            output = self.shared.take_output(self, x)
            if output is not None:
                return output.relu() if relu else output
        if len(outer) == 1:
            return self.multiply_packed("weight", x, self.read_buffer("bias"), relu)
        y = self.multiply_packed("weight", x.reshape(-1, features), self.bias, relu)
        return y.view(*outer, self.out_features)

    def empty_dense_layer(self) -> nn.Module:
        return nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")


class PackedConv1D(PackedLinear):
    """Hugging Face's `Conv1D`, a linear layer whose dense weight is (in, out), with a packed weight of (out, in)."""

    options = ("nx", "nf")
    nx: int
    nf: int

    def __init__(self, layer: nn.Module, weight: PackedTensor) -> None:
        super().__init__(layer, weight)  # type: ignore[arg-type]
        self.in_features, self.out_features, self.dense_class = self.nx, self.nf, type(layer)

    def empty_dense_layer(self) -> nn.Module:
        with torch.device("meta"):
            return self.dense_class(self.nf, self.nx)

    def weight_shape(self) -> torch.Size:
        return torch.Size((self.nx, self.nf))

    def unpack_weight(self, for_product: bool = False) -> Tensor:
        return super().unpack_weight(for_product).T

    def dense_state(self) -> dict[str, Tensor]:
        return {**super().dense_state(), "weight": self.unpack_weight()}
