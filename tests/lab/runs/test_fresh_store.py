"""The prefix on which the processes of torchrun agree, also where killed processes have left their keys."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import distributed

from pomona.errors import PomonaError
from pomona.lab.runs.fresh_store import agree_on_prefix


def join(store: distributed.Store, delays: list[float]) -> list[str]:
    """Let one thread for each delay join after it, and return the prefix of each rank."""

    def agree(rank: int) -> str:
        time.sleep(delays[rank])
        return agree_on_prefix(store, rank, len(delays), seconds=30)

    with ThreadPoolExecutor(len(delays)) as pool:
        return list(pool.map(agree, range(len(delays))))


@pytest.mark.parametrize("delays", [[0, 0, 0], [0.3, 0, 0.1], [0, 0.3, 0.1]])
def test_restarted_processes_agree_on_a_prefix_of_their_own(delays):
    store = distributed.HashStore()
    first, second = join(store, [0, 0, 0]), join(store, delays)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


def test_a_process_that_does_not_join_is_reported():
    store = distributed.HashStore()
    join(store, [0, 0])  # killed processes, whose keys are left
    with pytest.raises(PomonaError, match="1 of the 2 processes of torchrun did not join within 0.2 s"):
        agree_on_prefix(store, 0, 2, seconds=0.2)
