"""Gap coding: the nonzeros of an array and the distances between them, one byte each.

A runtime restores the array when it loads a file by a running sum and a scatter. A distance above 255 goes over zeros
that are stored in between.
"""

from __future__ import annotations

import numpy as np

MAX_GAP = 255
MIN_SIZE = 256  # elements below which the operators that restore an array take as many bytes as it saves


def encode_gaps(array: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return values and gaps of an array in row-major order, or None where they are not smaller than the array.

    The position of value i is the sum of the gaps up to i, less 1.
    """
    if array.size < MIN_SIZE:
        return None
    flat = np.ascontiguousarray(array).reshape(-1)
    positions = np.flatnonzero(flat)
    distances = np.diff(positions, prepend=-1)
    fillers = (distances - 1) // MAX_GAP  # zeros stored on the way to each nonzero
    if not positions.size or (positions.size + fillers.sum()) * (flat.itemsize + 1) >= flat.nbytes:
        return None
    ends = np.cumsum(fillers + 1) - 1  # the place of each nonzero among the values
    values, gaps = np.zeros(ends[-1] + 1, flat.dtype), np.full(ends[-1] + 1, MAX_GAP, np.uint8)
    values[ends], gaps[ends] = flat[positions], distances - MAX_GAP * fillers
    return values, gaps
