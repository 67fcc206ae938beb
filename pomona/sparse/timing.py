"""Timing of alternatives that can be compared: all take turns in one run, and the median of each is its time."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.fused.captured_graphs import pause_garbage_collection

FLUSH_BYTES = 256 << 20  # more than almost any cache holds
DEFAULT_CACHE_BYTES = 32 << 20  # assumed for a last-level cache whose size the system does not report
CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")  # where Linux describes the caches of a processor
WARMUP_TURNS = 2  # turns whose times are discarded
# Calls, and seconds at most, that run before a timed call: it takes several to fill a last-level cache.
WARMUP_CALLS, WARMUP_SECONDS = 8, 0.01


def median_seconds(
    calls: Sequence[Callable[[], Any]],
    device: torch.device,
    *,
    before: Callable[[], Any] | None = None,
    repeats: int = 101,
    patience: float = 1.0,
    include_host: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return the median seconds of each call, measured in at most `repeats` turns and about `patience` seconds.

    On CUDA this is the device's time: a call is captured as a CUDA graph and replayed, so that the host's work is left
    out. With `include_host`, a plain call is timed until the device has finished, with all the work of the host.

    `before` runs before each timed call, outside its time. Without it, each call first runs several times untimed, so
    that none pays for what another left in the caches; on CUDA several calls in a row are then captured and timed
    together, because the device would wait for the host to launch a single one.

    `clock` reads the seconds of calls on the CPU. `time.process_time` leaves out the time in which other programs ran.
    """
    counts, measure = [1] * len(calls), time_with_host if include_host else time_on_device
    if device.type == "cuda" and not include_host:
        calls, counts = zip(*[capture_calls(call, 1 if before else WARMUP_CALLS) for call in calls], strict=True)
    times: list[list[float]] = [[] for _ in calls]
    start = time.perf_counter()
    for turn in range(-WARMUP_TURNS, repeats):
        for call, measured in zip(calls, times, strict=True):
            warm_caches(call) if before is None else before()
            seconds = measure(call, device, clock)
            if turn >= 0:
                measured.append(seconds)
        if turn >= 4 and time.perf_counter() - start > patience:
            break
    return [statistics.median(measured) / count for measured, count in zip(times, counts, strict=True)]


def last_cache_bytes(device: torch.device) -> int:
    """Return the size of the last-level cache of a device in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    return read_cpu_cache_bytes() or DEFAULT_CACHE_BYTES


@cache
def read_cpu_cache_bytes(folder: Path = CPU_CACHES) -> int:
    """Return the size of the largest cache that Linux reports for the processor, or 0."""
    texts = [file.read_text().strip() for file in folder.glob("index*/size")]
    found = filter(None, (re.fullmatch(r"(\d+)([KMG]?)", text) for text in texts))
    return max((int(one[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[one[2]] for one in found), default=0)


def make_cache_flusher(device: torch.device) -> Callable[[], None]:
    """Return a function that empties the caches of a device, for the `before` of `median_seconds`."""
    size = max(FLUSH_BYTES, 2 * last_cache_bytes(device))
    return partial(flush_caches, torch.zeros(size, dtype=torch.uint8, device=device))


def flush_caches(buffer: Tensor) -> None:
    """Evict everything else from the caches by going through a buffer that is larger than them.

    A GPU reads the buffer: after a write its L2 would be full of lines that have yet to go to memory, and the next
    call would wait for them.
    """
    buffer.view(torch.float32).sum() if buffer.is_cuda else buffer.zero_()


def capture_calls(call: Callable[[], Any], most: int) -> tuple[Callable[[], Any], int]:
    """Capture several calls as one CUDA graph; return its replay, and the number of calls in it.

    That number is at most `most`, and smaller where one call is long, but at least 1. A call that cannot be captured is
    returned unchanged with 1.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP_TURNS):
            call()
        stream.synchronize()
        start = time.perf_counter()
        call()
        stream.synchronize()
    count = max(1, min(most, int(WARMUP_SECONDS / (time.perf_counter() - start))))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with pause_garbage_collection(), torch.cuda.graph(graph):
            for _ in range(count):
                call()
    except RuntimeError:
        torch.cuda.synchronize()
        reset_random_generator()
        return call, 1

    def replay(referenced: Any = call) -> None:  # a graph holds addresses, so its tensors must live as long
        graph.replay()

    return replay, count


def reset_random_generator() -> None:
    """Release torch's CUDA random generator from a capture that failed, by a capture that succeeds.

    A failed capture leaves the generator in capturing mode, in which every later random number raises an error.
    """
    counter = torch.zeros(1, device="cuda")
    with pause_garbage_collection(), torch.cuda.graph(torch.cuda.CUDAGraph()):
        counter.add_(1)


def warm_caches(call: Callable[[], Any]) -> None:
    """Run a call several times, so that the caches are as after calls in a row."""
    start = time.perf_counter()
    for _ in range(WARMUP_CALLS):
        call()
        if time.perf_counter() - start > WARMUP_SECONDS:
            return


def time_with_host(
    call: Callable[[], Any], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds of one call until the device has finished it, the host's work included."""
    synchronize: Callable[[], Any] = partial(torch.cuda.synchronize, device) if device.type == "cuda" else bool
    synchronize()
    start = clock()
    call()
    synchronize()
    return clock() - start


def time_on_device(
    call: Callable[[], Any], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds of one call, on CUDA between two events on the device."""
    if device.type != "cuda":
        return time_with_host(call, device, clock)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1000
