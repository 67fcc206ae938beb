"""The random source: distributions of its numbers, their addresses, seeds and state."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import binomtest, kstest

from pomona.errors import PomonaError
from pomona.privacy import Source
from pomona.privacy.random_source import Purpose


@pytest.mark.parametrize("seed", [None, 5])
def test_numbers_follow_their_distributions(seed):
    source = Source(seed=seed)
    u = source.uniform(50_000).numpy()
    assert u.min() >= 0
    assert u.max() < 1
    assert kstest(u, "uniform").pvalue > 1e-6
    z = source.discrete_gaussian(50_000, 1 << 40)
    assert z.dtype == torch.int64
    assert kstest(z.numpy() / 2**20, "norm").pvalue > 1e-6
    rows = source.poisson(100_000, 0.1)
    assert binomtest(len(rows), 100_000, 0.1).pvalue > 1e-6
    assert bool((rows.diff() > 0).all())
    assert len(source.poisson(10, 1.0)) == 10
    assert len(source.poisson(10, 0.0)) == 0


def test_randomness_is_secure_unless_a_seed_is_given():
    one, two = Source(), Source()
    assert one.secure
    assert len(one.key) == 32
    assert one.key != two.key
    assert not torch.equal(one.bits(4), two.bits(4))
    assert one.key.hex() not in repr(one)
    seeded = Source(seed=1)
    assert not seeded.secure
    assert torch.equal(seeded.bits(4), Source(seed=1).bits(4))
    assert not torch.equal(seeded.bits(4), Source(seed=2).bits(4))


def test_every_purpose_step_and_call_has_its_own_numbers():
    source, seen = Source(), set()
    for _ in range(3):
        source.poisson(1, 0.5)
        for purpose in Purpose:
            for _ in range(3):
                seen.update(source.words(purpose, 4).tolist())
    assert len(seen) == 3 * len(Purpose) * 3 * 4
    short, long = Source(seed=1), Source(seed=1)
    assert torch.equal(short.words(Purpose.NOISE, 5), long.words(Purpose.NOISE, 500)[:5])  # by position


def test_source_replays_from_its_state():
    source = Source()
    source.poisson(100, 0.5)
    source.discrete_gaussian(3, 100)
    state = source.state_dict()
    ahead = source.poisson(100, 0.5), source.bits(7), source.discrete_gaussian(5, 1 << 40)
    other = Source()
    other.load_state_dict(state)
    again = other.poisson(100, 0.5), other.bits(7), other.discrete_gaussian(5, 1 << 40)
    assert all(torch.equal(a, b) for a, b in zip(ahead, again, strict=True))
    with pytest.raises(PomonaError, match="a secure run cannot continue a seeded one"):
        Source(seed=1).load_state_dict(state)


@pytest.mark.gpu
def test_numbers_on_a_gpu_are_those_on_a_cpu():
    for draw in (
        lambda source: source.poisson(1000, 0.3),
        lambda source: source.bits(1001),
        lambda source: source.discrete_gaussian(100_001, 1 << 42),
    ):
        assert torch.equal(draw(Source("cuda", seed=3)).cpu(), draw(Source(seed=3)))
