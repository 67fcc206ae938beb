"""Layers that run on packed weights. They are for inference: what asks for a gradient gets the dense product.

And one that stays dense, a convolution that does the ReLU behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from ..errors import PomonaError
from .cuda import conv, lstm
from .format import DTYPES, BalancedTensor
from .ops import balanced, balanced_conv2d, balanced_lstm, followed, join

WHOLE = {"cuda"}  # where a convolution and an LSTM are operators of their own, not products
CUDNN = {"cuda"}  # where there is cuDNN

Conv = TypeVar("Conv", bound=nn.Conv2d)


def differentiable(*tensors: Tensor | None) -> bool:
    """Whether a gradient is asked for."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def channels_last(images: Tensor) -> bool:
    """Whether a tensor has its channels side by side."""
    return images.ndim == 4 and images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()


class Packed(nn.Module):
    """A layer with packed weights, `values` and `indices` among its buffers.

    It has the options of the layer it stands for under the same names, and shows the same weight.
    """

    stands_for: ClassVar[type[nn.Module]]
    options: ClassVar[tuple[str, ...]]  # those that rebuild the dense layer

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.shapes: dict[str, torch.Size] = {}
        self.blocks: dict[str, int] = {}
        self.sizes: dict[str, tuple[int, int, int]] = {}  # rows, columns and block, as the operator takes them
        for option in self.options:
            setattr(self, option, getattr(layer, option))
        self.train(layer.training)

    def put(self, leaf: str, packed: BalancedTensor) -> None:
        """Hold a packed weight under the name of the dense one."""
        self.shapes[leaf], self.blocks[leaf] = packed.shape, packed.block
        self.sizes[leaf] = (*packed.matrix, packed.block)
        self.register_buffer(f"{leaf}_values", packed.values)
        self.register_buffer(f"{leaf}_indices", packed.indices)

    def _apply(self, fn: Any, recurse: bool = True) -> Packed:
        super()._apply(fn, recurse)
        for leaf in self.shapes:  # a layout is asked of images and dense weights, and packed ones look like them
            for name in (f"{leaf}_values", f"{leaf}_indices"):
                self._buffers[name] = self.held(name).contiguous()
        return self

    def held(self, name: str) -> Tensor:
        """A buffer, without the time that a module takes to look for one."""
        return self._buffers[name]  # type: ignore[return-value]

    def take(self, leaf: str) -> BalancedTensor:
        """A packed weight."""
        return BalancedTensor(
            self.held(f"{leaf}_values"), self.held(f"{leaf}_indices"), self.shapes[leaf], self.blocks[leaf]
        )

    def packed(self) -> Iterator[tuple[str, BalancedTensor]]:
        """Every packed weight and its name."""
        return ((leaf, self.take(leaf)) for leaf in self.shapes)

    def product(self, leaf: str, x: Tensor, bias: Tensor | None, relu: bool = False, turned: bool = False) -> Tensor:
        """The operator on one of the weights."""
        packed = self.held(f"{leaf}_values"), self.held(f"{leaf}_indices")
        return balanced(x, *packed, bias, *self.sizes[leaf], relu, turned)

    def empty(self) -> nn.Module:
        """The dense layer, without values yet."""
        raise NotImplementedError

    @torch.no_grad()
    def dense(self) -> nn.Module:
        """The dense layer again, trainable."""
        layer = self.empty()
        mine = {leaf: packed.dense() for leaf, packed in self.packed()}
        mine |= {
            name: buffer for name, buffer in self._buffers.items() if name in layer._parameters and buffer is not None
        }
        mine = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in mine.items()}
        layer.load_state_dict(mine, assign=True)
        return layer.train(self.training)

    def plan(self) -> dict[str, Any]:
        """All but the buffers, as plain values for a file."""
        return {leaf: {"shape": list(shape), "block": self.blocks[leaf]} for leaf, shape in self.shapes.items()}

    def extra_repr(self) -> str:
        return ", ".join(f"{leaf}: {packed!r}" for leaf, packed in self.packed())


class Weighted(Packed):
    """A layer of one packed weight, with a bias and perhaps the ReLU behind it."""

    bias: Tensor | None
    relu = False

    def __init__(self, layer: nn.Linear | nn.Conv2d, weight: BalancedTensor) -> None:
        super().__init__(layer)
        self.put("weight", weight)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    @property
    def weight(self) -> Tensor:
        """The dense weight, made anew each time."""
        return self.take("weight").dense()


class PackedLinear(Weighted):
    """A linear layer, and the ReLU behind it where `relu` is set."""

    stands_for = nn.Linear
    options = ("in_features", "out_features")
    in_features: int
    out_features: int

    def forward(self, x: Tensor) -> Tensor:
        if differentiable(x):
            y = F.linear(x, self.weight.to(x.dtype), self.bias)
            return y.relu() if self.relu else y
        *outer, features = x.shape
        if features != self.in_features:
            raise PomonaError(f"the input has {features} features where the layer has {self.in_features}.")
        if len(outer) == 1:
            return self.product("weight", x, self.held("bias"), self.relu)
        y = self.product("weight", x.reshape(-1, features), self.bias, self.relu)
        return y.view(*outer, self.out_features)

    def empty(self) -> nn.Linear:
        return nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")


class PackedConv2d(Weighted):
    """A convolution as the product of out × (in · kh · kw) with shifted views of its input.

    The input is copied once, all images behind each other and a gap of zeros between lines, so wide that
    it serves the line before on its right and the line after on its left. Then the input of every column
    is one contiguous run, which begins at an offset of its own: nothing is unfolded. Images of any layout are taken;
    what comes out has its lines in a row. The dense layer is given back in its own layout.
    """

    stands_for = nn.Conv2d
    options = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "padding_mode")
    out_channels: int
    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    padding_mode: str

    def __init__(self, layer: nn.Conv2d, weight: BalancedTensor) -> None:
        super().__init__(layer, weight)
        self.ahead = list(layer._reversed_padding_repeated_twice)  # what `F.pad` takes
        self.how = conv.Geometry(self.kernel_size, self.stride, (self.ahead[2], self.ahead[0]), self.dilation)
        self.layout = torch.channels_last if channels_last(layer.weight) else torch.contiguous_format

    def forward(self, x: Tensor) -> Tensor:
        if differentiable(x):
            y = F.conv2d(self.pad(x), self.weight.to(x.dtype), self.bias, self.stride, 0, self.dilation)
            return y.relu() if self.relu else y
        batched = x if x.ndim == 4 else x.unsqueeze(0)
        if self.gathers(batched):
            y = self.gather(batched)
        else:
            y = self.slide(batched) if max(self.stride) == 1 or self.kernel_size == (1, 1) else self.unfold(batched)
        return y if x.ndim == 4 else y.squeeze(0)

    def pad(self, x: Tensor) -> Tensor:
        """The input with its border."""
        return F.pad(x, self.ahead, mode="constant" if self.padding_mode == "zeros" else self.padding_mode)

    def framed(self) -> bool:
        """Whether the border is of zeros, and as wide on both sides."""
        return self.padding_mode == "zeros" and self.ahead[0] == self.ahead[1] and self.ahead[2] == self.ahead[3]

    def gathers(self, x: Tensor) -> bool:
        """Whether there is a kernel for the whole convolution."""
        if x.device.type not in WHOLE or not self.framed():
            return False
        values = self.held("weight_values")
        return x.dtype == values.dtype and conv.fits(x.dtype, values.shape[2], self.blocks["weight"], self.how)

    def gather(self, x: Tensor) -> Tensor:
        """By an operator that takes the columns from the images itself."""
        rows, _, block = self.sizes["weight"]
        packed = self.held("weight_values"), self.held("weight_indices"), self.held("bias")
        return balanced_conv2d(x, *packed, rows, block, *self.how.pairs, self.relu)

    def slide(self, x: Tensor) -> Tensor:
        """Stride 1: every column of the matrix sees the input from another offset."""
        (kh, kw), (dh, dw) = self.kernel_size, self.dilation
        if self.framed():
            pw, ph = self.ahead[0], self.ahead[2]
        else:
            x, pw, ph = self.pad(x), 0, 0
        if max(self.stride) > 1:  # of a 1×1 kernel
            x = F.pad(x, (pw, pw, ph, ph))[:, :, :: self.stride[0], :: self.stride[1]]
            pw = ph = 0
        n, channels, height, width = x.shape
        high, wide = height + 2 * ph - dh * (kh - 1), width + 2 * pw - dw * (kw - 1)
        if high <= 0 or wide <= 0:
            raise PomonaError(f"an image of {height}×{width} is too small for a kernel of {kh}×{kw}.")
        pitch, lines = width + pw, height + ph
        plane = (n * lines + ph) * pitch + pw
        framed = x.new_zeros(channels, plane)
        inside = framed.as_strided((channels, n, height, width), (plane, lines * pitch, pitch, 1), ph * pitch + pw)
        inside.copy_(x.transpose(0, 1))
        length = ((n - 1) * lines + high - 1) * pitch + wide if n else 0
        views = framed.as_strided((channels, kh, kw, length), (plane, dh * pitch, dw, 1))
        y = self.product("weight", views, self.bias, self.relu, turned=True)
        return y.as_strided((n, self.out_channels, high, wide), (lines * pitch, length, pitch, 1))

    def unfold(self, x: Tensor) -> Tensor:
        """Any stride: the columns are written out."""
        padded = self.pad(x)
        high, wide = (
            (padded.shape[2 + i] - self.dilation[i] * (self.kernel_size[i] - 1) - 1) // self.stride[i] + 1
            for i in range(2)
        )
        columns = F.unfold(padded, self.kernel_size, self.dilation, 0, self.stride)
        y = self.product("weight", columns.transpose(0, 1).flatten(1), self.bias, self.relu, turned=True)
        return y.view(self.out_channels, x.shape[0], high, wide).transpose(0, 1)

    @torch.no_grad()
    def dense(self) -> nn.Module:
        return super().dense().to(memory_format=self.layout)  # type: ignore[call-overload]

    def empty(self) -> nn.Conv2d:
        options = {name: getattr(self, name) for name in self.options}
        return nn.Conv2d(**options, bias=self.bias is not None, device="meta")


class Conv2dReLU(nn.Conv2d):
    """A dense convolution and the ReLU behind it. cuDNN does both and the bias in one kernel, PyTorch in three.

    It is trained, saved and loaded as the convolution alone: its parameters are the same.
    """

    @staticmethod
    def takes(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
        """Whether a layer can be one: what subclasses do is not known, and cuDNN fills borders with zeros only."""
        return type(layer) is nn.Conv2d and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)

    @classmethod
    def of(cls, layer: nn.Conv2d) -> Conv2dReLU:
        """The same layer, with a ReLU behind it."""
        return recast(layer, cls)

    def dense(self) -> nn.Conv2d:
        """The plain layer again."""
        return recast(self, nn.Conv2d)

    def forward(self, x: Tensor) -> Tensor:
        if self.at_once(x):
            mine, how = self._parameters, (self.stride, self.padding, self.dilation, self.groups)
            try:
                return torch.cudnn_convolution_relu(x, mine["weight"], mine["bias"], *how)  # type: ignore[arg-type]
            except RuntimeError:  # cuDNN has no such kernel, or there is a mistake, which the plain way explains
                pass
        return super().forward(x).relu()

    def at_once(self, x: Tensor) -> bool:
        """Whether cuDNN may do it all: its operator has no derivative, checks little, and knows no autocast."""
        mine, cudnn = self._parameters, torch.backends.cudnn  # not `self.weight`, which takes the host its time
        if x.device.type not in CUDNN or mine.keys() != {"weight", "bias"} or followed(x, *mine.values()):
            return False
        weight: Any = mine["weight"]
        alike = x.dtype == weight.dtype and x.device == weight.device
        asked = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
        free = cudnn.enabled and not asked and not torch.is_autocast_enabled(x.device.type)
        return free and alike and x.dtype in DTYPES and x.ndim == 4 and x.shape[1] == self.in_channels


def recast(layer: nn.Module, kind: type[Conv]) -> Conv:
    """A layer of another kind with all that a layer has, parameters and hooks too."""
    made = kind.__new__(kind)
    vars(made).update(vars(layer))
    return made


class PackedLSTM(Packed):
    """An LSTM whose input and recurrent weights are packed; those that are not stay as they were.

    On a GPU there is, besides, one joint matrix a layer, which a few vectors are multiplied with. It is made anew
    whenever the weights move or change, and is in no state dict.
    """

    stands_for = nn.LSTM
    options = ("input_size", "hidden_size", "num_layers", "batch_first", "dropout", "bidirectional")
    input_size: int
    hidden_size: int
    num_layers: int
    batch_first: bool
    dropout: float
    bidirectional: bool

    def __init__(self, layer: nn.LSTM, weights: dict[str, BalancedTensor]) -> None:
        super().__init__(layer)
        self.has_bias = layer.bias
        for name, parameter in layer.named_parameters():
            if name in weights:
                self.put(name, weights[name])
            else:
                self.register_buffer(name, parameter.detach())
        self.join()

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLSTM:
        super()._apply(fn, recurse)
        self.join()
        return self

    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)
        self.join()

    def names(self, layer: int) -> list[str]:
        """How the weights of a layer end, one for each direction."""
        return [f"_l{layer}{way}" for way in ("", "_reverse")[: 1 + self.bidirectional]]

    @torch.no_grad()
    def join(self) -> None:
        """Hold the joint matrices, where there is a kernel for them."""
        for name in [name for name in self._buffers if name.startswith("joint_")]:
            delattr(self, name)
        self.joint_blocks = [self.joint(layer) for layer in range(self.num_layers)]

    def joint(self, layer: int) -> int:
        """The width of the blocks of one layer's joint matrix; 0 where there is none."""
        names = self.names(layer)
        leaves = [(f"weight_ih{name}", f"weight_hh{name}") for name in names]
        first = self._buffers.get(f"{leaves[0][0]}_values")
        widths = {self.blocks.get(leaf, 0) for pair in leaves for leaf in pair}
        if first is None or first.device.type not in WHOLE or first.dtype not in DTYPES or not all(widths):
            return 0
        pairs = [(self.take(ih).dense(), self.take(hh).dense()) for ih, hh in leaves]
        biases = [self.joint_bias(name, first) for name in names]
        joints = {block: join(pairs, biases, block) for block in widths if block <= lstm.WIDEST}
        if not joints:
            return 0
        block = min(joints, key=lambda block: joints[block][0].nbytes)
        for part, tensor in zip(("values", "indices", "biases"), joints[block], strict=True):
            self.register_buffer(f"joint_{part}_l{layer}", tensor, persistent=False)
        return block

    def joint_bias(self, name: str, like: Tensor) -> Tensor:
        """Both biases of a direction, or zeros."""
        if not self.has_bias:
            return like.new_zeros(4 * self.hidden_size)
        return self.held(f"bias_ih{name}").float() + self.held(f"bias_hh{name}").float()

    def forward(self, x: Any, state: tuple[Tensor, Tensor] | None = None) -> Any:
        if isinstance(x, PackedSequence) or differentiable(x, *(state or ())):
            return self.dense()(x, state)
        single = x.ndim == 2
        if single:
            x, state = x.unsqueeze(1), state and (state[0].unsqueeze(1), state[1].unsqueeze(1))
        elif self.batch_first:
            x = x.transpose(0, 1)
        x, state = self.leap(x, *(state or (None, None))) if self.leaps(x) else self.run(x, *self.start(x, state))
        if single:
            return x.squeeze(1), (state[0].squeeze(1), state[1].squeeze(1))
        return (x.transpose(0, 1) if self.batch_first else x), state

    def leaps(self, x: Tensor) -> bool:
        """Whether all can be done in one operator."""
        if not all(self.joint_blocks) or x.shape[1] > lstm.MOST or x.numel() == 0 or (self.dropout and self.training):
            return False
        return self.held("joint_values_l0").dtype == x.dtype and x.shape[2] == self.input_size

    def leap(self, x: Tensor, h: Tensor | None, c: Tensor | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Every layer and direction over (time, batch, features), by the joint matrices."""
        parts = ("values", "indices", "biases")
        joint = [[self.held(f"joint_{part}_l{layer}") for layer in range(self.num_layers)] for part in parts]
        x, h, c = balanced_lstm(x, h, c, *joint, self.joint_blocks)
        return x, (h, c)

    def start(self, x: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """The states given, or zeros."""
        if state is not None:
            return state
        zeros = x.new_zeros(self.num_layers * (1 + self.bidirectional), x.shape[1], self.hidden_size)
        return zeros, zeros

    def run(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Every layer and direction over (time, batch, features)."""
        states = []
        for layer in range(self.num_layers):
            if layer and self.dropout and self.training:
                x = F.dropout(x, self.dropout)
            outputs = []
            for direction, name in enumerate(self.names(layer)):
                at = layer * (1 + self.bidirectional) + direction
                output, *state = self.steps(x, h[at], c[at], name, bool(direction))
                outputs.append(output)
                states.append(state)
            x = torch.cat(outputs, -1) if self.bidirectional else outputs[0]
        return x, (torch.stack([s[0] for s in states]), torch.stack([s[1] for s in states]))

    def steps(self, x: Tensor, h: Tensor, c: Tensor, name: str, backwards: bool) -> tuple[Tensor, Tensor, Tensor]:
        """One layer in one direction: the inputs' part of the gates at once, the states' step by step."""
        gates = self.multiply(f"weight_ih{name}", x.flatten(0, 1), self._buffers.get(f"bias_ih{name}"))
        gates = gates.view(*x.shape[:2], 4 * self.hidden_size)
        bias, outputs = self._buffers.get(f"bias_hh{name}"), []
        for given in reversed(gates) if backwards else gates:
            i, f, g, o = (given + self.multiply(f"weight_hh{name}", h, bias)).chunk(4, 1)
            c = f.sigmoid().mul_(c).addcmul_(i.sigmoid(), g.tanh())
            h = o.sigmoid().mul_(c.tanh())
            outputs.append(h)
        return torch.stack(outputs[::-1] if backwards else outputs), h, c

    def multiply(self, leaf: str, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product with a weight, packed or not."""
        weight = self._buffers.get(leaf)
        return self.product(leaf, x, bias) if weight is None else F.linear(x, weight, bias)

    def flatten_parameters(self) -> None:
        """What a dense LSTM has for cuDNN; here there is nothing to do."""

    def empty(self) -> nn.LSTM:
        options = {name: getattr(self, name) for name in self.options}
        return nn.LSTM(**options, bias=self.has_bias, device="meta")


KINDS: dict[str, type[Packed]] = {"linear": PackedLinear, "conv2d": PackedConv2d, "lstm": PackedLSTM}
