"""The stream that random weights come from: a draw is a function of (seed, tensor, position, re-draw).

Version 1. Philox4x32-10 (Salmon et al., 2011), with

    key      the seed's low and high 32 bits
    counter  the position in the tensor, row-major; the number of the re-draw, 0 for the first weights;
             the low and high 32 bits of BLAKE2b-64 of the tensor's name in UTF-8, read little-endian

gives four 32-bit words for every weight and every re-draw of it:

    word 0   the weight. "ku": u · √(6 / fan_in).  "sc": ±√(2 / fan_in), − where the highest bit is set
    word 1   the coin: the weight is drawn anew where the highest 24 bits are below round(rate · 2²⁴)
    word 2   the first score: u · √(6 / fan_in)
    word 3   unused

u is uniform in (−1, 1): (2k + 1 − 2²⁴) / 2²⁴ with k the word's highest 24 bits. The bound is rounded to
float32 and so is its product with u, which is the only rounding; other types are cast from that. Only integer
arithmetic stands before it, so all machines, and NumPy, torch and Triton, agree to the last bit.
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
LOW = 0xFFFF_FFFF
GRAIN = 24  # bits of a draw

DISTRIBUTIONS = {
    "sc": 2.0,  # signed constant: ±√(2 / fan_in)
    "ku": 6.0,  # Kaiming uniform: within ±√(6 / fan_in)
}


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10 on 32-bit words held in 64-bit integers: of NumPy, of torch, or Python's own."""
    a, b, c, d = counter
    k, m = key
    for _ in range(ROUNDS):
        p, q = a * 0xD251_1F53, c * 0xCD9E_8D57  # a sign bit that overflows is masked away again
        a, b, c, d = (q >> 32 & LOW) ^ b ^ k, q & LOW, (p >> 32 & LOW) ^ d ^ m, p & LOW
        k, m = k + 0x9E37_79B9 & LOW, m + 0xBB67_AE85 & LOW
    return a, b, c, d


def label(name: str) -> tuple[int, int]:
    """The two words by which a tensor's name enters the counter."""
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return number & LOW, number >> 32


def uniform(word: Tensor, bound: float) -> Tensor:
    """Uniform within ±bound, from a word's highest bits."""
    odd = (word >> 32 - GRAIN) * 2 + 1 - 2**GRAIN
    return (odd.to(torch.float32) * 2.0**-GRAIN) * bound


def single(value: float) -> float:
    """The nearest float32."""
    return float(np.float32(value))


@dataclass(frozen=True)
class Stream:
    """Where the random weights of a network come from."""

    seed: int
    distribution: str

    def __post_init__(self) -> None:
        if self.distribution not in DISTRIBUTIONS:
            raise unknown_name_error("distribution", self.distribution, DISTRIBUTIONS)
        require(0 <= self.seed < 2**63, f"seed must be in [0, 2⁶³), got {self.seed}.")

    @property
    def key(self) -> tuple[int, int]:
        return self.seed & LOW, self.seed >> 32

    def bound(self, fan_in: int) -> float:
        """The magnitude of signed constants, or the largest of uniform weights."""
        return single(math.sqrt(DISTRIBUTIONS[self.distribution] / fan_in))

    def words(self, name: str, position: Tensor, redraw: int | Tensor) -> Iterator[tuple[Tensor, ...]]:
        """The four words of some positions, for as many at a time as the cache holds."""
        require(position.numel() < 2**32, f"{name} has {position.numel()} weights: a stream has at most 2³².")
        size = 1 << 15 if position.device.type == "cpu" else 1 << 22
        for at in range(0, position.numel(), size):
            again = redraw[at : at + size].long() if isinstance(redraw, Tensor) else redraw
            yield philox((position[at : at + size], again, *label(name)), self.key)

    def value(self, word: Tensor, fan_in: int) -> Tensor:
        """The weight that a word stands for, in float32."""
        bound = self.bound(fan_in)
        return uniform(word, bound) if self.distribution == "ku" else torch.where(word >> 31 == 0, bound, -bound)

    def at(self, name: str, fan_in: int, position: Tensor, redraw: int | Tensor = 0) -> Tensor:
        """The weights at some positions, each as it was drawn the last time."""
        drawn = [self.value(words[0], fan_in) for words in self.words(name, position, redraw)]
        return torch.cat(drawn) if drawn else torch.empty(0, device=position.device)

    def weights(self, name: str, fan_in: int, like: Tensor, redraw: Tensor | None = None) -> Tensor:
        """All weights of a tensor; `redraw` has the number of each one's last re-draw."""
        number = 0 if redraw is None else redraw.reshape(-1)
        return self.at(name, fan_in, positions(like), number).view(like.shape).to(like.dtype)

    def scores(self, name: str, fan_in: int, like: Tensor) -> Tensor:
        """The scores that training begins with."""
        bound = single(math.sqrt(6 / fan_in))
        drawn = torch.cat([uniform(words[2], bound) for words in self.words(name, positions(like), 0)])
        return drawn.view(like.shape).to(like.dtype)

    def redraw(
        self, name: str, fan_in: int, weight: Tensor, drawn: Tensor, off: Tensor, number: int, rate: int
    ) -> None:
        """Draw weights anew in place, each one that is `off` with its coin below `rate`, and note the number."""
        fresh, coins = [], []
        for words in self.words(name, positions(weight), number):
            fresh.append(self.value(words[0], fan_in))
            coins.append(words[1] >> 32 - GRAIN < rate)
        chosen = torch.cat(coins).view(off.shape) & off
        weight.copy_(torch.where(chosen, torch.cat(fresh).view(weight.shape).to(weight.dtype), weight))
        drawn.masked_fill_(chosen, number)


def positions(like: Tensor) -> Tensor:
    """Row-major, whatever the memory format is."""
    return torch.arange(like.numel(), device=like.device)


def threshold(rate: float) -> int:
    """What a coin's highest bits must lie below."""
    return round(rate * 2**GRAIN)
