"""Convolutions and LSTMs in forms that `vmap` batches well over examples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_input
from torch.overrides import TorchFunctionMode


class BatchableOps(TorchFunctionMode):
    """A mode in which convolutions on a GPU and LSTMs become a few large matrix products when batched by `vmap`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "lstm":
            return lstm(*args, **kwargs)
        if name == "conv2d" and not kwargs and len(args) == 7 and args[0].is_cuda:
            inputs, weight, bias, stride, padding, dilation, groups = args
            if groups == 1 and not isinstance(padding, str):
                out = PatchConvolution.apply(inputs, weight, stride, padding, dilation)
                return out if bias is None else out + bias[:, None, None]
        return func(*args, **kwargs)


class PatchConvolution(torch.autograd.Function):
    """conv2d whose weight gradient is a matrix product with input patches.

    Batched over examples, torch's own weight gradient is a grouped convolution, which is far slower.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(inputs: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> Tensor:
        return F.conv2d(inputs, weight, None, stride, padding, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.geometry = inputs[2:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        stride, padding, dilation = ctx.geometry
        input_gradient = None
        if ctx.needs_input_grad[0]:
            input_gradient = conv2d_input(inputs.shape, weight, gradient, stride, padding, dilation)
        patches = extract_patches(inputs, weight.shape[2:], gradient.shape[2:], stride, padding, dilation)
        weight_gradient = torch.einsum("nol,nkl->ok", gradient.flatten(2), patches.flatten(3).flatten(1, 2))
        return input_gradient, weight_gradient.view(weight.shape), None, None, None


def extract_patches(inputs: Tensor, kernel: Any, size: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """Return the inputs that each kernel position of a convolution reads: (rows, channels, positions, height, width).

    `kernel` is the kernel's shape and `size` the output's. `unfold` gives the same numbers, but on a GPU it launches a
    kernel for each row.
    """
    stride, (pad_height, pad_width), dilation = map(as_pair, (stride, padding, dilation))
    padded = F.pad(inputs, (pad_width, pad_width, pad_height, pad_height))

    def positions(offset: int, axis: int) -> slice:
        start = offset * dilation[axis]
        return slice(start, start + stride[axis] * (size[axis] - 1) + 1, stride[axis])

    return torch.stack(
        [padded[:, :, positions(i, 0), positions(j, 1)] for i in range(kernel[0]) for j in range(kernel[1])], dim=2
    )


def as_pair(value: Any) -> tuple[int, int]:
    """Return (height, width) of a convolution argument that is one number, or a sequence of one or two."""
    first, *rest = (value,) if isinstance(value, int) else value
    return first, rest[0] if rest else first


def lstm(
    inputs: Tensor,
    state: tuple[Tensor, Tensor],
    weights: list[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `torch.lstm` returns, computed by matrix products: torch's own kernels have no batching rule."""
    x = inputs.transpose(0, 1) if batch_first else inputs
    directions, size = 1 + bidirectional, 4 if has_biases else 2
    last_states: list[tuple[Tensor, Tensor]] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            input_weight, hidden_weight, *biases = weights[k * size : (k + 1) * size]
            projected = x @ input_weight.T + (biases[0] + biases[1] if has_biases else 0)
            h, c, steps = state[0][k], state[1][k], []
            for t in reversed(range(len(projected))) if direction else range(len(projected)):
                i, f, g, o = (projected[t] + h @ hidden_weight.T).chunk(4, -1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                steps.append(h)
            outputs.append(torch.stack(steps[::-1] if direction else steps))
            last_states.append((h, c))
        x = torch.cat(outputs, -1)
        if dropout and training and layer < layers - 1:
            x = F.dropout(x, dropout)
    hidden, cell = (torch.stack(states) for states in zip(*last_states, strict=True))
    return x.transpose(0, 1) if batch_first else x, hidden, cell
