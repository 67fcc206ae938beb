"""An LSTM with packed weights."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from ..cuda.launcher import MAX_WARP_BLOCK
from ..cuda.lstm import MAX_VECTORS
from ..ops import balanced_lstm
from ..ops.dense_product import can_keep, warn_about_dense_product
from ..ops.lstm import pack_joint_weights
from ..packed_tensor import DTYPES, PackedTensor
from .base import WHOLE_LAYER_DEVICES, PackedLayer, cast_for_autocast, needs_gradient

JOINT_PARTS = ("values", "indices", "biases")
States = tuple[Tensor, Tensor]  # h and c
# The dense LSTMs of packed ones that had to be unpacked, with the tensors that they came from and their versions.
_dense_layers: WeakKeyDictionary[nn.Module, tuple[list[Tensor], list[int], nn.Module]] = WeakKeyDictionary()


class PackedLSTM(PackedLayer):
    """An LSTM whose input and recurrent weights are packed; weights that are not packed stay dense.

    On a GPU it also holds one joint packed matrix [W_ih W_hh] a layer, for products with a few vectors. The joint
    matrices are rebuilt whenever the weights move or change, and are in no state dict.
    """

    options = ("input_size", "hidden_size", "num_layers", "batch_first", "dropout", "bidirectional")
    input_size: int
    hidden_size: int
    num_layers: int
    batch_first: bool
    dropout: float
    bidirectional: bool

    def __init__(self, layer: nn.LSTM, weights: Mapping[str, PackedTensor]) -> None:
        super().__init__(layer)
        self.has_bias = layer.bias
        for name, parameter in layer.named_parameters():
            if name in weights:
                self.register_packed_weight(name, weights[name])
            else:
                self.register_buffer(name, parameter.detach())
        self.rebuild_joint_matrices()

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLSTM:
        super()._apply(fn, recurse)
        self.rebuild_joint_matrices()
        return self

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.rebuild_joint_matrices()

    def parameter_suffixes(self, layer: int) -> list[str]:
        """Return the suffixes of a layer's parameter names, one for each direction."""
        return [f"_l{layer}{direction}" for direction in ("", "_reverse")[: 1 + self.bidirectional]]

    @torch.no_grad()
    def rebuild_joint_matrices(self) -> None:
        """Register the joint matrix of every layer that has a kernel for it, and drop the old ones."""
        for name in [name for name in self._buffers if name.startswith("joint_")]:
            delattr(self, name)
        self.joint_blocks = [self.register_joint_matrix(layer) for layer in range(self.num_layers)]

    def register_joint_matrix(self, layer: int) -> int:
        """Register the joint matrix of one layer; return the width of its blocks, or 0 where there is none."""
        suffixes = self.parameter_suffixes(layer)
        names = [(f"weight_ih{suffix}", f"weight_hh{suffix}") for suffix in suffixes]
        first = self._buffers.get(f"{names[0][0]}_values")
        widths = {self.blocks.get(name, 0) for pair in names for name in pair}
        if first is None or first.device.type not in WHOLE_LAYER_DEVICES or first.dtype not in DTYPES:
            return 0
        if not all(widths):  # a weight that is not packed
            return 0
        pairs = [(self.packed_weight(ih).dense(), self.packed_weight(hh).dense()) for ih, hh in names]
        biases = [self.joint_bias(suffix, first) for suffix in suffixes]
        joint = {block: pack_joint_weights(pairs, biases, block) for block in widths if block <= MAX_WARP_BLOCK}
        if not joint:
            return 0
        block = min(joint, key=lambda block: joint[block][0].nbytes)
        for part, tensor in zip(JOINT_PARTS, joint[block], strict=True):
            self.register_buffer(f"joint_{part}_l{layer}", tensor, persistent=False)
        return block

    def joint_bias(self, suffix: str, like: Tensor) -> Tensor:
        """Return the sum of both biases of a direction, or zeros on the device of `like`."""
        if not self.has_bias:
            return like.new_zeros(4 * self.hidden_size)
        return self.read_buffer(f"bias_ih{suffix}").float() + self.read_buffer(f"bias_hh{suffix}").float()

    def forward(self, input: Any, hx: States | None = None) -> Any:
        x, state = input, hx
        if isinstance(x, PackedSequence) or needs_gradient(x, *(state or ())):
            warn_about_dense_product("a packed sequence, or an input that needs a gradient, of an LSTM")
            return self.dense_once().forward(x, state)
        unbatched = x.ndim == 2
        if unbatched:
            x, state = x.unsqueeze(1), state and (state[0].unsqueeze(1), state[1].unsqueeze(1))
        elif self.batch_first:
            x = x.transpose(0, 1)
        if self.has_whole_operator(x):
            x, state = self.run_whole(x, *(state or (None, None)))
        else:
            x, state = self.run_layers(x, *self.initial_state(x, state))
        x, state = cast_for_autocast(x), (cast_for_autocast(state[0]), cast_for_autocast(state[1]))
        if unbatched:
            return x.squeeze(1), (state[0].squeeze(1), state[1].squeeze(1))
        return (x.transpose(0, 1) if self.batch_first else x), state

    def dense_once(self) -> nn.Module:
        """Return the dense LSTM without trainable parameters, kept for the next call until a weight changes."""
        parts = [part for part in self._buffers.values() if part is not None]
        if not can_keep(parts):
            return self.dense_without_hooks().train(self.training)
        versions = [part._version for part in parts]
        kept, known, dense = _dense_layers.get(self, ([], [], None))
        if dense is None or known != versions or len(kept) != len(parts) or not all(map(operator.is_, kept, parts)):
            with torch.inference_mode(False):  # tensors of inference mode could not be used for gradients later
                dense = self.dense_without_hooks().requires_grad_(False)  # a hook may hold this layer
            _dense_layers[self] = parts, versions, dense
        return dense.train(self.training)

    def has_whole_operator(self, x: Tensor) -> bool:
        """Return whether one operator computes all layers for an input (time, batch, features)."""
        if not all(self.joint_blocks) or x.shape[1] > MAX_VECTORS or x.numel() == 0 or (self.dropout and self.training):
            return False
        return self.read_buffer("joint_values_l0").dtype == x.dtype and x.shape[2] == self.input_size

    def run_whole(self, x: Tensor, h: Tensor | None, c: Tensor | None) -> tuple[Tensor, States]:
        """Return outputs and states of all layers over (time, batch, features), by the joint matrices."""
        joint = [
            [self.read_buffer(f"joint_{part}_l{layer}") for layer in range(self.num_layers)] for part in JOINT_PARTS
        ]
        x, h, c = balanced_lstm(x, h, c, *joint, self.joint_blocks)
        return x, (h, c)

    def initial_state(self, x: Tensor, state: States | None) -> States:
        """Return the state given, or zeros."""
        if state is not None:
            return state
        zeros = x.new_zeros(self.num_layers * (1 + self.bidirectional), x.shape[1], self.hidden_size)
        return zeros, zeros

    def run_layers(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, States]:
        """Return outputs and states over (time, batch, features), by a product for every step of every layer."""
        states = []
        for layer in range(self.num_layers):
            if layer and self.dropout and self.training:
                x = F.dropout(x, self.dropout)
            outputs = []
            for direction, suffix in enumerate(self.parameter_suffixes(layer)):
                index = layer * (1 + self.bidirectional) + direction
                output, *state = self.run_direction(x, h[index], c[index], suffix, bool(direction))
                outputs.append(output)
                states.append(state)
            x = torch.cat(outputs, -1) if self.bidirectional else outputs[0]
        return x, (torch.stack([s[0] for s in states]), torch.stack([s[1] for s in states]))

    def run_direction(
        self, x: Tensor, h: Tensor, c: Tensor, suffix: str, backwards: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return outputs, h and c of one layer in one direction: W_ih for all steps at once, W_hh step by step."""
        gates = self.multiply_weight(f"weight_ih{suffix}", x.flatten(0, 1), self._buffers.get(f"bias_ih{suffix}"))
        gates = gates.view(*x.shape[:2], 4 * self.hidden_size)
        bias, outputs = self._buffers.get(f"bias_hh{suffix}"), []
        for from_input in reversed(gates) if backwards else gates:
            i, f, g, o = (from_input + self.multiply_weight(f"weight_hh{suffix}", h, bias)).chunk(4, 1)
            c = f.sigmoid().mul_(c).addcmul_(i.sigmoid(), g.tanh())
            h = o.sigmoid().mul_(c.tanh())
            outputs.append(h)
        return torch.stack(outputs[::-1] if backwards else outputs), h, c

    def multiply_weight(self, name: str, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product of x with a weight, packed or dense."""
        weight = self._buffers.get(name)
        return self.multiply_packed(name, x, bias) if weight is None else F.linear(x, weight, bias)

    def flatten_parameters(self) -> None:
        """Do nothing: a dense LSTM arranges its parameters for cuDNN here, and callers may ask for it."""

    def empty_dense_layer(self) -> nn.LSTM:
        options = {name: getattr(self, name) for name in self.options}
        return nn.LSTM(**options, bias=self.has_bias, device="meta")
