"""What runs in one process share: the mark of concurrent runs, a lock, and torch's random generators."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

# Whether the run of this thread is one of several concurrent runs on one GPU.
CONCURRENT_RUN = ContextVar("CONCURRENT_RUN", default=False)

# Held by a run while it calls its model in Python or uses what all runs of a process share: the random generators, the
# compiler, and tracers, which intercept the calls of every model while they are active.
SHARED_STATE_LOCK = threading.RLock()


@contextmanager
def isolated_random_state(device: torch.device) -> Iterator[None]:
    """Restore torch's random generators when the block ends, because a run seeds them.

    Concurrent runs do nothing here: the code that starts them restores the generators once for all.
    """
    if CONCURRENT_RUN.get():
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
