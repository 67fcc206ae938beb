"""Convolutions of few channels, quicker on a GPU than cuDNN's: `with quick(model): model(x)`.

cuDNN works in tiles of 64 channels and more, and the first stages of CIFAR's networks have 16 and 32. Within `quick`
the convolutions that the Triton kernels know (3×3 or 1×1, stride 1 or 2, padded to the same size, at most 64
channels) run on them in bfloat16, as under autocast, and all others as ever. On the way they sum up what a batch norm
wants to know of its input: where a step is compiled and such a norm takes the output of such a convolution, it need
not look through it again. Of many channels on large images cuDNN is quicker, and does them. Afterwards the model is
what it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

SUPPORTED_CHANNELS = (16, 32, 64)  # beyond, cuDNN's tiles are full
MAX_WORK = 2**27  # inputs × outputs × pixels: beyond, cuDNN is quicker all the same


@contextmanager
def fast_convolutions(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Within it, the model's convolutions of few channels run on the Triton kernels."""
    modules = list(model.modules()) if enabled and triton_kernels() is not None else []
    kinds: dict[nn.Module, type[nn.Module]] = {m: FastConv2d for m in modules if is_supported_convolution(m)}
    kinds |= {m: FastBatchNorm2d for m in modules if is_supported_norm(m)}
    before = {module: type(module) for module in kinds}
    letter: list[Tensor] = []
    for module, kind in kinds.items():
        module.__class__, module.__dict__["letter"] = kind, letter
    try:
        yield
    finally:
        for module, kind in before.items():
            module.__class__ = kind
            del module.__dict__["letter"]


class FastConv2d(nn.Conv2d):
    """What a convolution is for a while; its parameters stay where they are."""

    letter: list[Tensor]  # to the next norm: the output, and the sums over it

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() // self.stride[0] ** 2 * self.out_channels > MAX_WORK:
            return super().forward(x)
        x = x.to(torch.bfloat16, memory_format=torch.channels_last)
        y, sums = convolution(x, self.weight, self.stride[0])
        self.letter[:] = y, sums
        return y


class FastBatchNorm2d(nn.BatchNorm2d):
    """What a batch norm is meanwhile. Not compiled it is quick enough: cuDNN's is a single kernel."""

    letter: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        written, count = self.letter.copy(), x.numel() // x.shape[1]
        self.letter.clear()
        mine = written and written[0] is x
        if not (mine and count > 1 and self.training and torch.compiler.is_compiling()):
            return super().forward(x)
        state = self.running_mean, self.running_var, self.num_batches_tracked
        mean, scale = statistics(written[1], count, *state, self.momentum, self.eps)
        return NormalizeWithStatistics.apply(x, self.weight, self.bias, mean, scale)


class NormalizeWithStatistics(torch.autograd.Function):
    """A batch norm whose statistics are known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, mean, scale)
        y = (x.permute(0, 2, 3, 1).float() - mean) * scale  # channels last, as they lie in memory
        if weight is not None and bias is not None:
            y = y * weight + bias
        return y.to(x.dtype).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        affine = weight is not None
        known = None, None, mean, scale, True, 0.0  # the scale has its ε in it
        return *torch.ops.aten.native_batch_norm_backward(g, x, weight, *known, [True, affine, affine]), None, None


def is_supported_convolution(module: nn.Module) -> bool:
    """Whether the kernels know a module. One with fewer inputs takes the images, which need no gradient."""
    return (
        type(module) is nn.Conv2d
        and module.weight.is_cuda
        and module.bias is None
        and module.groups == 1
        and module.dilation == (1, 1)
        and module.kernel_size in ((1, 1), (3, 3))
        and module.padding == (module.kernel_size[0] // 2,) * 2
        and module.padding_mode == "zeros"
        and module.stride in ((1, 1), (2, 2))
        and module.out_channels in SUPPORTED_CHANNELS
        and (module.in_channels in SUPPORTED_CHANNELS or module.in_channels < min(SUPPORTED_CHANNELS))
    )


def is_supported_norm(module: nn.Module) -> bool:
    """Whether a module is a norm that can take a convolution's sums."""
    return type(module) is nn.BatchNorm2d and module.track_running_stats and module.momentum is not None


def tile_config(weight: Tensor, stride: int) -> tuple[int, int]:
    """How many neighbouring pixels are taken together, and how many such patches a program takes."""
    outputs, inputs, size, _ = weight.shape
    most = max(inputs, outputs)
    return 1 + (stride == 1 and size > 1 and most < 64), 128 if most > 16 else 256


@torch.library.custom_op("pomona::convolution", mutates_args=())
def convolution(x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """The convolution of images with channels last, padded to the same size, by a float32 weight.

    And for each channel the sums of some of its outputs, and of their squares.
    """
    return triton_kernels().forward(x, weight, stride)


@torch.library.custom_op("pomona::convolution_input_gradient", mutates_args=())
def input_gradient(g: Tensor, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """The gradient of its input."""
    return triton_kernels().input_gradient(g, x, weight, stride)


@torch.library.custom_op("pomona::convolution_weight_gradient", mutates_args=())
def weight_gradient(g: Tensor, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """The gradient of its weight."""
    return triton_kernels().weight_gradient(g, x, weight, stride)


@torch.library.custom_op("pomona::statistics", mutates_args=("running_mean", "running_var", "batches"))
def statistics(
    sums: Tensor,
    count: int,
    running_mean: Tensor,
    running_var: Tensor,
    batches: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Mean and 1/σ of the channels that were summed up; what a batch norm remembers is moved on."""
    return triton_kernels().statistics(sums, count, running_mean, running_var, batches, momentum, eps)


@convolution.register_fake
def allocate_outputs(x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Where the output of a convolution goes, and the sums over it."""
    height, width = (-(-length // stride) for length in x.shape[2:])
    columns, block = tile_config(weight, stride)
    rows = -(-x.shape[0] * height * -(-width // columns) // block) * columns
    y = x.new_empty(x.shape[0], height, width, weight.shape[0]).permute(0, 3, 1, 2)
    return y, weight.new_empty(2, rows, weight.shape[0])


@input_gradient.register_fake
def _(g: Tensor, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


@weight_gradient.register_fake
def _(g: Tensor, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.channels_last)


@statistics.register_fake
def _(sums: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return sums.new_empty(sums.shape[2]), sums.new_empty(sums.shape[2])


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    x, weight, ctx.stride = inputs
    ctx.save_for_backward(x, weight)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    g = g.contiguous(memory_format=torch.channels_last)
    wanted, learning, _ = ctx.needs_input_grad
    return (
        input_gradient(g, x, weight, ctx.stride) if wanted else None,
        weight_gradient(g, x, weight, ctx.stride) if learning else None,
        None,
    )


convolution.register_autograd(_backward, setup_context=_save_for_backward)


@cache
def triton_kernels() -> Any:
    """The Triton kernels, or None where Triton is missing."""
    try:
        from . import convolution_triton
    except ImportError:
        return None
    return convolution_triton
