"""Entropy coding of bytes by range asymmetric numeral systems (rANS; Duda, 2009), vectorised over lanes in NumPy.

Symbol i belongs to lane i mod lanes. Each lane has a 64-bit state of at least 2³², from which the encoder moves 32-bit
words to the stream. The frequency of a symbol is its share of 2¹⁶. A stream consists of the final states of all lanes,
eight bytes each, and the words in the order in which a decoder reads them, all little-endian. All arithmetic is on
integers, so any machine can decode what another has encoded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PomonaError

Bytes = NDArray[np.uint8]
Frequencies = NDArray[np.uint64]  # one for each symbol

FREQUENCY_BITS = 16
FREQUENCY_SUM = 1 << FREQUENCY_BITS  # of all symbols
MIN_STATE = np.uint64(1 << 32)
WORD_BITS, FREQUENCY_SHIFT, FREQUENCY_MASK = np.uint64(32), np.uint64(FREQUENCY_BITS), np.uint64(FREQUENCY_SUM - 1)


def lane_count(symbols: int) -> int:
    """Return the number of lanes of a stream: so few that their states take less than half a per cent of it."""
    return min(max(symbols // 2048, 1), 1024)


def encode(symbols: Bytes, frequencies: Frequencies) -> bytes:
    """Encode symbols as a stream; each must have a frequency above 0 and below FREQUENCY_SUM."""
    width = lane_count(len(symbols))
    states = np.full(width, MIN_STATE)
    starts = np.cumsum(frequencies) - frequencies
    words: list[NDArray[Any]] = []
    for position in reversed(range(0, len(symbols), width)):
        row = symbols[position : position + width]
        state, frequency = states[: len(row)], frequencies[row]
        would_overflow = state >> (WORD_BITS + FREQUENCY_SHIFT) >= frequency
        words.append(state[would_overflow].astype("<u4"))  # the low word
        state[would_overflow] >>= WORD_BITS
        quotient, remainder = np.divmod(state, frequency)
        state[:] = (quotient << FREQUENCY_SHIFT) + remainder + starts[row]
    return b"".join([states.astype("<u8").tobytes(), *(part.tobytes() for part in reversed(words))])


def decode(data: bytes, count: int, frequencies: Frequencies) -> Bytes:
    """Decode a stream of `count` symbols; raise PomonaError if it is damaged."""
    width = lane_count(count)
    if int(frequencies.sum()) != FREQUENCY_SUM:
        raise PomonaError(f"the frequencies of a stream sum to {int(frequencies.sum())}: the file is damaged.")
    if len(data) < 8 * width or len(data) % 4:
        raise PomonaError(f"a stream of {len(data)} bytes cannot hold {count} symbols: the file is damaged.")
    states = np.frombuffer(data, "<u8", width).astype(np.uint64)
    words = np.frombuffer(data, "<u4", offset=8 * width).astype(np.uint64)
    starts = np.cumsum(frequencies) - frequencies
    symbol_at = np.repeat(np.arange(len(frequencies), dtype=np.uint8), frequencies.astype(np.int64))
    symbols = np.empty(count, np.uint8)
    words_read = 0
    for position in range(0, count, width):
        row = symbols[position : position + width]
        state = states[: len(row)]
        remainder = state & FREQUENCY_MASK
        row[:] = symbol_at[remainder]
        state[:] = frequencies[row] * (state >> FREQUENCY_SHIFT) + remainder - starts[row]
        needs_word = np.flatnonzero(state < MIN_STATE)
        next_words = words[words_read : words_read + len(needs_word)]
        if len(next_words) < len(needs_word):
            break
        state[needs_word] = state[needs_word] << WORD_BITS | next_words
        words_read += len(needs_word)
    if words_read != len(words) or (states != MIN_STATE).any():
        raise PomonaError("a stream does not end in the state in which it began: the file is damaged.")
    return symbols


def scale_frequencies(counts: list[int]) -> Frequencies:
    """Return frequencies in proportion to counts, in exact arithmetic, with at least 1 for each non-zero count.

    Where fewer than two counts are not zero, the first symbols count as present, so that no frequency is the whole sum.
    """
    total, present = sum(counts), {i for i, count in enumerate(counts) if count}
    for i in (0, 1):
        if len(present) < 2:
            present.add(i)
    scaled = [
        (FREQUENCY_SUM - len(present)) * count // max(total, 1) + (i in present) for i, count in enumerate(counts)
    ]
    scaled[scaled.index(max(scaled))] += FREQUENCY_SUM - sum(scaled)
    return np.array(scaled, np.uint64)


def count_frequencies(symbols: Bytes) -> Frequencies:
    """Return the frequencies with which the 256 byte values occur among symbols."""
    return scale_frequencies(np.bincount(symbols, minlength=256).tolist())


def bit_frequencies(ones: int, count: int) -> Frequencies:
    """Return the frequencies of bytes whose eight bits are each 1 with probability ones / count."""
    ones, zeros = max(ones, 1), max(count - ones, 1)
    return scale_frequencies([ones ** byte.bit_count() * zeros ** (8 - byte.bit_count()) for byte in range(256)])
