"""The random numbers of private training: the sampled rows, the index sets and the noise.

Privacy is only as good as this randomness. All of it is ChaCha20 of one 256-bit key, which the operating system's
cryptographic generator draws. Every number has an address: its purpose, the step, the call within the step and its
position. A run that continues from a state therefore draws the same numbers again. Whoever has the key can subtract the
noise, so it belongs into checkpoints only. A seed is for experiments and not private: it decides the key.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import PomonaError, require
from .chacha import KEY_BYTES, chacha20_words
from .discrete_gaussian import NoiseTable, sample_discrete_gaussian
from .seeded_rows import STATE_WORDS, TWISTER_WORDS, seeded_generators, twister_state

SEED_PREFIX = b"pomona, not private: "
CALL_BITS = 24  # of the nonce; the purpose has 8 and the step 64
ROW_BITS = 62  # of the integer that decides whether a row is drawn


class Purpose(IntEnum):
    """What random words are used for; each purpose has a stream of its own."""

    ROWS = 0
    SWAP_COUNTS = 1
    SWAP_KEYS = 2
    NOISE = 3
    REFINEMENT = 4  # further bits of a number whose first ones did not decide a comparison
    AUGMENTATION = 5
    MODEL = 6  # the state of torch's generator, from which dropout draws


class Source:
    """Random numbers on a device from a key of the operating system, or from a seed, which is not private.

    A new step begins with each Poisson sample. The numbers are the same on every device.
    """

    def __init__(self, device: torch.device | str = "cpu", *, seed: int | None = None) -> None:
        self.device, self.secure = torch.device(device), seed is None
        self.key = os.urandom(KEY_BYTES) if seed is None else hashlib.sha256(SEED_PREFIX + b"%d" % seed).digest()
        self.step = 0
        self.calls: Counter[Purpose] = Counter()  # in this step

    def __repr__(self) -> str:
        return f"Source({str(self.device)!r}, step={self.step}, secure={self.secure})"  # without the key

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copies and pickles of the key."""
        raise PomonaError(
            "a random source cannot be copied or pickled, as its copy would draw the same noise: make another source, "
            "and use state_dict() to resume this one."
        )

    def words(self, purpose: Purpose, count: int, device: torch.device | str | None = None) -> Tensor:
        """Return int64 words of 64 random bits; each call within a step returns others."""
        call = self.calls[purpose]
        require(call < 1 << CALL_BITS, f"a step draws at most {1 << CALL_BITS} times for one purpose: draw rows anew.")
        self.calls[purpose] += 1
        nonce = bytes([purpose]) + call.to_bytes(CALL_BITS // 8, "little") + self.step.to_bytes(8, "little")
        return chacha20_words(self.key, nonce, count, self.device if device is None else device)

    def bits(self, *shape: int, purpose: Purpose = Purpose.SWAP_KEYS) -> Tensor:
        """Return int64 numbers of 63 random bits each, none negative."""
        return self.words(purpose, math.prod(shape)).bitwise_and_((1 << 63) - 1).view(shape)

    def uniform(self, *shape: int, purpose: Purpose = Purpose.AUGMENTATION) -> Tensor:
        """Return uniform float64 numbers in [0, 1), multiples of 2⁻⁵³."""
        return (self.bits(*shape, purpose=purpose) >> 10).double() * 2.0**-53

    def integer(self, bits: int) -> int:
        """Return a random integer of so many bits, a multiple of 64, to decide a comparison that fewer did not."""
        words = self.words(Purpose.REFINEMENT, bits // 64, "cpu")
        return int.from_bytes(words.numpy().tobytes(), "little")

    def discrete_gaussian(self, count: int, variance: int) -> Tensor:
        """Return int64 numbers x, each with a probability proportional to exp(−x² / (2 variance))."""
        draw = partial(self.words, Purpose.NOISE)
        return sample_discrete_gaussian(count, NoiseTable.of(variance), draw, self.integer)

    @contextmanager
    def seeded_torch(self, rank: int = 0) -> Iterator[None]:
        """Seed torch's generators from this source within the block: a model's dropout draws from them.

        Were its masks known, those of all other rows would tell whether a row is there, as they move up by one. A
        seed has 32 bits on a CPU, which can all be tried, so the whole state of that generator is drawn. On a GPU it
        has 63. Processes, by their `rank`, draw other numbers: if rows of two processes shared some, which rows do
        would depend on what other rows there are.
        """
        seed = (int(self.words(Purpose.REFINEMENT, rank + 1, "cpu")[rank]) >> 1) & ((1 << 63) - 1)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.default_generator.set_state(self.twister_state(rank))
            if self.device.type == "cuda":
                with torch.cuda.device(self.device):
                    torch.cuda.manual_seed(seed)
            yield

    def twister_state(self, rank: int = 0) -> Tensor:
        """Return a random state of torch's generator for CPUs, in the bytes that it takes."""
        words = self.words(Purpose.MODEL, (rank + 1) * TWISTER_WORDS // 2, "cpu")
        return twister_state(words[-TWISTER_WORDS // 2 :])

    def seeded_generators(self, rank: int = 0) -> AbstractContextManager[None]:
        """Seed the global generators of torch, NumPy and `random` from this source within a block, for augmentation.

        Each block within a step draws other numbers, and so does each process, by its `rank`.
        """
        return seeded_generators(self.words(Purpose.AUGMENTATION, (rank + 1) * STATE_WORDS, "cpu")[-STATE_WORDS:])

    def row_key(self) -> bytes:
        """Return the key of the random numbers of rows, which worker processes may know: it gives away no others."""
        return hashlib.sha256(b"pomona rows " + self.key).digest()

    def digest_key(self) -> bytes:
        """Return the key of the digests of this run's weights and sums."""
        return hashlib.sha256(b"pomona digests " + self.key).digest()

    def poisson(self, rows: int, rate: float) -> Tensor:
        """Begin a new step and return the indices of its Poisson sample.

        It holds each row independently with probability `rate`, rounded down to a multiple of 2⁻⁶².
        """
        self.step += 1
        self.calls.clear()
        self.calls[Purpose.ROWS] = 1
        return self.sample_rows(self.step, rows, rate)

    def sample_rows(self, step: int, rows: int, rate: float) -> Tensor:
        """Return the Poisson sample of any step, which is a function of the key and the step."""
        nonce = bytes([Purpose.ROWS]) + bytes(CALL_BITS // 8) + step.to_bytes(8, "little")
        words = chacha20_words(self.key, nonce, rows, self.device).bitwise_and_((1 << ROW_BITS) - 1)
        return (words < int(rate * (1 << ROW_BITS))).nonzero().squeeze(1)

    def state_dict(self, pending: bool = False, with_key: bool = True) -> dict[str, Any]:
        """Return the key and the step, which must be kept secret: they give away all numbers, past and future.

        If the sample of the last step is `pending`, the state is that before it, so that it is drawn again.
        """
        return {"key": self.key.hex() if with_key else None, "step": self.step - pending, "secure": self.secure}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, whose numbers are drawn again; raise PomonaError if it is of the other kind."""
        require(
            state.get("secure") == self.secure,
            "a secure run cannot continue a seeded one, nor a seeded run a secure one: leave the seed as it was.",
        )
        if state["key"] is not None:
            self.key = bytes.fromhex(state["key"])
        self.step = int(state["step"])
        self.calls.clear()
