"""Convolutions and recurrent layers in forms that `vmap` batches well over examples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_input
from torch.overrides import TorchFunctionMode


class BatchableOps(TorchFunctionMode):
    """A mode in which convolutions on a GPU and recurrent layers are large matrix products when batched by `vmap`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in CELLS and is_padded(name, args):
            return recurrent_layers(name, *args, **kwargs)
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


def is_padded(name: str, args: Any) -> bool:
    """Return whether a recurrent function was called on a padded tensor, and not on a packed sequence."""
    return isinstance(args[1], tuple) if name == "lstm" else not isinstance(args[2], Tensor)


def lstm_cell(projected: Tensor, state: tuple[Tensor, ...], weight: Tensor, bias: Any) -> tuple[Tensor, ...]:
    """Return the next hidden and cell state from the projected inputs, which include all biases."""
    i, f, g, o = (projected + state[0] @ weight.T).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_cell(projected: Tensor, state: tuple[Tensor, ...], weight: Tensor, bias: Any) -> tuple[Tensor, ...]:
    """Return the next hidden state; the bias of the hidden state is inside the product with the reset gate."""
    r, z, n = projected.chunk(3, -1)
    hidden_r, hidden_z, hidden_n = (state[0] @ weight.T + bias).chunk(3, -1)
    z = (z + hidden_z).sigmoid()
    return ((1 - z) * (n + (r + hidden_r).sigmoid() * hidden_n).tanh() + z * state[0],)


def tanh_cell(projected: Tensor, state: tuple[Tensor, ...], weight: Tensor, bias: Any) -> tuple[Tensor, ...]:
    """Return the next hidden state."""
    return ((projected + state[0] @ weight.T).tanh(),)


def relu_cell(projected: Tensor, state: tuple[Tensor, ...], weight: Tensor, bias: Any) -> tuple[Tensor, ...]:
    """Return the next hidden state."""
    return ((projected + state[0] @ weight.T).relu(),)


CELLS = {"lstm": lstm_cell, "gru": gru_cell, "rnn_tanh": tanh_cell, "rnn_relu": relu_cell}


def recurrent_layers(
    name: str,
    inputs: Tensor,
    state: Tensor | tuple[Tensor, ...],
    weights: list[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Return what the function of this name returns, by matrix products, as its own kernels have no batching rule.

    The weights of an LSTM with `proj_size` have a projection of the hidden state at the end of each layer.
    """
    x, states = inputs.transpose(0, 1) if batch_first else inputs, state if isinstance(state, tuple) else (state,)
    directions, cell = 1 + bidirectional, CELLS[name]
    size = len(weights) // (layers * directions)
    last_states: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            input_weight, hidden_weight, *rest = weights[k * size : (k + 1) * size]
            biases, projection = (rest[:2], rest[2:]) if has_biases else ((0, 0), rest)
            inside = biases[1] if name == "gru" else 0  # the other cells add both biases at the same place
            projected = x @ input_weight.T + (biases[0] if name == "gru" else biases[0] + biases[1])
            current, steps = tuple(part[k] for part in states), []
            for t in reversed(range(len(projected))) if direction else range(len(projected)):
                hidden, *others = cell(projected[t], current, hidden_weight, inside)
                if projection:
                    hidden = hidden @ projection[0].T
                current = (hidden, *others)
                steps.append(hidden)
            outputs.append(torch.stack(steps[::-1] if direction else steps))
            last_states.append(current)
        x = torch.cat(outputs, -1)
        if dropout and training and layer < layers - 1:
            x = F.dropout(x, dropout)
    last = (torch.stack(parts) for parts in zip(*last_states, strict=True))
    return (x.transpose(0, 1) if batch_first else x, *last)
