"""Gap coding of sparse arrays: worked by hand, and restored by an independent loop."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pomona.export.gap_coding import MIN_SIZE, encode_gaps


def decode(values: np.ndarray, gaps: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array, one value after the other."""
    flat, position = np.zeros(int(np.prod(shape)), values.dtype), -1
    for value, gap in zip(values, gaps, strict=True):
        position += int(gap)
        flat[position] = value
    return flat.reshape(shape)


def test_gaps_by_hand() -> None:
    array = np.zeros(MIN_SIZE * 4, np.float32)
    array[[0, 3, 3 + 255, 3 + 255 + 256]] = [1, 2, 3, 4]
    values, gaps = encode_gaps(array)  # type: ignore[misc]
    assert gaps.tolist() == [1, 3, 255, 255, 1]  # a distance of 256 goes over a stored zero
    assert values.tolist() == [1, 2, 3, 0, 4]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 999), st.floats(0.0005, 0.5), st.integers(16, 60), st.integers(16, 60))
def test_arrays_are_restored_and_smaller(seed: int, density: float, rows: int, columns: int) -> None:
    source = np.random.default_rng(seed)
    array = np.where(source.random((rows, columns)) < density, source.standard_normal((rows, columns)), 0)
    array = array.astype(np.float32)
    coded = encode_gaps(array)
    if coded is not None:
        assert sum(part.nbytes for part in coded) < array.nbytes
        assert np.array_equal(decode(*coded, array.shape), array)
    else:
        assert not array.any() or 5 * np.count_nonzero(array) >= 0.7 * array.nbytes


def test_dense_small_and_empty_arrays_are_left_alone() -> None:
    assert encode_gaps(np.ones((64, 64), np.float32)) is None
    assert encode_gaps(np.zeros((64, 64), np.float32)) is None
    assert encode_gaps(np.eye(4, dtype=np.float32)) is None
