"""Counters in a GPU's memory, by which thread blocks find out which of them arrives last.

The counters are zero whenever no kernel uses them: the last thread block resets them.
"""

from __future__ import annotations

from functools import cache
from threading import Lock

import torch
from torch import Tensor

CHUNK = 1 << 16  # counters that are allocated at a time
RESERVE = 1 << 12  # counters that are kept unused for captures, which cannot allocate zeros


class CounterPool:
    """The counters of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.lock = device, Lock()
        self.unused = torch.empty(0, dtype=torch.int32)
        self.chunks: list[Tensor] = []  # all that were ever allocated: a graph knows its counters by address alone
        self.streams: dict[int, Tensor] = {}  # the counters of each stream, whose kernels run one after another

    def take_unused(self, count: int) -> Tensor:
        """Return counters that no launch has had."""
        taken, self.unused = self.unused[:count], self.unused[count:]
        return taken

    def allocate(self, count: int) -> Tensor:
        """Return new counters."""
        return torch.zeros(count, dtype=torch.int32, device=self.device)

    def counters(self, count: int, stream: int, capturing: bool) -> Tensor:
        """Return counters for a launch on this stream, which no concurrent kernel uses.

        A captured launch keeps its counters for good, because two graphs may run at the same time.
        """
        # The usual case comes first, without the lock, and without the builtin len, which is slow for a tensor.
        if not capturing and self.unused.numel() >= RESERVE:
            assigned = self.streams.get(stream)
            if assigned is not None and assigned.numel() >= count:
                return assigned
        with self.lock:
            if capturing:  # here only the graph itself can set new memory to zero
                return self.take_unused(count) if count <= self.unused.numel() else self.allocate(count)
            if self.unused.numel() < 2 * RESERVE + count:
                self.unused = self.allocate(CHUNK + count)
                self.chunks.append(self.unused)
                torch.cuda.synchronize(self.device)  # other streams will use them too
            self.streams[stream] = self.take_unused(max(count, RESERVE // 4))
            return self.streams[stream]


@cache
def counter_pool(device: torch.device) -> CounterPool:
    """Return the pool of a device."""
    return CounterPool(device)


def arrival_counters(count: int, device: torch.device) -> Tensor:
    """Return this many counters at zero, for one launch on the current stream of the current device."""
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    return counter_pool(device).counters(count, stream, torch.cuda.is_current_stream_capturing())
