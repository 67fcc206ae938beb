"""Random numbers that depend on a key of integers alone.

numpy guarantees that the raw stream of a bit generator never changes. So numbers drawn here are the same on every
machine, device and version, and no state has to be saved to draw them again.
"""

from __future__ import annotations

import numpy as np

from pomona.errors import require

FLOAT64_BITS = 53  # of the significand


def random_words(count: int, *key: int, start: int = 0) -> np.ndarray:
    """Return `count` random 64-bit words that depend on the key alone: words `start`, `start` + 1, … of its stream."""
    require(min(key) >= 0, f"a seed must be 0 or more, got {min(key)}.")
    stream = np.random.PCG64(list(key))
    if start:
        stream.advance(start)
    return np.asarray(stream.random_raw(count), dtype=np.uint64)


def uniform(shape: tuple[int, int], *key: int, start: int = 0) -> np.ndarray:
    """Return random numbers in [0, 1) with the full 53 bits of a float64, from row `start` of the key's stream on."""
    words = random_words(shape[0] * shape[1], *key, start=start * shape[1])
    return ((words >> np.uint64(64 - FLOAT64_BITS)) * 2.0**-FLOAT64_BITS).reshape(shape)


def permutation(count: int, *key: int) -> np.ndarray:
    """Return the integers 0 … count − 1 in random order."""
    return random_words(count, *key).argsort(kind="stable")


def stratified_split(labels: np.ndarray, count: int, *key: int) -> tuple[np.ndarray, np.ndarray]:
    """Split the rows in two parts, the second of `count` rows, with each class in proportion.

    Returns the row indices of both parts, sorted. Every row is given its quantile within its class, in random order;
    the rows with the lowest quantiles form the second part.
    """
    order = permutation(len(labels), *key)
    quantile = np.empty(len(labels))
    for label in np.unique(labels):
        members = order[labels[order] == label]
        quantile[members] = (np.arange(len(members)) + 0.5) / len(members)
    ranked = quantile.argsort(kind="stable")
    return np.sort(ranked[count:]), np.sort(ranked[:count])
