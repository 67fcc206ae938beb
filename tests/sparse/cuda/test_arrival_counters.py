"""Arrival counters, on a machine without a GPU."""

from __future__ import annotations

import pytest
import torch

from pomona.sparse.cuda.arrival_counters import CHUNK, CounterPool


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> CounterPool:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return CounterPool(torch.device("cpu"))


def test_a_stream_has_its_own_counters(pool: CounterPool) -> None:
    one, other = (pool.counters(5, stream, False) for stream in (1, 2))
    one += 1
    assert not other.any()
    assert pool.counters(5, 1, False) is one
    assert not pool.counters(CHUNK, 1, False).any(), "more than there were"


def test_a_captured_launch_has_its_own_counters(pool: CounterPool) -> None:
    eager = pool.counters(5, 1, False)
    captured = [pool.counters(5, 1, True) for _ in range(CHUNK // 5 + 10)]  # more than the reserve
    for counters in captured:
        assert len(counters) == 5
        counters += 1
    assert all((counters == 1).all() for counters in captured)
    assert not eager.any()
    pool.counters(5, 1, False)
    assert not pool.counters(5, 1, True).any(), "there are new ones after a launch that is not captured"


def test_memory_of_captured_counters_is_never_freed(pool: CounterPool) -> None:
    known = set()
    for _ in range(3 * CHUNK // 4000):  # chunk after chunk is used up, and no counters are referenced
        pool.counters(5, 1, False)
        known.add(pool.counters(4000, 1, True).untyped_storage().data_ptr())
    assert len(known) > 2
    assert known == {chunk.untyped_storage().data_ptr() for chunk in pool.chunks}


def test_the_first_launch_may_be_captured(pool: CounterPool) -> None:
    assert not pool.counters(5, 1, True).any()
