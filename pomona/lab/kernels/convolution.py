"""Fast convolutions with few channels on a GPU: `with fast_convolutions(model): model(x)`.

cuDNN computes tiles of 64 channels and more, but the first stages of CIFAR networks have 16 and 32. Within
`fast_convolutions` the convolutions that the Triton kernels support (3×3 or 1×1, stride 1 or 2, padded to the same
size, at most 64 channels) run on these kernels in bfloat16, as under autocast; all others are unchanged. The kernels
also sum their outputs and the squares of their outputs for each channel. In a compiled step, a batch norm that takes
the output of such a convolution uses these sums and need not read the output again. cuDNN is faster for many channels
on large images and computes those. After the block the model is what it was before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .convolution_shapes import allocate_outputs

SUPPORTED_CHANNELS = (16, 32, 64)  # with more, cuDNN's tiles are full
MAX_WORK = 2**27  # inputs × outputs × pixels: with more, cuDNN is faster in spite of its empty tiles


@contextmanager
def fast_convolutions(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Run the supported convolutions of a model on the Triton kernels within the block."""
    modules = list(model.modules()) if enabled and triton_kernels() is not None else []
    classes: dict[nn.Module, type[nn.Module]] = {m: FastConv2d for m in modules if is_supported_convolution(m)}
    classes |= {m: FastBatchNorm2d for m in modules if is_supported_norm(m)}
    originals = {module: type(module) for module in classes}
    channel_sums: list[Tensor] = []
    for module, fast_class in classes.items():
        module.__class__, module.__dict__["channel_sums"] = fast_class, channel_sums
    try:
        yield
    finally:
        for module, original in originals.items():
            module.__class__ = original
            del module.__dict__["channel_sums"]


class FastConv2d(nn.Conv2d):
    """The class of a supported convolution within `fast_convolutions`; its parameters stay where they are."""

    channel_sums: list[Tensor]  # shared with all norms: the last convolution's output, and the sums over it

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() // self.stride[0] ** 2 * self.out_channels > MAX_WORK:
            return super().forward(x)
        x = x.to(torch.bfloat16, memory_format=torch.channels_last)
        y, sums = convolution(x, self.weight, self.stride[0])
        self.channel_sums[:] = y, sums
        return y


class FastBatchNorm2d(nn.BatchNorm2d):
    """The class of a supported batch norm within `fast_convolutions`.

    It uses the sums of a convolution in a compiled step only. Otherwise cuDNN's batch norm, a single kernel, is fast.
    """

    channel_sums: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        received, count = self.channel_sums.copy(), x.numel() // x.shape[1]
        self.channel_sums.clear()
        is_from_convolution = received and received[0] is x
        if not (is_from_convolution and count > 1 and self.training and torch.compiler.is_compiling()):
            return super().forward(x)
        state = self.running_mean, self.running_var, self.num_batches_tracked
        mean, scale = statistics(received[1], count, *state, self.momentum, self.eps)
        return NormalizeWithStatistics.apply(x, self.weight, self.bias, mean, scale)


class NormalizeWithStatistics(torch.autograd.Function):
    """A batch norm whose mean and 1/σ are already known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, mean, scale)
        y = (x.permute(0, 2, 3, 1).float() - mean) * scale  # channels last, as in memory
        if weight is not None and bias is not None:
            y = y * weight + bias
        return y.to(x.dtype).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        affine = weight is not None
        known = None, None, mean, scale, True, 0.0  # ε is already part of the scale
        return *torch.ops.aten.native_batch_norm_backward(g, x, weight, *known, [True, affine, affine]), None, None


def is_supported_convolution(module: nn.Module) -> bool:
    """Return whether the kernels support a module.

    A convolution with fewer inputs than the smallest supported count takes the images, which need no gradient.
    """
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
    """Return whether a module is a batch norm that can use the sums of a convolution."""
    return type(module) is nn.BatchNorm2d and module.track_running_stats and module.momentum is not None


@torch.library.custom_op("pomona::convolution", mutates_args=())
def convolution(x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Return the convolution of channels-last images by a float32 weight, padded to the same size, and channel sums.

    The sums are, for each channel, those of some of its outputs and of their squares.
    """
    return triton_kernels().forward(x, weight, stride)


@torch.library.custom_op("pomona::convolution_input_gradient", mutates_args=())
def input_gradient(g: Tensor, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Return the gradient of a convolution's input."""
    return triton_kernels().input_gradient(g, x, weight, stride)


@torch.library.custom_op("pomona::convolution_weight_gradient", mutates_args=())
def weight_gradient(g: Tensor, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Return the gradient of a convolution's weight."""
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
    """Return mean and 1/σ of the channels from their sums, and update the running statistics of a batch norm."""
    return triton_kernels().statistics(sums, count, running_mean, running_var, batches, momentum, eps)


convolution.register_fake(allocate_outputs)


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
    input_needed, weight_needed, _ = ctx.needs_input_grad
    return (
        input_gradient(g, x, weight, ctx.stride) if input_needed else None,
        weight_gradient(g, x, weight, ctx.stride) if weight_needed else None,
        None,
    )


convolution.register_autograd(_backward, setup_context=_save_for_backward)


@cache
def triton_kernels() -> Any:
    """Return the module of the Triton kernels, or None if Triton is not installed."""
    try:
        from . import convolution_triton
    except ImportError:
        return None
    return convolution_triton
