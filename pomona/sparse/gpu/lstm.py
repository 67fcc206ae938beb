"""An LSTM for a few vectors: few.cu with the gates behind it, one kernel for a step of a layer in all directions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..balanced import LANES
from .compiled import KINDS, Kernel, kernel
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
    for layer, (go, *packed) in enumerate(zip(made, values, indices, biases, strict=True)):
        mine = slice(layer * directions, (layer + 1) * directions)
        first, cells = (None if t is None else t[mine] for t in (h, c))
        x = sweep(go, packed, x, first, cells, h_next[mine], c_next[mine])
    return x, h_next, c_next


def sweep(
    go: Kernel, packed: Sequence[Tensor], x: Tensor, h: Tensor | None, c: Tensor | None, h_next: Tensor, c_next: Tensor
) -> Tensor:
    """One layer over all steps, from the first on and, if there are two directions, from the last on."""
    x = x if x.stride(2) == 1 else x.contiguous()
    (steps, _, columns), (directions, _, units) = x.shape, h_next.shape
    y = x.new_empty(*x.shape[:2], directions * units)
    inputs, outputs = x.unbind(), [way.unbind() for way in y.split(units, 2)]
    states: Sequence[Tensor | None] = (None, None) if h is None else h.unbind()
    pitch = units
    for step in range(steps):
        here, there = step, steps - 1 - step
        new, last = (outputs[0][here], outputs[-1][there]), h_next if here == steps - 1 else None
        tensors = *packed, inputs[here], inputs[there], states[0], states[-1], c, *new, c_next, last
        sizes = units, columns, x.stride(1), pitch, y.stride(1), packed[0].shape[1]
        go((-(-4 * units // LANES), 1, directions), tensors, sizes)
        states, c, pitch = new, c_next, y.stride(1)
    return y


@cache
def plan(dtype: torch.dtype, n: int, size: Sequence[int], block: int, device: int) -> Kernel | None:
    """The kernel for a layer."""
    _, blocks, kept, _ = size
    _, warps, unroll = shape(n, kept, 1, blocks)
    macros = {"KIND": KINDS[dtype], "KEPT": kept, "BLOCK": block, "BATCH": n, "STEP": 1}
    return kernel("few", device, warps * LANES, **macros, GROUPS=1, WARPS=warps, UNROLL=unroll)
