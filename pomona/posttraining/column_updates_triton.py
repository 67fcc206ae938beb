"""The columns of a block in SparseGPT, pruned one after the other by one kernel: rows do not depend on each other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 256  # columns whose values a program holds
ROWS = 16  # of a program


def prune_group(weight: Tensor, kept: Tensor, ratios: Tensor, removed: Tensor, group: slice, block: slice) -> None:
    """Prune the columns of a group within a block, and let the columns behind each of them in the block make up for it.

    All tensors are contiguous. `removed` has the columns of the block, and receives what was pruned from those of the
    group.
    """
    rows, columns = weight.shape
    width = triton.next_power_of_2(block.stop - block.start)
    with torch.cuda.device_of(weight):
        _prune_group[(triton.cdiv(rows, ROWS),)](
            weight,
            kept,
            ratios[group.start :],
            removed,
            rows,
            columns,
            block.start,
            block.stop,
            group.start,
            group.stop,
            ROWS,
            width,
        )


@triton.jit(do_not_specialize=["rows", "start", "end", "first", "last"])
def _prune_group(
    weight,
    kept,
    ratios,
    removed,
    rows,
    columns,
    start,
    end,
    first,
    last,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Prune columns `first` to `last` of some rows, and update those up to `end`; `ratios` begin with row `first`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = start + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < end)[None, :]
    places = row.to(tl.int64)[:, None] * columns + column[None, :]
    values = tl.load(weight + places, mask=inside, other=0.0)
    stays = tl.load(kept + places, mask=inside, other=1) != 0
    gone = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    ratio = ratios + column  # of the column that is pruned to those behind it
    for current in range(first, last):
        here = (column == current)[None, :]
        pruned = tl.sum(tl.where(here & (stays == 0), values, 0.0), 1)
        behind = (column >= current) & (column < end)
        changes = tl.load(ratio, mask=behind, other=0.0)
        gone = tl.where(here, pruned[:, None], gone)
        values -= pruned[:, None] * changes[None, :]
        ratio += columns
    tl.store(weight + places, values, mask=inside)
    chosen = inside & ((column >= first) & (column < last))[None, :]
    tl.store(removed + row.to(tl.int64)[:, None] * (end - start) + (column - start)[None, :], gone, mask=chosen)
