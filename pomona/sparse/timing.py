"""Times that can be compared: all sides take turns in one run, and the median of each is its time."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

FLUSH = 256 << 20  # bytes that hardly a cache holds
USUAL = 32 << 20  # bytes of a last cache that does not tell its size
WARM = 2  # turns that are not counted
AHEAD, BRIEF = 8, 0.01  # calls, and seconds, that a side runs ahead of its time: it takes some to fill a last cache


def race(
    sides: Sequence[Callable[[], Any]],
    device: torch.device,
    *,
    before: Callable[[], Any] | None = None,
    repeats: int = 101,
    patience: float = 1.0,
    called: bool = False,
) -> list[float]:
    """The median seconds of each side, in at most `repeats` turns and about `patience` seconds.

    On CUDA those of the device: a side is recorded as a CUDA graph and replayed, and what the host does is left out;
    as `called`, a side is one plain call and the wait for its end, with all that the host does. `before` runs ahead of
    each, outside its time; without it each side runs some times ahead of itself, so that none pays for what another
    left in the caches, and on CUDA some calls in a row are timed: the device would wait for the host to launch a lone
    one.
    """
    calls, measure = [1] * len(sides), waited if called else once
    if device.type == "cuda" and not called:
        sides, calls = zip(*[recorded(side, 1 if before else AHEAD) for side in sides], strict=True)
    times: list[list[float]] = [[] for _ in sides]
    start = time.perf_counter()
    for turn in range(-WARM, repeats):
        for side, taken in zip(sides, times, strict=True):
            warm(side) if before is None else before()
            seconds = measure(side, device)
            if turn >= 0:
                taken.append(seconds)
        if turn >= 4 and time.perf_counter() - start > patience:
            break
    return [statistics.median(taken) / count for taken, count in zip(times, calls, strict=True)]


def last_cache(device: torch.device) -> int:
    """The bytes that the largest cache of a device holds."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    try:
        return max(os.sysconf("SC_LEVEL3_CACHE_SIZE"), 0) or USUAL
    except (AttributeError, OSError, ValueError):  # a system without the question, or without an answer
        return USUAL


def emptying(device: torch.device) -> Callable[[], None]:
    """What leaves nothing in a device's caches, for `race` to do ahead of each call."""
    return partial(empty, torch.zeros(max(FLUSH, 2 * last_cache(device)), dtype=torch.uint8, device=device))


def empty(flush: Tensor) -> None:
    """Leave nothing of others in the caches. On a GPU by reading: after a write its L2 would be full of what has yet
    to go to memory, and the side that comes next would wait for that, too."""
    flush.view(torch.float32).sum() if flush.is_cuda else flush.zero_()


def recorded(side: Callable[[], Any], most: int) -> tuple[Callable[[], Any], int]:
    """A replay of some calls as a CUDA graph, so that the device alone is timed, and how many they are.

    They are fewer than `most` where one is long, and the call itself where it refuses to be recorded.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            side()
        stream.synchronize()
        start = time.perf_counter()
        side()
        stream.synchronize()
    calls = max(1, min(most, int(BRIEF / (time.perf_counter() - start))))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(calls):
                side()
    except RuntimeError:
        torch.cuda.synchronize()
        return side, 1

    def replay(keep: Any = side) -> None:  # a graph holds addresses, so what it uses must live as long
        graph.replay()

    return replay, calls


def warm(side: Callable[[], Any]) -> None:
    """Fill the caches as calls in a row do."""
    start = time.perf_counter()
    for _ in range(AHEAD):
        side()
        if time.perf_counter() - start > BRIEF:
            return


def waited(side: Callable[[], Any], device: torch.device) -> float:
    """The seconds of one call until the device is done with it."""
    wait: Callable[[], Any] = partial(torch.cuda.synchronize, device) if device.type == "cuda" else bool
    wait()
    start = time.perf_counter()
    side()
    wait()
    return time.perf_counter() - start


def once(side: Callable[[], Any], device: torch.device) -> float:
    """The seconds of one call; on CUDA between two marks on the device."""
    if device.type != "cuda":
        return waited(side, device)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    side()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1000
