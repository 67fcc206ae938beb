"""The entropy coder: lossless, close to the entropy, and able to detect damage."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pomona as pm
from pomona.sparse import rans


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(1, 20))
def test_decoded_bytes_equal_the_encoded_ones(data: bytes, times: int) -> None:
    symbols = np.frombuffer(data * times, np.uint8)
    frequencies = rans.count_frequencies(symbols)
    assert frequencies.sum() == rans.FREQUENCY_SUM
    assert frequencies.max() < rans.FREQUENCY_SUM
    assert np.array_equal(rans.decode(rans.encode(symbols, frequencies), len(symbols), frequencies), symbols)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 40_000), st.floats(0, 1), st.integers(0, 99))
def test_decoded_bits_equal_the_encoded_ones(count: int, share: float, seed: int) -> None:
    octets = np.packbits(np.random.default_rng(seed).random(count) < share)
    ones = int(np.unpackbits(octets).sum())
    frequencies = rans.bit_frequencies(ones, count)
    assert frequencies.sum() == rans.FREQUENCY_SUM
    assert np.array_equal(rans.decode(rans.encode(octets, frequencies), len(octets), frequencies), octets)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.4, 0.5, 0.9])
def test_size_of_bits_is_their_entropy(share: float) -> None:
    count = 2_000_000
    flags = np.random.default_rng(0).random(count) < share
    ones = int(flags.sum())
    p = ones / count
    entropy = -p * math.log2(p) - (1 - p) * math.log2(1 - p)
    size = 8 * len(rans.encode(np.packbits(flags), rans.bit_frequencies(ones, count)))
    assert entropy * count - 64 <= size <= (entropy + 0.006) * count


def test_frequencies_computed_by_hand() -> None:
    """Where a third of the bits are 1, a byte of k ones has (1/3)^k (2/3)^(8−k) of 2¹⁶ − 256, plus 1."""
    frequencies = rans.bit_frequencies(1, 3)
    assert frequencies[0b10010001] == 1 + (65536 - 256) * 2**5 // 3**8
    assert frequencies[0xFF] == 1 + (65536 - 256) // 3**8
    assert frequencies[0] == 65536 - sum(int(f) for f in frequencies[1:])
    assert rans.scale_frequencies([0, 5, 0]).tolist() == [1, 65535, 0]
    assert rans.scale_frequencies([0, 0, 0]).tolist() == [65535, 1, 0]
    assert rans.scale_frequencies([3, 1]).tolist() == [1 + 65534 * 3 // 4 + 1, 1 + 65534 // 4]


def test_one_lane_computed_by_hand() -> None:
    """Two symbols of equal frequency: the state 2³² absorbs 1, then 0, and the decoder reads 0, then 1."""
    frequencies = np.zeros(256, np.uint64)
    frequencies[:2] = 2**15
    data = rans.encode(np.array([0, 1], np.uint8), frequencies)
    after_one = ((2**32 // 2**15) << 16) + 2**15  # a remainder of 0, plus the start of symbol 1
    assert struct.unpack("<Q", data) == ((after_one // 2**15 << 16) + after_one % 2**15,)
    assert rans.decode(data, 2, frequencies).tolist() == [0, 1]


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-4], lambda d: d + b"\0\0\0\0", lambda d: d[:3], lambda d: b"\1" + d[1:]]
)
def test_damaged_stream_is_refused(damage: Any) -> None:
    symbols = np.random.default_rng(0).integers(0, 5, 5000).astype(np.uint8)
    frequencies = rans.count_frequencies(symbols)
    with pytest.raises(pm.PomonaError, match="damaged"):
        rans.decode(damage(rans.encode(symbols, frequencies)), len(symbols), frequencies)
