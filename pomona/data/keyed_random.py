"""Random numbers as a pure function of a key.

numpy promises that the raw stream of a bit generator never changes, so an order drawn here is the
same on every machine, device and version, and nothing has to be saved to draw it again.
"""

from __future__ import annotations

import numpy as np

from pomona.errors import require


def random_words(count: int, *key: int) -> np.ndarray:
    """`count` random 64-bit words that depend on the key alone."""
    require(min(key) >= 0, f"a seed must be 0 or more, got {min(key)}.")
    return np.asarray(np.random.PCG64(list(key)).random_raw(count), dtype=np.uint64)


def uniform(shape: tuple[int, int], *key: int) -> np.ndarray:
    """Numbers in [0, 1), with all the 53 bits a float64 holds."""
    return ((random_words(shape[0] * shape[1], *key) >> np.uint64(11)) * 2.0**-53).reshape(shape)


def permutation(count: int, *key: int) -> np.ndarray:
    """A random order of 0 … count − 1."""
    return random_words(count, *key).argsort(kind="stable")


def stratified_split(labels: np.ndarray, count: int, *key: int) -> tuple[np.ndarray, np.ndarray]:
    """Split the rows in two, the second of `count`, each class in proportion; both sides in file order.

    Every row gets its quantile within its own class, in random order; the lowest quantiles go out.
    """
    order = permutation(len(labels), *key)
    quantile = np.empty(len(labels))
    for label in np.unique(labels):
        members = order[labels[order] == label]
        quantile[members] = (np.arange(len(members)) + 0.5) / len(members)
    ranked = quantile.argsort(kind="stable")
    return np.sort(ranked[count:]), np.sort(ranked[:count])
