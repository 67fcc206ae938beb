"""Arrival counters, on a machine without a GPU."""

from __future__ import annotations

import pytest
import torch

from pomona.sparse.cuda.arrival_counters import CHUNK, CounterPool


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> CounterPool:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return CounterPool(torch.device("cpu"))


def test_a_stream_has_its_own(pool: CounterPool) -> None:
    one, other = (pool.counters(5, stream, False) for stream in (1, 2))
    one += 1
    assert not other.any()
    assert pool.counters(5, 1, False) is one
    assert not pool.counters(CHUNK, 1, False).any(), "more than there were"


def test_a_captured_launch_has_its_own(pool: CounterPool) -> None:
    eager = pool.counters(5, 1, False)
    captured = [pool.counters(5, 1, True) for _ in range(CHUNK // 5 + 10)]  # more than are ready
    for counters in captured:
        assert len(counters) == 5
        counters += 1
    assert all((counters == 1).all() for counters in captured)
    assert not eager.any()
    pool.counters(5, 1, False)
    assert not pool.counters(5, 1, True).any(), "there are new ones after a launch that is not captured"


def test_what_a_graph_knows_by_its_address_stays(pool: CounterPool) -> None:
    known = set()
    for _ in range(3 * CHUNK // 4000):  # chunk after chunk is used up, and nobody holds what was given
        pool.counters(5, 1, False)
        known.add(pool.counters(4000, 1, True).untyped_storage().data_ptr())
    assert len(known) > 2
    assert known == {chunk.untyped_storage().data_ptr() for chunk in pool.chunks}


def test_before_all_other_launches(pool: CounterPool) -> None:
    assert not pool.counters(5, 1, True).any()
