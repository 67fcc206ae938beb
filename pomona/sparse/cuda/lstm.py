"""An LSTM for a few vectors: warp_shuffle.cu followed by the gates, one kernel for a step of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..format import LANES
from .launcher import MAX_WARP_BLOCK, CompiledKernel, compile_kernel, supports_early_launch
from .warp_shuffle import choose_config, kernel_macros

MAX_VECTORS = 8


def run_lstm(
    x: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    values: Sequence[Tensor],
    indices: Sequence[Tensor],
    biases: Sequence[Tensor],
    blocks: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the outputs of the last layer and the states h and c of all; None where no kernel takes the arguments."""
    if x.get_device() != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return run_lstm(x, h, c, values, indices, biases, blocks)
    n, directions, units = x.shape[1], biases[0].shape[0], biases[0].shape[1] // 4
    if n > MAX_VECTORS or max(blocks) > MAX_WARP_BLOCK or any(v.dtype != x.dtype for v in values):
        return None
    device = x.get_device()
    kernels: list[Any] = [prepare_launch(v.dtype, n, v.shape, b, device) for v, b in zip(values, blocks, strict=True)]
    if not all(kernels):
        return None
    h, c = (t if t is None else t.to(x.dtype).contiguous() for t in (h, c))
    h_next, c_next = (x.new_empty(len(values) * directions, n, units) for _ in range(2))
    layer_bytes = x.element_size() * directions * n * units  # of the states of a layer
    for layer, (kernel, *packed) in enumerate(zip(kernels, values, indices, biases, strict=True)):
        states = [0 if t is None else t.data_ptr() + layer * layer_bytes for t in (h, c, h_next, c_next)]
        x = run_layer(kernel, packed, x, *states)
    return x, h_next, c_next


def run_layer(
    kernel: CompiledKernel, packed: Sequence[Tensor], x: Tensor, h: int, c: int, h_next: int, c_next: int
) -> Tensor:
    """Return the outputs of one layer over all steps, forwards and, with two directions, backwards in the same launch.

    The states are addresses, and so are the inputs and outputs of a step: making a tensor of each would take the host
    longer than the step takes the device.
    """
    x = x if x.stride(2) == 1 else x.contiguous()
    (steps, n, columns), (directions, rows) = x.shape, packed[2].shape
    units, size = rows // 4, x.element_size()
    y = x.new_empty(steps, n, directions * units)
    weights, (x_step, x_pitch, _), (y_step, y_pitch, _) = [t.data_ptr() for t in packed], x.stride(), y.stride()
    inputs = [x.data_ptr() + size * x_step * step for step in range(steps)]
    outputs = [
        [y.data_ptr() + size * (y_step * step + units * direction) for step in range(steps)] for direction in range(2)
    ]
    grid, blocks, h_pitch = (-(-rows // LANES), 1, directions), packed[0].shape[1], units
    previous = h, h and h + size * n * units  # of both directions, where there are two
    for forward in range(steps):
        backward = steps - 1 - forward
        new, last = (outputs[0][forward], outputs[1][backward]), 0 if backward else h_next
        pointers = *weights, inputs[forward], inputs[backward], *previous, c, *new, c_next, last
        kernel.launch(grid, pointers, (units, columns, x_pitch, h_pitch, y_pitch, blocks))
        previous, c, h_pitch = new, c_next, y_pitch
    return y


@cache
def prepare_launch(dtype: torch.dtype, n: int, size: Sequence[int], block: int, device: int) -> CompiledKernel | None:
    """Return the kernel for a layer whose packed values have this size; None where it cannot be compiled."""
    _, blocks, kept, _ = size
    config = choose_config(n, kept, 1, blocks, 1)
    macros = kernel_macros(dtype, n, kept, block, config)
    early = int(supports_early_launch(device))
    return compile_kernel("warp_shuffle", device, config.warps * LANES, **macros, LSTM_STEP=1, EARLY_LAUNCH=early)
