"""ChaCha20 (Bernstein, 2008; RFC 8439) as a stream of random words, on any device.

The stream of a key is addressed by a nonce and a position, so any part of it can be drawn again. The key has 256 bits.
The words are the same on every device and with or without the kernels in C and Triton.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from ..native import private as native

KEY_BYTES = 32
BLOCK_WORDS = 16  # of 32 bits
MAX_BLOCKS = 1 << 32  # of one nonce: the block counter has 32 bits
CONSTANTS = b"expand 32-byte k"
CHUNK_BLOCKS = 1 << 13  # that PyTorch computes at a time on a CPU, so that they stay in the cache


def chacha20_words(key: bytes, nonce: bytes, count: int, device: torch.device | str = "cpu", first: int = 0) -> Tensor:
    """Return the first `count` words of 64 bits as int64, from block `first` of the stream of a key and a nonce."""
    blocks = -(-count * 2 // BLOCK_WORDS)
    assert len(key) == KEY_BYTES and len(nonce) == 12 and first + blocks <= MAX_BLOCKS  # noqa: PT018
    contents = bytearray(CONSTANTS + key + first.to_bytes(4, "little") + nonce)
    state = torch.frombuffer(contents, dtype=torch.int32).to(device)
    out = torch.empty((blocks, BLOCK_WORDS), dtype=torch.int32, device=device)
    kernels = triton_kernels() if out.is_cuda else None
    if kernels is not None:
        kernels.fill_chacha20(state, out)
    elif not native.fill_chacha20(state, out):
        step = CHUNK_BLOCKS if out.device.type == "cpu" else max(blocks, 1)
        for at in range(0, blocks, step):
            fill_blocks(state, out[at : at + step], at)
    return out.view(torch.int64).flatten()[:count]  # little-endian, as RFC 8439 writes the words


def fill_blocks(state: Tensor, out: Tensor, first: int) -> None:
    """Write the blocks of a state from its counter plus `first` on into `out`, of shape (blocks, 16), with PyTorch."""
    start = state[:, None].repeat(1, len(out))
    start[12] += torch.arange(first, first + len(out), device=out.device).to(torch.int32)
    a, b, c, d = start.clone().split(4)
    for half_round in range(20):
        if half_round:  # columns become diagonals, and diagonals columns
            turn = -1 if half_round % 2 else 1
            b, c, d = b.roll(turn, 0), c.roll(2, 0), d.roll(-turn, 0)
        a, b, c, d = quarter_rounds(a, b, c, d)
    b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(-1, 0)
    out.copy_((torch.cat([a, b, c, d]) + start).T)


def quarter_rounds(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the result of four quarter rounds, one for each row of the four tensors."""
    for left, right in ((16, 12), (8, 7)):
        a = a + b
        d = rotate(d ^ a, left)
        c = c + d
        b = rotate(b ^ c, right)
    return a, b, c, d


def rotate(words: Tensor, count: int) -> Tensor:
    """Return 32-bit words rotated to the left; a shift of int32 to the right repeats the sign, so it is masked."""
    return (words << count) | ((words >> (32 - count)) & ((1 << count) - 1))


@cache
def triton_kernels() -> ModuleType | None:
    """Return the module of the Triton kernel, or None where Triton is not installed."""
    try:
        from . import chacha_triton
    except ImportError:
        return None
    return chacha_triton
