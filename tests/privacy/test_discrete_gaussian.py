"""Discrete Gaussian samples: the table by its definition, the verdicts by exact arithmetic, and the distribution."""

from __future__ import annotations

import math
import random
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

from pomona.errors import PomonaError
from pomona.native import private as native
from pomona.native.library import supported_instruction_sets
from pomona.privacy import Source, discrete_gaussian
from pomona.privacy.discrete_gaussian import (
    ACCEPTED,
    CLOSE,
    DIGITS,
    SLOT_BITS,
    NoiseTable,
    build_table,
    compare_exactly,
    propose_by_block,
    split_words,
)
from pomona.privacy.random_source import Purpose

VARIANCES = st.one_of(st.integers(1, 2000), st.integers(0, 68).map(lambda k: 1 << k))


def gaussian(x: int, variance: int) -> Decimal:
    """Return exp(−x² / (2 variance)) in decimals."""
    return DIGITS.exp(DIGITS.divide(Decimal(-x * x), Decimal(2 * variance)))


@settings(max_examples=40, deadline=None)
@given(variance=VARIANCES)
def test_no_acceptance_probability_exceeds_one(variance):
    """With n slots for a block and the probability c ρ(x) / n within it, each x is proposed and accepted ∝ ρ(x)."""
    table = build_table(variance)
    width, blocks = 1 << table.offset_bits, len(table.counts) - 1
    slots = np.bincount(table.slots.numpy(), minlength=blocks + 1)
    assert slots.sum() == 1 << SLOT_BITS
    assert slots[:-1].tolist() == table.counts[:-1].tolist()
    assert min((table.first_block + blocks) * width, -table.first_block * width) >= 13 * math.isqrt(variance)
    for block in random.Random(0).sample(range(blocks), min(blocks, 20)):
        first = (table.first_block + block) * width
        nearest, farthest = sorted((first, first + width - 1), key=abs)
        high, low = (
            DIGITS.multiply(gaussian(x, variance), Decimal(table.scale)) / Decimal(int(table.counts[block]))
            for x in (nearest, farthest)
        )
        assert high <= 1
        heights = 1 << table.height_bits
        assert int(table.limits[0][block]) <= low * heights  # what is accepted at once is below every probability
        assert int(table.limits[1][block]) >= min(high * heights, heights)  # what is rejected at once is above it
    assert (int(table.limits[0][-1]), int(table.limits[1][-1])) == (0, 0)  # the last block is never accepted


@pytest.mark.parametrize("variance", [1, 7, 900, 1 << 43, 1 << 68])
def test_every_verdict_is_that_of_exact_arithmetic(variance):
    table = NoiseTable.of(variance)
    words = Source(seed=variance).words(Purpose.NOISE, 2000)
    values, verdicts = propose_by_block(words, table)
    assert int((verdicts == CLOSE).sum()) < 200
    block, height = split_words(words, table)
    chances = []
    for word, value, verdict, at, h in zip(words, values, verdicts, block, height, strict=True):
        if int(at) == len(table.counts) - 1:
            assert verdict == 0
            continue
        count = int(table.counts[at])
        for further in (0, (1 << 192) - 1):  # the lowest and the highest number with this height
            exact = compare_exactly(int(h), int(value), count, table, lambda bits, further=further: further)
            chances.append(exact)
            if verdict != CLOSE:
                assert exact == verdict, (word, value)
    assert 0.6 < np.mean(chances) < 1


def test_comparisons_within_the_margin_of_float64_are_exact(monkeypatch):
    """With a margin of 1 all comparisons that the blocks leave open are made in decimals: the samples are the same."""
    before = Source(seed=3).discrete_gaussian(3000, 1 << 42)
    asked = []
    monkeypatch.setattr(discrete_gaussian, "MARGIN", 1.0)
    monkeypatch.setattr(Source, "integer", lambda self, bits: asked.append(bits) or (1 << (bits - 1)))
    NoiseTable.of(1 << 42)  # cached: its limits have the ordinary margin
    assert torch.equal(Source(seed=3).discrete_gaussian(3000, 1 << 42), before)
    assert len(asked) > 50
    assert set(asked) == {192}


@pytest.mark.parametrize("variance", [1, 2, 10, 400])
def test_samples_follow_the_distribution(variance):
    x = Source(seed=1).discrete_gaussian(200_000, variance).numpy()
    places = np.arange(-5 * math.isqrt(variance) - 1, 5 * math.isqrt(variance) + 2)
    p = np.exp(-(places**2) / (2 * variance))
    p /= np.exp(-(np.arange(-20_000, 20_001) ** 2) / (2 * variance)).sum()
    counts = np.array([(x == place).sum() for place in places])
    frequent = p * len(x) > 5
    found, expected = (
        np.append(v[frequent], total - v[frequent].sum()) for v, total in ((counts, len(x)), (p * len(x), len(x)))
    )
    assert chisquare(found, expected).pvalue > 1e-4


@pytest.mark.parametrize("variance", [(1 << 42) + 9, (1 << 48) + 12345, 1 << 60])
def test_large_samples_follow_the_normal_distribution_down_to_their_last_bits(variance):
    x = Source(seed=2).discrete_gaussian(100_000, variance).numpy()
    assert kstest(x / math.sqrt(variance), "norm").pvalue > 1e-4
    for shift in (0, 3, 6):  # bytes of the integer, at several places
        assert chisquare(np.bincount((x >> shift) & 255, minlength=256)).pvalue > 1e-4


@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
def test_kernels_and_torch_propose_the_same(monkeypatch, instruction_set):
    if native.load_kernel("propose_noise") is None:
        pytest.skip("needs a C compiler")
    kernel, words = native.propose_noise, Source(seed=1).words(Purpose.NOISE, 30_001)
    for variance in (1, 50, 1 << 42):
        table = NoiseTable.of(variance)
        monkeypatch.setattr(discrete_gaussian.native, "propose_noise", lambda *a: kernel(*a, instruction_set))
        one = propose_by_block(words, table)
        monkeypatch.setattr(discrete_gaussian.native, "propose_noise", lambda *a: False)
        other = propose_by_block(words, table)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert (one[1] == ACCEPTED).float().mean() > 0.6


def test_variance_out_of_range_is_refused():
    for variance in (0, (1 << 68) + 1):
        with pytest.raises(PomonaError, match="lies in 1 … 2\\^68"):
            NoiseTable.of(variance)
