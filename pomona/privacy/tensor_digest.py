"""Digests of tensors by which a step is recognised when it is repeated, at the speed of the memory and on any device.

SHA-256 would need all bits on the host, which delays the next step of a GPU. So a keyed hash shortens them: of each
block of 1024 words of 32 bits, wᵢ, the four sums Σ rᵢ wᵢ modulo 2⁶⁴, where the rᵢ are random numbers of 32 bits from
the secret key of the run. Two different blocks have the same sum for at most one of the 2³² values of the rᵢ of a
word in which they differ, whatever the others are, so all four agree with a probability of at most 2⁻¹²⁸. SHA-256 of
the key and the sums is the digest. It is the same on every device. Digests with different keys cannot be compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..native import private as native
from .chacha import chacha20_words

BLOCK_WORDS, SUMS = 1024, 4
WORD_BYTES = 4
BLOCK_BYTES = WORD_BYTES * BLOCK_WORDS
CHUNK_BLOCKS = 1 << 10  # that PyTorch sums at a time
DIGEST_LENGTH = 32  # hexadecimal digits: 128 bits


def digest_tensors(tensors: Iterable[Tensor], key: bytes) -> str:
    """Return a digest of the shapes, dtypes and bits of tensors, with a key of 32 bytes that nothing else uses."""
    state, multipliers = hashlib.sha256(key), {}
    for tensor in tensors:
        device = tensor.device
        if device not in multipliers:
            multipliers[device] = make_multipliers(key, device)
        state.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        for words in split_blocks(tensor.detach()):
            state.update(sum_blocks(words, multipliers[device]).cpu().numpy().tobytes())
    return state.hexdigest()[:DIGEST_LENGTH]


def make_multipliers(key: bytes, device: torch.device) -> Tensor:
    """Return the random multipliers of a key as the bits of int32 (4, 1024)."""
    words = chacha20_words(key, bytes(12), SUMS * BLOCK_WORDS // 2, device)
    return words.view(torch.int32).view(SUMS, BLOCK_WORDS)


def split_blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the bits of a tensor as int32 (blocks, 1024): its whole blocks, and the rest with zeros behind it."""
    data = tensor.contiguous().flatten().view(torch.uint8)
    data = data.clone() if data.storage_offset() % WORD_BYTES else data  # as a part of a buffer of 16-bit numbers
    whole = len(data) - len(data) % BLOCK_BYTES
    for part in (data[:whole], data[whole:]):
        if len(part):
            padded = torch.nn.functional.pad(part, (0, -len(part) % BLOCK_BYTES)) if len(part) < BLOCK_BYTES else part
            yield padded.view(torch.int32).view(-1, BLOCK_WORDS)


def sum_blocks(words: Tensor, multipliers: Tensor) -> Tensor:
    """Return the sums of the words of each block times the multipliers, modulo 2⁶⁴, as int64 (blocks, 4)."""
    sums = torch.empty((len(words), SUMS), dtype=torch.int64, device=words.device)
    if native.sum_blocks(words, multipliers, sums):
        return sums
    factors = without_sign(multipliers)
    for at in range(0, len(words), CHUNK_BLOCKS):
        chunk = without_sign(words[at : at + CHUNK_BLOCKS])
        for k in range(SUMS):
            torch.sum(chunk * factors[k], dim=1, out=sums[at : at + CHUNK_BLOCKS, k])
    return sums


def without_sign(words: Tensor) -> Tensor:
    """Return the bits of int32 words as numbers from 0 to 2³² − 1 in int64."""
    return words.long() & 0xFFFFFFFF
