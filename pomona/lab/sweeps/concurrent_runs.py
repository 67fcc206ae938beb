"""Concurrent runs on one GPU, each in a thread with its own CUDA stream and CUDA graph.

One small network leaves most of a large GPU idle. Replays of several graphs fill it, and since a replay takes Python
only some microseconds, one thread can launch them all. Runs share nothing but the device: each has its own seeds,
folder and checkpoints, and an error in one run becomes the result of that run while the others continue. A run that
needs the weights of another, of its teacher for example, begins when that one has ended.
"""

from __future__ import annotations

import gc
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pomona.errors import require

from ..runs.concurrency import CONCURRENT_RUN, SHARED_STATE_LOCK, isolated_random_state
from ..runs.distributed import select_device
from ..runs.graph_launcher import GRAPH_LAUNCHER, GraphLauncher
from ..runs.interruption import Interrupted, catch_stop_signals
from ..runs.recorder import NoteCallback
from .job import Job
from .job_queue import JobQueue

MAX_CONCURRENT = 24  # torch has a pool of 32 streams, some of which it uses itself
POLL_SECONDS = 0.2  # how often the main thread looks for Ctrl-C while it waits for results
SWITCH_SECONDS = 5e-4  # interval at which Python may switch threads; its default is ten times as long

Messages = queue.SimpleQueue[tuple[str, Any]]  # ("note", text) or ("done", (index, result))


def train_concurrently(jobs: Sequence[Job], count: int, note: NoteCallback) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the index and the summary (or `error`) of each job as it completes, with `count` jobs at a time.

    Ctrl-C and SIGTERM raise KeyboardInterrupt once the runs under way have written a checkpoint. Closing the iterator
    early also waits for the checkpoints, and raises nothing.
    """
    require(1 <= count <= MAX_CONCURRENT, f"concurrent takes 1 to {MAX_CONCURRENT} runs at once, got {count}.")
    for job in jobs:
        device = select_device(job.recipe.train.device)
        require(
            device.type == "cuda",
            f"concurrent runs need a GPU, and '{job.recipe.name}' is for '{device}': "
            "use --jobs instead of --concurrent.",
        )
    waiting, messages = JobQueue(jobs), Messages()
    stop = threading.Event()
    launcher = GraphLauncher()
    arguments = waiting, messages, stop, launcher
    threads = [
        threading.Thread(target=serve_jobs, args=arguments, name=f"run {k}", daemon=True)
        for k in range(min(count, len(jobs)))
    ]
    with (
        isolated_random_state(torch.device("cuda")),
        frequent_thread_switches(),
        catch_stop_signals() as stop_requested,
        launcher,
    ):
        try:
            for thread in threads:
                thread.start()
            for _ in jobs:
                yield from next_result(messages, note, stop_requested)
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def serve_jobs(
    waiting: JobQueue, messages: Messages, stop: threading.Event, launcher: GraphLauncher | None = None
) -> None:
    """Run one waiting job after another on one CUDA stream per device; the main function of a thread."""
    CONCURRENT_RUN.set(True)
    GRAPH_LAUNCHER.set(launcher)
    streams: dict[torch.device, torch.cuda.Stream] = {}
    while (index := waiting.wait_and_take(stop.is_set)) is not None:
        job = waiting.jobs[index]
        try:
            device = select_device(job.recipe.train.device)
            stream = streams.get(device) or streams.setdefault(device, torch.cuda.Stream(device))
            with torch.cuda.device(device), torch.cuda.stream(stream):
                result = job.run(stop.is_set, lambda text: messages.put(("note", text)))
        except Interrupted:
            return
        except Exception as error:  # of the device; without a message the main thread would wait forever
            result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        messages.put(("done", (index, result)))
        waiting.mark_ended(index)
        free_gpu_memory()


def free_gpu_memory() -> None:
    """Collect the garbage of a finished run.

    The parts of a run refer to each other, so only the garbage collector frees them, and the collector does not see
    how many bytes they hold on the GPU.
    """
    with SHARED_STATE_LOCK:
        gc.collect()


def next_result(
    messages: Messages, note: NoteCallback, stop_requested: Callable[[], bool]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the index and result of the next job that completes, and pass notes on to `note` in the meantime."""
    while True:
        if stop_requested():
            raise KeyboardInterrupt
        try:
            kind, value = messages.get(timeout=POLL_SECONDS)
        except queue.Empty:
            continue
        if kind == "done":
            yield value
            return
        note(value)


@contextmanager
def frequent_thread_switches() -> Iterator[None]:
    """Let Python switch threads more often, so that a thread busy in Python does not delay the launches of others."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
