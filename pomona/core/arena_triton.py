"""The moves of the engine on CUDA, each one launch for all layers, and the re-draw of random weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..patterns.segments_triton import Selection
from .stream import GRAIN, ROUNDS, Stream

__all__ = ["Selection", "move", "redraw", "table"]

BLOCK = 4096  # weights a program moves

MOVES = {
    "enter": 0,  # parameter ← latent
    "leave": 1,  # latent ← parameter, then parameter ← m ⊙ parameter
    "project": 2,  # parameter ← m ⊙ latent
    "take": 3,  # latent ← parameter
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
        if OWN or MOVE != 2:
            value = tl.load(weights + index, mask=inside)
        else:
            value = tl.load(latent + offset + index, mask=inside)
        if MOVE == 1 or MOVE == 3:
            tl.store(latent + offset + index, value, mask=inside)
        if MOVE != 3:
            kept = tl.load(mask + offset + index, mask=inside, other=0)
            tl.store(weights + index, tl.where(kept != 0, value, 0.0), mask=inside)


def redraw(
    table: tuple[Tensor, ...],
    draws: tuple[Tensor, ...],
    mask: Tensor,
    weight: Tensor,
    drawn: Tensor,
    stream: Stream,
    number: int,
    coin: int,
) -> None:
    """Draw weights off the mask anew as `Stream.redraw` does, bit for bit.

    `draws` has for each slot the stream's key, the name's label, how positions lie in memory, and the bound.
    """
    _, slot, start, offset, size = table
    with torch.cuda.device_of(mask):
        _redraw[(len(slot),)](
            slot,
            start,
            offset,
            size,
            *draws,
            mask,
            weight,
            drawn,
            number,
            coin,
            UNIFORM=stream.distribution == "ku",
            ROUNDS=ROUNDS,
            GRAIN=GRAIN,
            BLOCK=BLOCK,
        )


@triton.jit(do_not_specialize=["number", "coin"])
def _redraw(
    slots,
    starts,
    offsets,
    sizes,
    key_low,
    key_high,
    label_low,
    label_high,
    channels,
    spatial,
    bounds,
    mask,
    weight,
    drawn,
    number,
    coin,
    UNIFORM: tl.constexpr,
    ROUNDS: tl.constexpr,
    GRAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    slot = tl.load(slots + program)
    index = tl.arange(0, BLOCK)
    inside = index < tl.load(sizes + program)
    at = tl.load(offsets + program) + index

    # Memory counts (outer, spatial, channels), positions (outer, channels, spatial).
    wide, deep = tl.load(channels + slot), tl.load(spatial + slot)
    place = tl.load(starts + program) + index
    rest = place % (wide * deep)
    position = place - rest + rest % wide * deep + rest // wide

    # Philox4x32-10, as in `stream`.
    a = position.to(tl.uint64)
    b = a * 0 + number.to(tl.uint64)
    c = a * 0 + tl.load(label_low + slot).to(tl.uint64)
    d = a * 0 + tl.load(label_high + slot).to(tl.uint64)
    k, m = tl.load(key_low + slot).to(tl.uint64), tl.load(key_high + slot).to(tl.uint64)
    for _ in tl.static_range(ROUNDS):
        p = a * 0xD2511F53
        q = c * 0xCD9E8D57
        a = (q >> 32) ^ b ^ k
        c = (p >> 32) ^ d ^ m
        b = q & 0xFFFFFFFF
        d = p & 0xFFFFFFFF
        k = (k + 0x9E3779B9) & 0xFFFFFFFF
        m = (m + 0xBB67AE85) & 0xFFFFFFFF

    bound = tl.load(bounds + slot)
    if UNIFORM:
        odd = (a >> (32 - GRAIN)).to(tl.int32) * 2 + 1 - (1 << GRAIN)
        value = odd.to(tl.float32) * (1.0 / (1 << GRAIN)) * bound
    else:
        value = tl.where((a >> 31) == 0, bound, -bound)
    off = tl.load(mask + at, mask=inside, other=1) == 0
    chosen = inside & off & ((b >> (32 - GRAIN)).to(tl.int32) < coin)
    tl.store(weight + at, value, mask=chosen)
    tl.store(drawn + at, number, mask=chosen)
