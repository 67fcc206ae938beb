"""An LSTM for a few vectors: few.cu with the gates behind it, one kernel for a step of a layer in all directions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..format import LANES
from .compiled import KINDS, Kernel, kernel, overlaps
from .few import shape

WIDEST = 32  # columns of a block
MOST = 8  # vectors


def run(
    x: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    values: Sequence[Tensor],
    indices: Sequence[Tensor],
    biases: Sequence[Tensor],
    blocks: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The outputs of the last layer and all states; None where there is no kernel for it."""
    if x.get_device() != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return run(x, h, c, values, indices, biases, blocks)
    n, directions, units = x.shape[1], biases[0].shape[0], biases[0].shape[1] // 4
    if n > MOST or max(blocks) > WIDEST or any(v.dtype != x.dtype for v in values):
        return None
    made: list[Any] = [plan(v.dtype, n, v.shape, b, x.get_device()) for v, b in zip(values, blocks, strict=True)]
    if not all(made):
        return None
    h, c = (t if t is None else t.to(x.dtype).contiguous() for t in (h, c))
    h_next, c_next = (x.new_empty(len(values) * directions, n, units) for _ in range(2))
    size = x.element_size() * directions * n * units  # bytes of a layer's states
    for layer, (go, *packed) in enumerate(zip(made, values, indices, biases, strict=True)):
        states = [0 if t is None else t.data_ptr() + layer * size for t in (h, c, h_next, c_next)]
        x = sweep(go, packed, x, *states)
    return x, h_next, c_next


def sweep(go: Kernel, packed: Sequence[Tensor], x: Tensor, h: int, c: int, h_next: int, c_next: int) -> Tensor:
    """One layer over all steps, from the first on and, if there are two directions, from the last on.

    States are addresses, and so is what a step reads and writes: a tensor for each would take the host longer than the
    step takes the device.
    """
    x = x if x.stride(2) == 1 else x.contiguous()
    (steps, n, columns), (directions, rows) = x.shape, packed[2].shape
    units, size = rows // 4, x.element_size()
    y = x.new_empty(steps, n, directions * units)
    weights, (ahead, x_pitch, _), (y_ahead, y_pitch, _) = [t.data_ptr() for t in packed], x.stride(), y.stride()
    inputs = [x.data_ptr() + size * ahead * step for step in range(steps)]
    outputs = [[y.data_ptr() + size * (y_ahead * step + units * way) for step in range(steps)] for way in range(2)]
    grid, blocks, pitch = (-(-rows // LANES), 1, directions), packed[0].shape[1], units
    before = h, h and h + size * n * units  # of the other direction, where there is one
    for here in range(steps):
        there = steps - 1 - here
        new, last = (outputs[0][here], outputs[1][there]), 0 if there else h_next
        pointers = *weights, inputs[here], inputs[there], *before, c, *new, c_next, last
        go.launch(grid, pointers, (units, columns, x_pitch, pitch, y_pitch, blocks))
        before, c, pitch = new, c_next, y_pitch
    return y


@cache
def plan(dtype: torch.dtype, n: int, size: Sequence[int], block: int, device: int) -> Kernel | None:
    """The kernel for a layer."""
    _, blocks, kept, _ = size
    _, warps, unroll = shape(n, kept, 1, blocks, 1)
    macros = {"KIND": KINDS[dtype], "KEPT": kept, "BLOCK": block, "BATCH": n, "STEP": 1, "EARLY": int(overlaps(device))}
    return kernel("few", device, warps * LANES, **macros, GROUPS=1, WARPS=warps, UNROLL=unroll)
