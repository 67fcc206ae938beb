"""The random source: distributions of its numbers, seeds and state."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from pomona.errors import PomonaError
from pomona.privacy import Source


@pytest.mark.parametrize("secure", [False, True])
def test_numbers_follow_their_distributions(secure):
    source = Source(secure=secure) if secure else Source(seed=5)
    u, z = source.uniform(50_000).numpy(), source.normal(50_000).numpy()
    assert u.min() >= 0
    assert u.max() < 1
    assert kstest(u, "uniform").pvalue > 1e-6
    assert kstest(z, "norm").pvalue > 1e-6
    assert z.dtype == np.float32
    rows = source.poisson(100_000, 0.1)
    assert len(rows) == pytest.approx(10_000, abs=500)
    assert bool((rows.diff() > 0).all())
    assert len(source.poisson(10, 1.0)) == 10


def test_sources_without_a_seed_differ_and_secure_ones_have_no_state():
    one, two = Source(), Source()
    assert not torch.equal(one.bits(4), two.bits(4))
    assert Source(secure=True).state_dict() == {}
    with pytest.raises(PomonaError, match="has no seed"):
        Source(seed=1, secure=True)


def test_source_continues_from_its_state():
    source = Source(seed=1)
    source.normal(3)
    state = source.state_dict()
    ahead, other = source.normal(5), Source(seed=9)
    other.load_state_dict(state)
    assert torch.equal(other.normal(5), ahead)
    with pytest.raises(PomonaError, match="a secure run cannot continue a seeded one"):
        Source(secure=True).load_state_dict(state)
