"""The three moves of the engine on CUDA, each one launch for all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # weights a program moves

MOVES = {
    "enter": 0,  # parameter ← latent
    "leave": 1,  # latent ← parameter, then parameter ← m ⊙ parameter
    "project": 2,  # parameter ← m ⊙ latent
}

TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def table(addresses: Sequence[int], sizes: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """For each program: the address its weights start at, where they lie in the buffers, and how many they are."""
    rows, offset = [], 0
    for slot, size in enumerate(sizes):
        rows += [(slot, start, offset + start, min(BLOCK, size - start)) for start in range(0, size, BLOCK)]
        offset += size
    columns = torch.tensor(rows, dtype=torch.int64).t().contiguous().to(device)
    return torch.tensor(addresses, dtype=torch.int64).to(device), *columns


def move(name: str, table: tuple[Tensor, ...], latent: Tensor | None, mask: Tensor, like: Tensor) -> None:
    """Run one of MOVES. Where there is no latent, the parameter is its own."""
    addresses, slot, start, offset, size = table
    own = latent is None
    with torch.cuda.device_of(mask):
        _move[(len(slot),)](
            addresses,
            slot,
            start,
            offset,
            size,
            mask if latent is None else latent,
            mask,
            MOVE=MOVES["project" if own else name],
            OWN=own,
            TYPE=TYPES[like.dtype],
            BLOCK=BLOCK,
        )


@triton.jit
def _move(
    addresses,
    slots,
    starts,
    offsets,
    sizes,
    latent,
    mask,
    MOVE: tl.constexpr,
    OWN: tl.constexpr,
    TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    weights = tl.load(addresses + tl.load(slots + program)).to(tl.pointer_type(TYPE)) + tl.load(starts + program)
    offset = tl.load(offsets + program)
    index = tl.arange(0, BLOCK)
    inside = index < tl.load(sizes + program)
    if MOVE == 0:
        tl.store(weights + index, tl.load(latent + offset + index, mask=inside), mask=inside)
    else:
        if OWN or MOVE == 1:
            value = tl.load(weights + index, mask=inside)
        else:
            value = tl.load(latent + offset + index, mask=inside)
        if MOVE == 1:
            tl.store(latent + offset + index, value, mask=inside)
        kept = tl.load(mask + offset + index, mask=inside, other=0)
        tl.store(weights + index, tl.where(kept != 0, value, 0.0), mask=inside)
