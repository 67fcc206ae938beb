"""Operations of random networks: functions that draw a module with random settings for a value of a given shape."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Draw = random.Random


class Apply(nn.Module):
    """A function of tensors as a module, with the modules that it uses."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(modules)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*self.parts, *inputs)


class Constant(nn.Module):
    """A parameter and a buffer, multiplied with and added to a value."""

    def __init__(self, shape: torch.Size, kind: str) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.randn(shape[1:]))
        self.register_buffer("shift", torch.randn(shape[1:]))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "scale":
            return x * self.weight + self.shift
        return x @ self.weight.mT if self.kind == "matrix" else torch.where(self.shift > 0, x, self.shift * 0 + 0.3)


@dataclass(frozen=True)
class Operation:
    """A kind of step: the numbers of axes it takes, how many values, and a module for given inputs."""

    name: str
    axes: tuple[int, ...]
    build: Callable[[Draw, Tensor], nn.Module]
    inputs: int = 1
    weight: int = 1  # how often it is drawn


def activation(draw: Draw, x: Tensor) -> nn.Module:
    slope = draw.choice((0.01, 0.3, 1.5, -0.5))
    low = draw.uniform(-1, 0.2)
    return draw.choice(
        [
            nn.ReLU(),
            nn.ReLU(),
            nn.ReLU(inplace=True),
            nn.LeakyReLU(slope),
            nn.ELU(draw.choice((0.5, 1.0, 2.0))),
            nn.CELU(abs(slope)),
            nn.SELU(),
            nn.GELU(),
            nn.GELU("tanh"),
            nn.SiLU(),
            nn.Mish(),
            nn.Hardswish(),
            nn.Hardsigmoid(),
            nn.Sigmoid(),
            nn.Tanh(),
            nn.Softplus(draw.choice((0.5, 1, 4)), draw.choice((0.0, 1.0, 20.0))),
            nn.LogSigmoid(),
            nn.ReLU6(),
            nn.Hardtanh(low, low + draw.uniform(0.1, 2)),
            nn.Softsign(),
            nn.Tanhshrink(),
            nn.PReLU(x.shape[1], init=slope),
            nn.PReLU(init=slope),
            Apply(torch.abs),
            Apply(lambda v: v.clamp(low, 0.7)),
            Apply(lambda v: v.clamp(min=low)),
            Apply(torch.sin),
            Apply(torch.cos),
            Apply(torch.exp),
            Apply(lambda v: v**2),
            Apply(lambda v: (v * v + 0.5).sqrt()),
            Apply(lambda v: (v.abs() + 0.3).log()),
            Apply(lambda v: 1 / (v.abs() + 0.5)),
            Apply(torch.atan),
            Apply(lambda v: (v * v + 0.2).rsqrt()),
            Apply(lambda v: v**3 / 4),
            Apply(torch.erf),
        ]
    )


def scaling(draw: Draw, x: Tensor) -> nn.Module:
    c = draw.choice((-2.0, 0.25, 3.0, -0.1))
    return Apply(
        draw.choice(
            (
                lambda v: c * v,
                lambda v: v / c,
                lambda v: v + c,
                lambda v: c - v,
                lambda v: -v,
                lambda v: torch.add(v, v, alpha=c),
                lambda v: v - v.mean(1, keepdim=True),
                lambda v: torch.sub(v, v.flip(1), alpha=c),
                lambda v: v + v.sum(-1, keepdim=True),
                lambda v: F.dropout(v, 0.5, training=False),
                lambda v: v.float().to(v.dtype),
                lambda v: v.mul(c).add_(1),
            )
        )
    )


def move(draw: Draw, x: Tensor) -> nn.Module:
    channels = x.shape[1]
    index = [draw.randrange(channels) for _ in range(draw.randint(1, channels + 2))]
    nested, cut = tuple(index), draw.randint(0, channels - 1)
    shift, halves = draw.randint(1, 3), max(1, channels // 2)
    return Apply(
        draw.choice(
            (
                lambda v: v[:, nested],
                lambda v: v[:, index],
                lambda v: v.index_select(1, torch.tensor(index, device=v.device)),
                lambda v: v.flip(1),
                lambda v: v.roll(shift, 1),
                lambda v: v[:, cut:],
                lambda v: v[:, ::2],
                lambda v: v[..., -1:],
                lambda v: torch.cat(v.chunk(2, 1), 1),
                lambda v: torch.cat(v.split(halves, 1)[::-1], 1),
                lambda v: v.unbind(1)[cut].unsqueeze(1),
                lambda v: torch.stack((v, -v), 1).flatten(1, 2),
                lambda v: v.repeat(1, 2, *[1] * (v.ndim - 2)),
                lambda v: v.unsqueeze(1).expand(-1, 2, *[-1] * (v.ndim - 1)).flatten(1, 2),
                lambda v: v.repeat_interleave(2, 1),
                lambda v: v[:, :1].expand_as(v),
                lambda v: v.cumsum(1),
                lambda v: v.transpose(1, -1),
                lambda v: torch.tril(v.unsqueeze(1)).flatten(1),
                lambda v: v.amax(1, keepdim=True),
                lambda v: v.mean(-1, keepdim=True),
                lambda v: v.sum(1, keepdim=True) + v,
                lambda v: v.narrow(1, cut, 1),
                lambda v: F.pad(v, (1, 0), value=0.3),
                lambda v: v.masked_fill(torch.arange(v.shape[-1]) == 0, 0.5),
            )
        )
    )


def in_place(draw: Draw, x: Tensor) -> nn.Module:
    c, cut = draw.choice((-3.0, 0.5, 10.0)), draw.randint(0, x.shape[1] - 1)

    def scale_view(v: Tensor) -> Tensor:
        h = v.clone()
        h.view(-1).mul_(c)
        return h

    def add_to_slice(v: Tensor) -> Tensor:
        h = v * 1.0
        part = h[:, : cut + 1]
        part += 0.5
        part.relu_()
        return h

    def assign(v: Tensor) -> Tensor:
        h = v + 0.0
        h[:, cut] = h[:, 0] * c
        h[..., 0] = 0.25
        return h

    def transposed(v: Tensor) -> Tensor:
        h = v.clone()
        h.transpose(1, -1).tanh_()
        return h

    return Apply(draw.choice((scale_view, add_to_slice, assign, transposed)))


def two_values(draw: Draw, x: Tensor) -> nn.Module:
    c = draw.uniform(-1, 1)
    return Apply(
        draw.choice(
            (
                lambda a, b: a + b,
                lambda a, b: a - c * b,
                lambda a, b: torch.cat((a, b), 1),
                lambda a, b: a * b,
                lambda a, b: torch.sigmoid(a) * b,
                lambda a, b: a + b.mean(1, keepdim=True),
                lambda a, b: a / (1 + b * b),
                lambda a, b: torch.cat((a, b), -1),
                lambda a, b: torch.stack((a, b), 1).flatten(1, 2),
                lambda a, b: a.addcmul(a, b, value=c),
                lambda a, b: torch.lerp(a, b, c),
                lambda a, b: torch.maximum(a, b),
                lambda a, b: torch.where(torch.arange(a.shape[-1]) > 0, a, b),
            )
        )
    )


def residual(draw: Draw, x: Tensor) -> nn.Module:
    inner = nn.Linear(x.shape[-1], x.shape[-1], bias=draw.random() < 0.5)
    act = activation(draw, x)
    return Apply(lambda inner, act, v: v + act(inner(v)), inner, act)


def softmax(draw: Draw, x: Tensor) -> nn.Module:
    axis = draw.randrange(1, x.ndim)
    return draw.choice((nn.Softmax(axis), nn.LogSoftmax(axis), nn.Softmax(axis)))


def normalization(draw: Draw, x: Tensor) -> nn.Module:
    eps = draw.choice((1e-5, 0.1, 1.0))
    norms: list[Any] = [
        nn.LayerNorm(x.shape[-1], eps=eps),
        nn.LayerNorm(x.shape[1:], eps=eps),
        nn.RMSNorm(x.shape[-1], eps=eps),
    ]
    norms += [nn.GroupNorm(g, x.shape[1], eps=eps) for g in (1, 2) if x.shape[1] % g == 0]
    return draw.choice(norms)


def linear(draw: Draw, x: Tensor) -> nn.Module:
    layer = nn.Linear(x.shape[-1], draw.randint(1, 12), bias=draw.random() < 0.7)
    layer.weight.data.mul_(draw.choice((1.0, 2.0)))
    if draw.random() < 0.15:
        return torch.nn.utils.parametrizations.weight_norm(layer)
    return layer


def batch_norm(draw: Draw, x: Tensor) -> nn.Module:
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[x.ndim - 2]
    return kind(x.shape[1], affine=draw.random() < 0.8)


def normalized_layer(draw: Draw, x: Tensor) -> nn.Module:
    layer = convolution(draw, x) if x.ndim > 2 else linear(draw, x)
    with torch.no_grad():
        return nn.Sequential(layer, batch_norm(draw, layer(x)))


def constant(draw: Draw, x: Tensor) -> nn.Module:
    return Constant(x.shape, draw.choice(("scale", "select")))


def matrix(draw: Draw, x: Tensor) -> nn.Module:
    return Constant(torch.Size((1, draw.randint(1, 6), x.shape[-1])), "matrix")


def convolution(draw: Draw, x: Tensor) -> nn.Module:
    axes = x.ndim - 2
    groups = draw.choice([g for g in (1, 1, 2) if x.shape[1] % g == 0])
    size = draw.choice((1, 2, 3))
    mode = draw.choice(("zeros", "zeros", "circular", "reflect", "replicate"))
    options: dict[str, Any] = {"groups": groups, "bias": draw.random() < 0.7, "padding": draw.randint(0, 2)}
    options |= {"stride": draw.choice((1, 1, 2)), "dilation": draw.choice((1, 1, 2)), "padding_mode": mode}
    if options["stride"] == 1 and draw.random() < 0.2:
        options["padding"] = "same"
    return (nn.Conv1d, nn.Conv2d)[axes - 1](x.shape[1], groups * draw.randint(1, 3), size, **options)


def transposed_convolution(draw: Draw, x: Tensor) -> nn.Module:
    groups = draw.choice([g for g in (1, 1, 2) if x.shape[1] % g == 0])
    stride = draw.choice((1, 2))
    options: dict[str, Any] = {
        "groups": groups,
        "stride": stride,
        "padding": draw.randint(0, 1),
        "dilation": draw.choice((1, 2)),
    }
    options["output_padding"] = draw.randint(0, stride - 1)
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d)[x.ndim - 3]
    return kind(x.shape[1], groups * draw.randint(1, 2), draw.choice((1, 2, 3)), **options)


def pooling(draw: Draw, x: Tensor) -> nn.Module:
    size, stride, ceil = draw.choice((2, 3)), draw.choice((1, 2)), draw.random() < 0.3
    if x.ndim == 3:
        return draw.choice(
            (
                nn.MaxPool1d(size, stride, 1, ceil_mode=ceil),
                nn.AvgPool1d(size, stride, 1, ceil),
                nn.AdaptiveAvgPool1d(2),
                nn.AdaptiveMaxPool1d(2),
            )
        )
    return draw.choice(
        (
            nn.MaxPool2d(size, stride, 1, ceil_mode=ceil),
            nn.MaxPool2d(2, stride, 0, draw.choice((1, 2))),
            nn.AvgPool2d(size, stride, 1, ceil, draw.random() < 0.5),
            nn.AdaptiveAvgPool2d((2, 1)),
            nn.AdaptiveMaxPool2d(2),
            Apply(lambda v: v.mean((2, 3), keepdim=True)),
            Apply(lambda v: v.amax((2, 3))),
        )
    )


def image_move(draw: Draw, x: Tensor) -> nn.Module:
    return draw.choice(
        (
            nn.ReflectionPad2d(1),
            nn.ReplicationPad2d((1, 0, 2, 1)),
            nn.CircularPad2d(1),
            nn.ConstantPad2d((1, -1, 0, 1), 0.7),
            nn.Upsample(scale_factor=2),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.PixelUnshuffle(2),
            nn.PixelShuffle(2),
            nn.InstanceNorm2d(x.shape[1]),
            nn.InstanceNorm2d(x.shape[1], track_running_stats=True),
            nn.ChannelShuffle(1),
            Apply(lambda v: v.permute(0, 2, 3, 1)),
            nn.Unfold(2),
            nn.GLU(1),
            nn.LocalResponseNorm(2),
            nn.Dropout2d(),
        )
    )


def reshape(draw: Draw, x: Tensor) -> nn.Module:
    entries = x[0].numel()
    shapes = [(entries,)] + [(k, entries // k) for k in (2, 3, 4) if entries % k == 0]
    shapes += [(k, m, entries // (k * m)) for k in (1, 2, 3) for m in (2, 3) if entries % (k * m) == 0]
    shape = draw.choice(shapes)
    return Apply(lambda v: v.reshape(len(v), *shape))


def attention(draw: Draw, x: Tensor) -> nn.Module:
    causal, width = draw.random() < 0.5, x.shape[-1]
    project = nn.Linear(width, 3 * width)
    choice = draw.randrange(4)
    if choice == 0:
        return Apply(lambda p, v: F.scaled_dot_product_attention(*p(v).chunk(3, -1), is_causal=causal), project)
    if choice == 1:
        return Apply(lambda p, v: torch.softmax(p(v)[..., :width] @ v.mT, -1) @ v, project)
    if choice == 2 and width % 2 == 0:
        return nn.TransformerEncoderLayer(width, 2, 5, batch_first=True, norm_first=draw.random() < 0.5)
    return Apply(lambda m, v: m(v, v, v, need_weights=False)[0], nn.MultiheadAttention(width, 1, batch_first=True))


def recurrence(draw: Draw, x: Tensor) -> nn.Module:
    kind = draw.choice((nn.LSTM, nn.GRU, nn.RNN))
    return Apply(lambda m, v: m(v)[0], kind(x.shape[-1], 3, batch_first=True))


def cell(draw: Draw, x: Tensor) -> nn.Module:
    if draw.random() < 0.5:
        return Apply(lambda m, v: m(v)[0], nn.LSTMCell(x.shape[-1], 3))
    return Apply(lambda m, v: m(v), nn.GRUCell(x.shape[-1], 3))


ANY = (1, 2, 3)
OPERATIONS = [
    Operation("activation", ANY, activation, weight=10),
    Operation("scaling", ANY, scaling, weight=3),
    Operation("move", ANY, move, weight=4),
    Operation("in place", ANY, in_place, weight=2),
    Operation("two values", ANY, two_values, inputs=2, weight=4),
    Operation("residual", ANY, residual, weight=2),
    Operation("softmax", ANY, softmax),
    Operation("normalization", ANY, normalization, weight=2),
    Operation("linear", ANY, linear, weight=6),
    Operation("batch norm", ANY, batch_norm, weight=1),
    Operation("layer and batch norm", ANY, normalized_layer, weight=2),
    Operation("constant", ANY, constant),
    Operation("matrix", (1, 2), matrix),
    Operation("convolution", (2, 3), convolution, weight=6),
    Operation("transposed convolution", (2, 3), transposed_convolution, weight=3),
    Operation("pooling", (2, 3), pooling, weight=3),
    Operation("image move", (3,), image_move, weight=3),
    Operation("reshape", ANY, reshape, weight=2),
    Operation("attention", (2,), attention, weight=4),
    Operation("recurrence", (2,), recurrence),
    Operation("cell", (1,), cell),
]
