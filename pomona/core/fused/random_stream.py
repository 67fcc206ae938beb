"""Counter-based random weights: every draw is a function of (seed, tensor name, position, re-draw number).

Version 1. Philox4x32-10 (Salmon et al., 2011), with

    key      the seed's low and high 32 bits
    counter  the position in the tensor, row-major; the number of the re-draw, 0 for the first weights;
             the low and high 32 bits of BLAKE2b-64 of the tensor's name in UTF-8, read little-endian

gives four 32-bit words for every weight and every re-draw of it:

    word 0   the weight. "ku": u · √(6 / fan_in).  "sc": ±√(2 / fan_in), − where the highest bit is set
    word 1   the re-draw test: the weight is drawn again where the highest 24 bits are below round(rate · 2²⁴)
    word 2   the first score: u · √(6 / fan_in)
    word 3   unused

u is uniform in (−1, 1): (2k + 1 − 2²⁴) / 2²⁴ with k the word's highest 24 bits. The bound is rounded to
float32 and so is its product with u, which is the only rounding; other dtypes are cast from that. Everything before
is integer arithmetic, so all machines, and NumPy, torch and Triton, agree to the last bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import require, unknown_name_error

VERSION = 1
ROUNDS = 10
CPU_CHUNK = 1 << 15  # positions drawn at a time: their words stay in the second-level cache
GPU_CHUNK = 1 << 22  # positions drawn at a time: bounds the memory of their words
LOW_WORD = 0xFFFF_FFFF
DRAW_BITS = 24  # random bits in a draw: as many as float32 holds exactly

DISTRIBUTIONS = {
    "sc": 2.0,  # signed constant: ±√(2 / fan_in)
    "ku": 6.0,  # Kaiming uniform: within ±√(6 / fan_in)
}


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Return Philox4x32-10 of four counter words, held in 64-bit integers of NumPy, torch or Python."""
    a, b, c, d = counter
    k, m = key
    for _ in range(ROUNDS):
        p, q = a * 0xD251_1F53, c * 0xCD9E_8D57  # an overflow into the sign bit is masked away below
        a, b, c, d = (q >> 32 & LOW_WORD) ^ b ^ k, q & LOW_WORD, (p >> 32 & LOW_WORD) ^ d ^ m, p & LOW_WORD
        k, m = k + 0x9E37_79B9 & LOW_WORD, m + 0xBB67_AE85 & LOW_WORD
    return a, b, c, d


def name_words(name: str) -> tuple[int, int]:
    """Return the two words by which a tensor's name enters the counter."""
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return number & LOW_WORD, number >> 32


def uniform(word: Tensor, bound: float) -> Tensor:
    """Return uniform values within ±bound from the words' highest bits."""
    odd = (word >> 32 - DRAW_BITS) * 2 + 1 - 2**DRAW_BITS
    return (odd.to(torch.float32) * 2.0**-DRAW_BITS) * bound


def round_to_float32(value: float) -> float:
    """Return the float32 nearest to a value."""
    return float(np.float32(value))


@dataclass(frozen=True)
class RandomStream:
    """The source of a network's random weights and initial scores."""

    seed: int
    distribution: str

    def __post_init__(self) -> None:
        if self.distribution not in DISTRIBUTIONS:
            raise unknown_name_error("distribution", self.distribution, DISTRIBUTIONS)
        require(0 <= self.seed < 2**63, f"seed must be in [0, 2⁶³), got {self.seed}.")

    @property
    def key(self) -> tuple[int, int]:
        """The low and high 32 bits of the seed."""
        return self.seed & LOW_WORD, self.seed >> 32

    def bound(self, fan_in: int) -> float:
        """Return the magnitude of signed constants, or the largest of uniform weights."""
        return round_to_float32(math.sqrt(DISTRIBUTIONS[self.distribution] / fan_in))

    def words(self, name: str, position: Tensor, redraw: int | Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the four words of some positions, in chunks that fit the cache."""
        require(
            position.numel() < 2**32,
            f"{name} has {position.numel()} weights, and a tensor can have at most 2³² random ones: split the layer.",
        )
        size = CPU_CHUNK if position.device.type == "cpu" else GPU_CHUNK
        for at in range(0, position.numel(), size):
            again = redraw[at : at + size].long() if isinstance(redraw, Tensor) else redraw
            yield philox((position[at : at + size], again, *name_words(name)), self.key)

    def value(self, word: Tensor, fan_in: int) -> Tensor:
        """Return the float32 weight that a word stands for."""
        bound = self.bound(fan_in)
        return uniform(word, bound) if self.distribution == "ku" else torch.where(word >> 31 == 0, bound, -bound)

    def weights_at(self, name: str, fan_in: int, position: Tensor, redraw: int | Tensor = 0) -> Tensor:
        """Return the weights at some positions, each from its last draw."""
        drawn = [self.value(words[0], fan_in) for words in self.words(name, position, redraw)]
        return torch.cat(drawn) if drawn else torch.empty(0, device=position.device)

    def weights(
        self, name: str, fan_in: int, like: Tensor, redraw: Tensor | None = None, at: Tensor | None = None
    ) -> Tensor:
        """Return all weights of a tensor; `redraw` has the number of each weight's last re-draw.

        With `at` they are those of a part of the tensor, whose positions in the whole are given.
        """
        number = 0 if redraw is None else redraw.reshape(-1)
        place = positions(like) if at is None else at
        return self.weights_at(name, fan_in, place, number).view(like.shape).to(like.dtype)

    def scores(self, name: str, fan_in: int, like: Tensor, at: Tensor | None = None) -> Tensor:
        """Return the scores that training begins with, of a tensor or of a part of it as for `weights`."""
        bound = round_to_float32(math.sqrt(6 / fan_in))
        place = positions(like) if at is None else at
        drawn = [uniform(words[2], bound) for words in self.words(name, place, 0)]
        return (torch.cat(drawn) if drawn else torch.empty(0, device=like.device)).view(like.shape).to(like.dtype)

    def redraw(
        self,
        name: str,
        fan_in: int,
        weight: Tensor,
        draw_number: Tensor,
        off: Tensor,
        number: int,
        limit: int,
        at: Tensor | None = None,
    ) -> None:
        """Draw weights again in place: those that are `off` and whose random bits lie below `limit`.

        The `number` of the re-draw is written to `draw_number` for each of them. Of a part of a tensor, its positions
        are given as `at`.
        """
        if not weight.numel():
            return
        fresh, below = [], []
        for words in self.words(name, positions(weight) if at is None else at, number):
            fresh.append(self.value(words[0], fan_in))
            below.append(words[1] >> 32 - DRAW_BITS < limit)
        chosen = torch.cat(below).view(off.shape) & off
        weight.copy_(torch.where(chosen, torch.cat(fresh).view(weight.shape).to(weight.dtype), weight))
        draw_number.masked_fill_(chosen, number)


def positions(like: Tensor) -> Tensor:
    """Return the row-major positions of a tensor's entries, whatever its memory format."""
    return torch.arange(like.numel(), device=like.device)


def redraw_limit(rate: float) -> int:
    """Return the bound below which the highest bits of a re-draw test must lie, for a probability `rate`."""
    return round(rate * 2**DRAW_BITS)
