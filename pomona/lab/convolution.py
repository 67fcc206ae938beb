"""Convolutions of few channels, quicker on a GPU than cuDNN's: `with quick(model): model(x)`.

cuDNN works in tiles of 64 channels and more, and the first stages of CIFAR's networks have 16 and 32. Within `quick`
the convolutions that the Triton kernels know (3×3 or 1×1, stride 1 or 2, padded to the same size, at most 64
channels) run on them in bfloat16, as under autocast, and all others as ever. Afterwards the model is what it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

CHANNELS = (16, 32, 64)  # beyond, cuDNN's tiles are full


@contextmanager
def quick(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Within it, the model's convolutions of few channels run on the Triton kernels."""
    found = [m for m in model.modules() if fits(m)] if enabled and kernels() is not None else []
    for module in found:
        module.__class__ = Quick
    try:
        yield
    finally:
        for module in found:
            module.__class__ = nn.Conv2d


class Quick(nn.Conv2d):
    """What a convolution is for a while; its parameters stay where they are."""

    def forward(self, x: Tensor) -> Tensor:
        return convolution(x.to(torch.bfloat16, memory_format=torch.channels_last), self.weight, self.stride[0])


def fits(module: nn.Module) -> bool:
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
        and module.out_channels in CHANNELS
        and (module.in_channels in CHANNELS or module.in_channels < min(CHANNELS))
    )


@torch.library.custom_op("pomona::convolution", mutates_args=())
def convolution(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """The convolution of images with channels last, padded to the same size, by a float32 weight."""
    return kernels().forward(x, weight, stride)


@torch.library.custom_op("pomona::convolution_input_gradient", mutates_args=())
def input_gradient(g: Tensor, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """The gradient of its input; a stride leaves holes in it, and cuDNN knows how to leave them out."""
    if stride == 1:
        return kernels().input_gradient(g, x, weight)
    padding = [weight.shape[2] // 2] * 2
    shape = [stride, stride], padding, [1, 1], False, [0, 0], 1
    found = torch.ops.aten.convolution_backward(g, x, weight.to(x.dtype), None, *shape, [True, False, False])[0]
    return found.contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("pomona::convolution_weight_gradient", mutates_args=())
def weight_gradient(g: Tensor, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """The gradient of its weight."""
    return kernels().weight_gradient(g, x, weight, stride)


@convolution.register_fake
def _(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    size = [-(-length // stride) for length in x.shape[2:]]
    return x.new_empty(x.shape[0], weight.shape[0], *size).to(memory_format=torch.channels_last)


@input_gradient.register_fake
def _(g: Tensor, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


@weight_gradient.register_fake
def _(g: Tensor, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.channels_last)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    x, weight, ctx.stride = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    g = g.contiguous(memory_format=torch.channels_last)
    wanted, learning, _ = ctx.needs_input_grad
    return (
        input_gradient(g, x, weight, ctx.stride) if wanted else None,
        weight_gradient(g, x, weight, ctx.stride) if learning else None,
        None,
    )


convolution.register_autograd(_backward, setup_context=_keep)


@cache
def kernels() -> Any:
    """The Triton kernels, or None where Triton is missing."""
    try:
        from . import convolution_triton
    except ImportError:
        return None
    return convolution_triton
