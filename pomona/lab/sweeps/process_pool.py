"""A pool of processes that train the runs of a sweep, with one CPU thread each, and one GPU where there are several.

Where a process is killed, another process resumes its run, once. Where the sweep itself is killed, its processes stop
their runs with a checkpoint and end.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import connection, get_all_start_methods, get_context, parent_process
from typing import Any

import torch

from ..recipes.plugins import load_plugins
from ..runs.interruption import Interrupted, catch_stop_signals
from ..runs.recorder import NoteCallback
from .gpus import use_gpu
from .job import Job
from .job_queue import JobQueue

# A fork of this process would inherit its threads and its CUDA context. A fork server has only imported modules.
CONTEXT: Any = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
CONTEXT.set_forkserver_preload([__name__, "torch._dynamo", "sklearn.datasets"])  # modules that every run imports late

POLL_SECONDS = 0.2  # how often the pool looks for Ctrl-C while it waits for results
START_ATTEMPTS = 10  # how often a process is started before the error counts
EXIT_SECONDS = 5  # how long a terminated worker may take before it is killed
ORPHAN_SECONDS = 60  # how long a worker whose parent was killed may take to write its checkpoint


class Worker:
    """A process that runs one job after another, on the GPU of that name if one is given."""

    def __init__(self, stop: Any, place: int = 0, gpu: str | None = None) -> None:
        self.place = place  # among the workers of the pool; the one that replaces a dead worker takes its place
        self.pipe, other_end = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve_jobs, args=(other_end, stop, gpu), daemon=True)
        start_process(self.process)
        other_end.close()  # so that the pipe closes when the process ends
        self.index: int | None = None  # of the job under way

    def assign(self, index: int, job: Job) -> None:
        """Send a job to the process."""
        self.index = index
        with suppress(OSError):  # the process was killed while it had no job: `collect_results` finds its pipe closed
            self.pipe.send(job)

    def terminate(self) -> None:
        """End the process, by force where it does not end in time."""
        self.pipe.close()
        self.process.terminate()
        self.process.join(EXIT_SECONDS)
        self.process.kill()


def start_process(process: Any) -> None:
    """Start a process. Where the fork server was killed, multiprocessing starts another once its end is known."""
    for attempt in range(START_ATTEMPTS):
        try:
            process.start()
            return
        except (EOFError, OSError):
            if attempt == START_ATTEMPTS - 1:
                raise
            time.sleep(POLL_SECONDS)


def serve_jobs(pipe: connection.Connection, stop: Any, gpu: str | None = None) -> None:
    """Run the jobs that arrive in a pipe until it closes; the main function of a worker process.

    Ctrl-C is left to the parent. Where the parent ends, the job under way stops with a checkpoint; a job that does not
    stop in time is ended with its process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if gpu is not None:
        use_gpu(gpu)
    torch.set_num_threads(1)
    load_plugins()
    orphaned = threading.Event()

    def watch_parent() -> None:
        parent: Any = parent_process()
        parent.join()
        orphaned.set()
        time.sleep(ORPHAN_SECONDS)
        os._exit(1)

    def send(kind: str, value: Any = None) -> None:
        with suppress(OSError):  # the parent has closed the pipe
            pipe.send((kind, value))

    threading.Thread(target=watch_parent, daemon=True).start()
    while True:
        try:
            job = pipe.recv()
            send("done", job.run(lambda: stop.is_set() or orphaned.is_set(), lambda text: send("note", text)))
        except Interrupted:
            send("stopped")
        except (EOFError, OSError, KeyboardInterrupt):
            return


def train_in_processes(
    jobs: Sequence[Job], count: int, note: NoteCallback, gpus: Sequence[str] = ()
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the index and the summary (or `error`) of each job as it completes, from `count` processes.

    `gpus` names the GPUs that the processes share out: each process sees one. Ctrl-C and SIGTERM raise
    KeyboardInterrupt once the runs under way have written a checkpoint; a second signal does not wait for them. Closing
    the iterator early also waits for the checkpoints, and raises nothing.
    """
    stop = CONTEXT.Event()
    queue, attempts = JobQueue(jobs), [0] * len(jobs)
    workers: list[Worker] = []
    with catch_stop_signals() as stop_requested:
        try:
            while queue.waiting or any_busy(workers):
                if stop_requested():
                    raise KeyboardInterrupt
                while queue.waiting and len(workers) < count:
                    place = min(set(range(count)) - {worker.place for worker in workers})
                    workers.append(Worker(stop, place, gpus[place % len(gpus)] if gpus else None))
                for worker in workers:
                    if worker.index is None and (index := queue.take()) is not None:
                        worker.assign(index, jobs[index])
                yield from collect_results(workers, queue, attempts, note)
        finally:
            stop.set()
            try:
                while any_busy(workers):
                    list(collect_results(workers, queue, attempts, note))
            finally:
                for worker in workers:
                    worker.terminate()


def any_busy(workers: Sequence[Worker]) -> bool:
    """Return whether a worker has a job under way."""
    return any(worker.index is not None for worker in workers)


def collect_results(
    workers: list[Worker], queue: JobQueue, attempts: list[int], note: NoteCallback
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the results that have arrived and pass notes on to `note`.

    A worker whose process died is removed from `workers`, and its job is put back into the queue after its first
    attempt.
    """
    pipes = {worker.pipe: worker for worker in workers if worker.index is not None}
    for pipe in connection.wait(list(pipes), timeout=POLL_SECONDS):
        worker = pipes[pipe]
        try:
            kind, value = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join()
            workers.remove(worker)
            kind, value = "killed", worker.process.exitcode
        if kind == "note":
            note(value)
            continue
        index, worker.index = worker.index, None
        assert index is not None
        attempts[index] += 1
        if kind != "done" and attempts[index] == 1:
            queue.put_back(index)
            continue
        queue.mark_ended(index)
        reason = f"its process ended twice ({kind}, {value}): is there enough memory for so many jobs?"
        yield index, value if kind == "done" else {"error": reason}
