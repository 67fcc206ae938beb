"""Several runs at once on one GPU, each in a thread with a stream and a CUDA graph of its own.

One small network leaves most of a large GPU idle. Replays of several graphs fill it, and since a replay takes Python
some microseconds, one process feeds them all. A run shares nothing with its neighbours but the device: it has its
own seeds, folder and checkpoints, and what fails in one is told as its outcome while the others go on.
"""

from __future__ import annotations

import gc
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pomona.errors import require

from ..runs.concurrency import CONCURRENT_RUN, SHARED_STATE_LOCK, isolated_random_state
from ..runs.distributed import select_device
from ..runs.interruption import Interrupted, catch_stop_signals
from ..runs.recorder import NoteCallback
from .process_pool import Job

MOST = 24  # torch has 32 streams, and some are for other uses


def run(jobs: Sequence[Job], count: int, note: NoteCallback) -> Iterator[tuple[int, dict[str, Any]]]:
    """Index and summary (or `error`) of each job, as they come, `count` at a time.

    Ctrl-C and SIGTERM raise KeyboardInterrupt once the runs under way have written a checkpoint. To close this
    iterator before its end does the same, and raises nothing.
    """
    require(1 <= count <= MOST, f"packed takes 1 to {MOST} runs at once, got {count}.")
    for job in jobs:
        device = select_device(job.recipe.train.device)
        require(
            device.type == "cuda",
            f"runs are packed on a GPU, and '{job.recipe.name}' is for '{device}': use --jobs instead of --packed.",
        )
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(jobs)):
        waiting.put(index)
    told: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    stop = threading.Event()
    threads = [
        threading.Thread(target=serve, args=(jobs, waiting, told, stop), name=f"run {k}", daemon=True)
        for k in range(min(count, len(jobs)))
    ]
    with isolated_random_state(torch.device("cuda")), lively(), catch_stop_signals() as asked:
        try:
            for thread in threads:
                thread.start()
            for _ in jobs:
                yield from outcome(told, note, asked)
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def serve(
    jobs: Sequence[Job],
    waiting: queue.SimpleQueue[int],
    told: queue.SimpleQueue[tuple[str, Any]],
    stop: threading.Event,
) -> None:
    """The life of a thread: one job after another, on one stream."""
    CONCURRENT_RUN.set(True)
    streams: dict[torch.device, torch.cuda.Stream] = {}
    while not stop.is_set():
        try:
            index = waiting.get_nowait()
        except queue.Empty:
            return
        try:
            device = select_device(jobs[index].recipe.train.device)
            stream = streams.get(device) or streams.setdefault(device, torch.cuda.Stream(device))
            with torch.cuda.device(device), torch.cuda.stream(stream):
                found = jobs[index].run(stop.is_set, lambda text: told.put(("note", text)))
        except Interrupted:
            return
        except Exception as error:  # of the device itself: nobody would wait for a thread that is gone
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        told.put(("done", (index, found)))
        tidy()


def tidy() -> None:
    """Free what a run that is over has on the GPU: its parts know each other, and Python does not see the bytes."""
    with SHARED_STATE_LOCK:
        gc.collect()


def outcome(
    told: queue.SimpleQueue[tuple[str, Any]], note: NoteCallback, asked: Any
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The next job that is done; notes on the way are passed on."""
    while True:
        if asked():
            raise KeyboardInterrupt
        try:
            kind, value = told.get(timeout=0.2)
        except queue.Empty:
            continue
        if kind == "done":
            yield value
            return
        note(value)


@contextmanager
def lively() -> Iterator[None]:
    """Let threads change often, so that one at work in Python does not keep the others from the GPU."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
