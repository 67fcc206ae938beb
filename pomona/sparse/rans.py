"""Entropy coding of bytes by asymmetric numeral systems (rANS; Duda, 2009), many lanes at a time in NumPy.

Symbol i belongs to lane i mod lanes. Every lane has a state of 64 bits, at least 2³², which gives and takes
words of 32 bits; a symbol's share of 2¹⁶ is its frequency. A stream is the lanes' last states, eight bytes
each, and the words in the order in which a decoder asks for them, all little-endian. Only integers are used,
so that any machine decodes what any other has encoded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PomonaError

Bytes = NDArray[np.uint8]
Table = NDArray[np.uint64]

SCALE = 16
WHOLE = 1 << SCALE  # the sum of all frequencies
FLOOR = np.uint64(1 << 32)  # the least state
WORD, GAP, LOW = np.uint64(32), np.uint64(SCALE), np.uint64(WHOLE - 1)


def lanes(count: int) -> int:
    """How many lanes a stream of so many symbols has: few enough that their states cost less than half a per cent."""
    return min(max(count // 2048, 1), 1024)


def encode(symbols: Bytes, frequencies: Table) -> bytes:
    """The symbols as a stream; each must have a frequency, and none the whole."""
    width = lanes(len(symbols))
    states = np.full(width, FLOOR)
    starts = np.cumsum(frequencies) - frequencies
    words: list[NDArray[Any]] = []
    for at in reversed(range(0, len(symbols), width)):
        row = symbols[at : at + width]
        state, share = states[: len(row)], frequencies[row]
        full = state >> (WORD + GAP) >= share
        words.append(state[full].astype("<u4"))  # the low word
        state[full] >>= WORD
        quotient, rest = np.divmod(state, share)
        state[:] = (quotient << GAP) + rest + starts[row]
    return b"".join([states.astype("<u8").tobytes(), *(part.tobytes() for part in reversed(words))])


def decode(data: bytes, count: int, frequencies: Table) -> Bytes:
    """The symbols of a stream again."""
    width = lanes(count)
    if len(data) < 8 * width or len(data) % 4:
        raise PomonaError(f"a stream of {len(data)} bytes cannot hold {count} symbols: the file is damaged.")
    states = np.frombuffer(data, "<u8", width).astype(np.uint64)
    words = np.frombuffer(data, "<u4", offset=8 * width).astype(np.uint64)
    starts = np.cumsum(frequencies) - frequencies
    symbol_at = np.repeat(np.arange(len(frequencies), dtype=np.uint8), frequencies.astype(np.int64))
    symbols = np.empty(count, np.uint8)
    taken = 0
    for at in range(0, count, width):
        row = symbols[at : at + width]
        state = states[: len(row)]
        place = state & LOW
        row[:] = symbol_at[place]
        state[:] = frequencies[row] * (state >> GAP) + place - starts[row]
        empty = np.flatnonzero(state < FLOOR)
        more = words[taken : taken + len(empty)]
        if len(more) < len(empty):
            break
        state[empty] = state[empty] << WORD | more
        taken += len(empty)
    if taken != len(words) or (states != FLOOR).any():
        raise PomonaError("a stream does not end as it began: the file is damaged.")
    return symbols


def scaled(counts: list[int]) -> Table:
    """Frequencies in proportion to counts, in exact arithmetic: at least 1 for each that is counted.

    Where less than two are counted the first ones pass for counted, so that no frequency is the whole.
    """
    total, seen = sum(counts), {i for i, count in enumerate(counts) if count}
    for i in (0, 1):
        if len(seen) < 2:
            seen.add(i)
    shares = [(WHOLE - len(seen)) * count // max(total, 1) + (i in seen) for i, count in enumerate(counts)]
    shares[shares.index(max(shares))] += WHOLE - sum(shares)
    return np.array(shares, np.uint64)


def histogram(symbols: Bytes) -> Table:
    """The frequencies of some symbols."""
    return scaled(np.bincount(symbols, minlength=256).tolist())


def bits(ones: int, count: int) -> Table:
    """The frequencies of bytes whose eight bits are each 1 with the probability ones / count."""
    ones, zeros = max(ones, 1), max(count - ones, 1)
    return scaled([ones ** byte.bit_count() * zeros ** (8 - byte.bit_count()) for byte in range(256)])
