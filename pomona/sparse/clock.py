"""Times that can be compared: all sides take turns in one run, and the median of each is its time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

WARM = 2  # turns that are not counted
AHEAD, BRIEF = 8, 0.01  # calls, and seconds, that a side runs ahead of its time: it takes some to fill a last cache


def race(
    sides: Sequence[Callable[[], Any]],
    device: torch.device,
    *,
    before: Callable[[], Any] | None = None,
    repeats: int = 101,
    patience: float = 1.0,
) -> list[float]:
    """The median seconds of each side, in at most `repeats` turns and about `patience` seconds.

    On CUDA those of the device: a side is recorded as a CUDA graph and replayed, and what the host does is left out.
    `before` runs ahead of each, outside its time; without it each side runs some times ahead of itself, so
    that none pays for what another left in the caches.
    """
    if device.type == "cuda":
        sides = [recorded(side) for side in sides]
    times: list[list[float]] = [[] for _ in sides]
    start = time.perf_counter()
    for turn in range(-WARM, repeats):
        for side, taken in zip(sides, times, strict=True):
            warm(side) if before is None else before()
            seconds = once(side, device)
            if turn >= 0:
                taken.append(seconds)
        if turn >= 4 and time.perf_counter() - start > patience:
            break
    return [statistics.median(taken) for taken in times]


def recorded(side: Callable[[], Any]) -> Callable[[], Any]:
    """A replay of a call as a CUDA graph, so that the device alone is timed; the call itself where it refuses."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            side()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            side()
    except RuntimeError:
        torch.cuda.synchronize()
        return side

    def replay(keep: Any = side) -> None:  # a graph holds addresses, so what it uses must live as long
        graph.replay()

    return replay


def warm(side: Callable[[], Any]) -> None:
    """Fill the caches as calls in a row do."""
    start = time.perf_counter()
    for _ in range(AHEAD):
        side()
        if time.perf_counter() - start > BRIEF:
            return


def once(side: Callable[[], Any], device: torch.device) -> float:
    """The seconds of one call; on CUDA between two marks on the device."""
    if device.type != "cuda":
        start = time.perf_counter()
        side()
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    side()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1000
