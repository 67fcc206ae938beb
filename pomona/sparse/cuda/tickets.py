"""Counters in a GPU's memory, by which thread blocks find out who of them is the last.

They are zero whenever no kernel is at work on them: the last thread block sets them back.
"""

from __future__ import annotations

from functools import cache
from threading import Lock

import torch
from torch import Tensor

CHUNK, READY = 1 << 16, 1 << 12  # counters that are made at a time, and that are there for captures


class Pool:
    """The counters of a device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.lock = device, Lock()
        self.spare = torch.empty(0, dtype=torch.int32)
        self.chunks: list[Tensor] = []  # all there ever were: a graph knows its counters by their address alone
        self.streams: dict[int, Tensor] = {}  # those of a stream, whose kernels run one after another

    def take(self, many: int) -> Tensor:
        """Counters that nobody has had."""
        taken, self.spare = self.spare[:many], self.spare[many:]
        return taken

    def zeros(self, many: int) -> Tensor:
        return torch.zeros(many, dtype=torch.int32, device=self.device)

    def tickets(self, many: int, stream: int, capturing: bool) -> Tensor:
        """Counters for a launch on this stream, which no kernel beside it will touch.

        One that is captured keeps its own for good, as two graphs may run at a time.
        """
        if not capturing and self.spare.numel() >= READY:  # as a rule; without the lock, and without len, which is slow
            mine = self.streams.get(stream)
            if mine is not None and mine.numel() >= many:
                return mine
        with self.lock:
            if capturing:  # where nothing new can be set to zero but by the graph itself
                return self.take(many) if many <= self.spare.numel() else self.zeros(many)
            if self.spare.numel() < 2 * READY + many:
                self.spare = self.zeros(CHUNK + many)
                self.chunks.append(self.spare)
                torch.cuda.synchronize(self.device)  # other streams will use them, too
            self.streams[stream] = self.take(max(many, READY // 4))
            return self.streams[stream]


@cache
def pool(device: torch.device) -> Pool:
    return Pool(device)


def tickets(many: int, device: torch.device) -> Tensor:
    """So many counters at zero, for one launch on the current stream of the current device."""
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    return pool(device).tickets(many, stream, torch.cuda.is_current_stream_capturing())
