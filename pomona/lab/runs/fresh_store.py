"""A store for the processes of torchrun in which nothing is left from processes that it has restarted.

torchrun gives restarted processes the store of those that were killed. A process that is ahead would read the addresses
of the killed ones there and wait for them, so the processes first agree on a prefix for their keys.
"""

from __future__ import annotations

import time
import uuid

from torch import distributed

from pomona.errors import PomonaError

JOIN_SECONDS = 1800.0  # torch's own limit for a process group
POLL_SECONDS = 0.05


def open_fresh_store() -> tuple[distributed.Store, int, int]:
    """Return the store of torchrun's processes under a new prefix, the rank of this process and the world size."""
    store, rank, world_size = next(distributed.rendezvous("env://"))
    return distributed.PrefixStore(agree_on_prefix(store, rank, world_size), store), rank, world_size


def agree_on_prefix(store: distributed.Store, rank: int, world_size: int, seconds: float = JOIN_SECONDS) -> str:
    """Return a prefix that rank 0 has chosen and that all present processes have confirmed.

    Each other rank leaves a random word, rank 0 answers every word that it finds, and a rank waits for the answer to
    its own. So an answer to the word of a process that was killed reaches nobody.
    """
    if rank != 0:
        word = uuid.uuid4().hex
        store.set(f"pomona/word/{rank}", word)
        prefix = store.get(f"pomona/answer/{word}").decode()  # waits for it
        store.set(f"pomona/{prefix}/{rank}", "joined")
        return prefix
    prefix, missing, deadline = uuid.uuid4().hex, set(range(1, world_size)), time.monotonic() + seconds
    while missing:
        for other in missing:
            if store.check([f"pomona/word/{other}"]):
                store.set(f"pomona/answer/{store.get(f'pomona/word/{other}').decode()}", prefix)
        time.sleep(POLL_SECONDS)
        missing = {other for other in missing if not store.check([f"pomona/{prefix}/{other}"])}
        if missing and time.monotonic() > deadline:
            raise PomonaError(
                f"{len(missing)} of the {world_size} processes of torchrun did not join within {seconds:g} s: "
                "look for their errors, and start again."
            )
    return prefix
