"""The gradient of each example by itself: `vmap` of `grad`, with two kernels that it would batch badly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F
from torch.nn.grad import conv2d_input
from torch.overrides import TorchFunctionMode

Loss = Callable[[Tensor, Tensor], Tensor]
Gradients = dict[str, Tensor]


def per_example(
    model: nn.Module, loss: Loss, parameters: Mapping[str, Tensor], inputs: Tensor, targets: Tensor, views: int = 1
) -> tuple[Gradients, Tensor]:
    """(rows, …) gradients by parameter, and (rows,) losses. Of several views of a row, (rows, views, …), the mean."""

    def alone(weights: Mapping[str, Tensor], row: Tensor, target: Tensor) -> Tensor:
        batch = row if views > 1 else row[None]
        return loss(functional_call(model, dict(weights), (batch,)), target.expand(len(batch), *target.shape))

    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    with Batchable():
        return vmap(grad_and_value(alone), (None, 0, 0), randomness="different")(weights, inputs, targets)


def summed(
    model: nn.Module, loss: Loss, parameters: Mapping[str, Tensor], inputs: Tensor, targets: Tensor, views: int = 1
) -> Gradients:
    """The sum of those gradients by one ordinary backward pass."""
    if views > 1:
        inputs, targets = inputs.flatten(0, 1), targets.repeat_interleave(views, 0)
    mean = loss(model(inputs), targets)
    found = torch.autograd.grad(mean * (len(inputs) / views), list(parameters.values()), materialize_grads=True)
    return dict(zip(parameters, found, strict=True))


class Batchable(TorchFunctionMode):
    """Convolutions on a GPU and LSTMs in forms whose batch over examples is a few large products."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "lstm":
            return lstm(*args, **kwargs)
        if name == "conv2d" and not kwargs and len(args) == 7 and args[0].is_cuda:
            inputs, weight, bias, stride, padding, dilation, groups = args
            if groups == 1 and not isinstance(padding, str):
                out = Convolution.apply(inputs, weight, stride, padding, dilation)
                return out if bias is None else out + bias[:, None, None]
        return func(*args, **kwargs)


class Convolution(torch.autograd.Function):
    """conv2d whose weight gradient is a product of patches; batched as a grouped convolution it is far slower."""

    generate_vmap_rule = True

    @staticmethod
    def forward(inputs: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> Tensor:
        return F.conv2d(inputs, weight, None, stride, padding, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.shape = inputs[2:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        stride, padding, dilation = ctx.shape
        back = None
        if ctx.needs_input_grad[0]:
            back = conv2d_input(inputs.shape, weight, gradient, stride, padding, dilation)
        patches = taps(inputs, weight.shape[2:], gradient.shape[2:], stride, padding, dilation)
        product = torch.einsum("nol,nkl->ok", gradient.flatten(2), patches.flatten(3).flatten(1, 2))
        return back, product.view(weight.shape), None, None, None


def taps(inputs: Tensor, kernel: Any, size: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """(rows, channels, taps, height, width): what each tap of a convolution sees.

    `unfold` gives the same, and on a GPU launches a kernel for each row.
    """
    stride, (down, along), dilation = map(pair, (stride, padding, dilation))
    padded = F.pad(inputs, (along, along, down, down))

    def seen(tap: int, way: int) -> slice:
        start = tap * dilation[way]
        return slice(start, start + stride[way] * (size[way] - 1) + 1, stride[way])

    return torch.stack(
        [padded[:, :, seen(i, 0), seen(j, 1)] for i in range(kernel[0]) for j in range(kernel[1])], dim=2
    )


def pair(value: Any) -> tuple[int, int]:
    """One number for both directions, or one for each, as torch takes them."""
    first, *rest = (value,) if isinstance(value, int) else value
    return first, rest[0] if rest else first


def lstm(
    inputs: Tensor,
    state: tuple[Tensor, Tensor],
    weights: list[Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What nn.LSTM computes, out of plain products: its own kernels have no batching rule."""
    x = inputs.transpose(0, 1) if batch_first else inputs
    ways, size = 1 + bidirectional, 4 if biased else 2
    lasts: list[tuple[Tensor, Tensor]] = []
    for layer in range(layers):
        outs = []
        for way in range(ways):
            k = layer * ways + way
            into, across, *biases = weights[k * size : (k + 1) * size]
            drive = x @ into.T + (biases[0] + biases[1] if biased else 0)
            h, c, steps = state[0][k], state[1][k], []
            for t in reversed(range(len(drive))) if way else range(len(drive)):
                i, f, g, o = (drive[t] + h @ across.T).chunk(4, -1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                steps.append(h)
            outs.append(torch.stack(steps[::-1] if way else steps))
            lasts.append((h, c))
        x = torch.cat(outs, -1)
        if dropout and training and layer < layers - 1:
            x = F.dropout(x, dropout)
    hidden, cell = (torch.stack(ends) for ends in zip(*lasts, strict=True))
    return x.transpose(0, 1) if batch_first else x, hidden, cell
