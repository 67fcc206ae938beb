"""Random numbers for the augmentation of rows, from the key of a private step.

Augmentations draw from the global generators of torch, NumPy and `random`. If their seed is known and rows draw one
after another, a row that is missing changes the numbers of all rows behind it, which gives it away. Here the numbers of
a row are a function of the key, the step and the number of the row: they do not depend on other rows or on worker
processes, and a resumed run draws them again. A batch that is collated or augmented as a whole gets a secret state.
"""

# ruff: noqa: NPY002 -- augmentation of users draws from the global generators

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import require
from .chacha import chacha20_words

TWISTER_BYTES, TWISTER_START, TWISTER_WORDS = 5056, 3, 624  # of a generator's state: in all, before and of its words
STATE_WORDS = 3 * TWISTER_WORDS // 2 + 1  # of 64 bits, for three Mersenne twisters and the seed of a GPU
NONCE_BYTES, STEP_BYTES = 12, 8

Place = tuple[int, int]  # the step and the number of a row


def twister_state(words: Tensor) -> Tensor:
    """Return a state of torch's generator for CPUs, a Mersenne twister, from 312 int64 words, in bytes."""
    state = torch.Generator().manual_seed(0).get_state()
    require(state.numel() == TWISTER_BYTES, "this version of torch has another generator: use an older one.")
    state.view(torch.int64)[TWISTER_START : TWISTER_START + TWISTER_WORDS] = unsigned_halves(words)
    return state


def unsigned_halves(words: Tensor) -> Tensor:
    """Return int64 words in unsigned halves of 32 bits."""
    return words.view(torch.int32).long().bitwise_and_((1 << 32) - 1)


@contextmanager
def restored_generators() -> Iterator[None]:
    """Restore the global generators of torch, NumPy and `random` after the block."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def seeded_generators(words: Tensor) -> Iterator[None]:
    """Set the whole state of the global generators from `STATE_WORDS` words within the block."""
    with restored_generators():
        torch_words, numpy_words, python_words = words[:-1].split(TWISTER_WORDS // 2)
        torch.default_generator.set_state(twister_state(torch_words))
        keys = unsigned_halves(numpy_words).numpy().astype(np.uint32)
        np.random.set_state(("MT19937", keys, TWISTER_WORDS, 0, 0.0))
        random.setstate((3, (*unsigned_halves(python_words).tolist(), TWISTER_WORDS), None))
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(int(words[-1]) & ((1 << 63) - 1))
        yield


def seed_row(key: bytes, place: Place) -> None:
    """Seed the global generators for one row of one step.

    torch uses 32 bits of a seed on a CPU. That is enough here: a row cannot change the numbers of another one.
    """
    digest = hashlib.sha256(key + b"".join(number.to_bytes(STEP_BYTES, "little") for number in place)).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    np.random.seed(np.frombuffer(digest, np.uint32))
    random.seed(digest)


class SeededRows(Dataset[Any]):
    """A data set whose rows draw from generators that are seeded for each of them; an index is a `Place`."""

    def __init__(self, dataset: Dataset[Any], key: bytes) -> None:
        self.dataset, self.key = dataset, key

    def __getitems__(self, places: Sequence[Place]) -> tuple[int, list[Any]]:
        """Return the step and the examples of a batch."""
        examples = []
        with restored_generators():
            for place in places:
                seed_row(self.key, place)
                examples.append(self.dataset[place[1]])
        return places[0][0], examples


@dataclass(frozen=True)
class SeededCollate:
    """A function that collates a batch of `SeededRows`, with random numbers of the step and the process."""

    collate: Callable[[list[Any]], Any]
    key: bytes
    rank: int

    def __call__(self, batch: tuple[int, list[Any]]) -> Any:
        """Return the collated examples."""
        step, examples = batch
        nonce = self.rank.to_bytes(NONCE_BYTES - STEP_BYTES, "little") + step.to_bytes(STEP_BYTES, "little")
        with seeded_generators(chacha20_words(self.key, nonce, STATE_WORDS)):
            return self.collate(examples)
