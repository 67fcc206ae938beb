"""The counter-based random stream: published vectors, equal bits on all backends, distributions and re-draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pomona as pm
from pomona.core.fused.random_stream import RandomStream, name_words, philox, redraw_limit

WORD_MAX = 0xFFFF_FFFF
words = st.integers(0, WORD_MAX)


# Random123's known answers for philox4x32-10.
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD_MAX,) * 4, (WORD_MAX,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    assert philox(counter, key) == answer  # type: ignore[arg-type]
    for make in (np.array, torch.tensor):
        blocks = philox(tuple(make([word, word]) for word in counter), key)  # type: ignore[arg-type]
        assert tuple(int(word[1]) for word in blocks) == answer


@settings(deadline=None)
@given(st.lists(words, min_size=1, max_size=9), words, words, words, st.integers(0, 2**63 - 1))
def test_philox_agrees_between_numpy_torch_and_python(
    positions: list[int], redraw: int, low: int, high: int, seed: int
) -> None:
    key = seed & WORD_MAX, seed >> 32
    expected = [philox((p, redraw, low, high), key) for p in positions]
    for make in (np.array, torch.tensor):
        actual = philox((make(positions), redraw, low, high), key)
        assert [tuple(int(word[i]) for word in actual) for i in range(len(positions))] == expected


def draw_exactly(seed: int, name: str, position: int, redraw: int, word: int, bound: float, sign: bool) -> np.float32:
    """Return one draw by the specification, in exact arithmetic and rounded once."""
    number = philox((position, redraw, *name_words(name)), (seed & WORD_MAX, seed >> 32))[word]
    if sign:
        return np.float32(bound) * (1 if number < 2**31 else -1)
    u = (2 * (number >> 8) + 1 - 2**24) / 2**24
    return np.float32(u * float(np.float32(bound)))  # exact in float64: 24 bits times 24 bits


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3])
def test_draws_follow_the_specification(seed: int) -> None:
    like = torch.empty(5, 3, 2, 2)
    redraw = torch.arange(60).view(like.shape) % 4
    for name in ("conv.weight", "blocks.0.weight"):
        for distribution, bound in (("sc", math.sqrt(2 / 12)), ("ku", math.sqrt(6 / 12))):
            drawn = RandomStream(seed, distribution).weights(name, 12, like, redraw)
            assert drawn.dtype == torch.float32
            expected = [draw_exactly(seed, name, i, i % 4, 0, bound, distribution == "sc") for i in range(60)]
            assert drawn.flatten().tolist() == [float(value) for value in expected]
        scores = RandomStream(seed, "sc").scores(name, 12, like)
        expected = [draw_exactly(seed, name, i, 0, 2, math.sqrt(6 / 12), False) for i in range(60)]
        assert scores.flatten().tolist() == [float(value) for value in expected]


def test_names_are_hashed_with_blake2() -> None:
    assert name_words("conv1.weight") == (0x312C03DF, 0x6818E6BD)  # b2sum -l 64: df032c31bde61868


def test_the_memory_format_does_not_change_draws() -> None:
    like = torch.empty(4, 3, 2, 2)
    last = like.to(memory_format=torch.channels_last)
    stream = RandomStream(1, "ku")
    assert torch.equal(stream.weights("a", 12, like), stream.weights("a", 12, last))


def test_other_dtypes_are_cast_from_float32() -> None:
    stream = RandomStream(1, "ku")
    single = stream.weights("a", 9, torch.empty(100))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert torch.equal(stream.weights("a", 9, torch.empty(100, dtype=dtype)), single.to(dtype))


def test_positions_may_come_in_any_order_and_across_chunks() -> None:
    stream = RandomStream(5, "ku")
    whole = stream.weights("a", 4, torch.empty(70_000))
    some = torch.tensor([69_999, 3, 32_768, 32_767, 0])
    assert torch.equal(stream.weights_at("a", 4, some), whole[some])
    assert stream.weights_at("a", 4, some[:0]).shape == (0,)


def test_weights_have_the_distribution_asked_for() -> None:
    n, bound = 200_000, math.sqrt(6 / 50)
    uniform = RandomStream(2, "ku").weights("a", 50, torch.empty(n)).double()
    assert uniform.abs().max() < bound
    assert not (uniform == 0).any()
    assert uniform.mean().abs() < 4 * bound / math.sqrt(3 * n)
    assert uniform.var() == pytest.approx(bound**2 / 3, rel=0.02)
    counts = torch.histc(uniform, 20, -bound, bound)
    assert ((counts - n / 20) ** 2 / (n / 20)).sum() < 50  # χ² of 19 degrees, beyond 1 − 10⁻⁴
    signs = RandomStream(2, "sc").weights("a", 50, torch.empty(n))
    assert set(signs.abs().unique().tolist()) == {float(np.float32(math.sqrt(2 / 50)))}
    assert (signs > 0).double().mean() == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(n))
    first, second = (RandomStream(2, "ku").weights_at("a", 50, torch.arange(n), k).double() for k in (0, 1))
    assert torch.corrcoef(torch.stack([first, second]))[0, 1].abs() < 4 / math.sqrt(n)
    other = RandomStream(2, "ku").weights("b", 50, torch.empty(n)).double()
    assert torch.corrcoef(torch.stack([uniform, other]))[0, 1].abs() < 4 / math.sqrt(n)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_a_redraw_draws_the_given_share_of_pruned_weights(rate: float) -> None:
    n = 100_000
    stream, weight, drawn = RandomStream(3, "ku"), torch.zeros(n), torch.zeros(n, dtype=torch.int32)
    pruned = torch.arange(n) % 2 == 0
    stream.redraw("a", 8, weight, drawn, pruned, 7, redraw_limit(rate))
    changed = weight != 0
    assert not changed[~pruned].any()
    share = float(changed[pruned].double().mean())
    assert share == pytest.approx(rate, abs=4 * math.sqrt(rate * (1 - rate) / (n / 2)))
    assert torch.equal(drawn, changed.int() * 7)
    assert torch.equal(weight[changed], stream.weights_at("a", 8, changed.nonzero().flatten(), 7))


def test_unknown_distributions_and_negative_seeds_are_refused() -> None:
    with pytest.raises(pm.PomonaError, match="unknown distribution 'kaiming': choose one of ku, sc"):
        RandomStream(0, "kaiming")
    with pytest.raises(pm.PomonaError, match=r"seed must be in \[0, 2⁶³\), got -1"):
        RandomStream(-1, "sc")
