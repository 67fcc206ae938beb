"""Engines, which train the runs of a sweep on other machines, and the loop that they have in common.

The machines share a file system. A run that was begun anywhere is resumed from its folder, so a job whose machine has
vanished is submitted again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Protocol

from ..runs.interruption import catch_stop_signals
from ..runs.recorder import NoteCallback
from .job import Job
from .job_queue import JobQueue
from .remote_job import RemoteResult

MAX_ATTEMPTS = 4  # machines or processes that may vanish under one run before it counts as failed


class Engine(Protocol):
    """What trains the jobs of a sweep in place of this machine."""

    def train(self, jobs: Sequence[Job], note: NoteCallback) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the index and the summary (or `error`) of each job as it completes."""
        ...


class Carrier(Protocol):
    """How an engine sends jobs to its machines."""

    def submit(self, jobs: Sequence[Job]) -> list[Hashable]:
        """Submit jobs, and return what stands for each of them."""
        ...

    def wait(self, submitted: Sequence[Hashable]) -> Sequence[Hashable]:
        """Wait a moment, and return those that have ended."""
        ...

    def fetch(self, ended: Any) -> tuple[RemoteResult, str]:
        """Return what a job has brought, and why where it has brought nothing."""
        ...

    def leave(self, submitted: Sequence[Hashable]) -> None:
        """Do what is due with jobs that have not ended when the sweep ends."""
        ...


class SweepSubmitted(Exception):
    """Raised when the runs of a sweep are submitted, and nobody waits for them."""

    def __init__(self, count: int, identifiers: Sequence[str]) -> None:
        super().__init__(
            f"{count} runs are submitted ({', '.join(identifiers)}): the same command with --only-missing shows what "
            "is complete, and with --wait waits for the rest."
        )
        self.count, self.identifiers = count, list(identifiers)


def train_remotely(
    jobs: Sequence[Job], carrier: Carrier, limit: int | None, note: NoteCallback
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the index and the summary (or `error`) of each job as it completes, with at most `limit` jobs submitted.

    Ctrl-C and SIGTERM raise KeyboardInterrupt.
    """
    queue, attempts = JobQueue(jobs), [0] * len(jobs)
    submitted: dict[Hashable, int] = {}
    with catch_stop_signals() as stop_requested:
        try:
            while queue.waiting or submitted:
                ready = take_ready(queue, (limit or len(jobs)) - len(submitted))
                if ready:
                    submitted |= dict(zip(carrier.submit([jobs[index] for index in ready]), ready, strict=True))
                ended = carrier.wait(list(submitted))
                if stop_requested():
                    raise KeyboardInterrupt
                for one in ended:
                    index = submitted.pop(one)
                    attempts[index] += 1
                    got, reason = carrier.fetch(one)
                    for text in got.notes:
                        note(text)
                    if got.result is None and attempts[index] < MAX_ATTEMPTS:
                        note(f"{jobs[index].recipe.name}: {reason}; it is taken up again.")
                        queue.put_back(index)
                        continue
                    queue.mark_ended(index)
                    yield index, got.result or {"error": f"{reason}, {attempts[index]} times: see its log."}
        finally:
            carrier.leave(list(submitted))


def take_ready(queue: JobQueue, count: int) -> list[int]:
    """Remove up to `count` jobs that are ready from the queue, and return their indices."""
    taken: list[int] = []
    while len(taken) < count and (index := queue.take()) is not None:
        taken.append(index)
    return taken


def in_levels(jobs: Sequence[Job]) -> Iterator[list[int]]:
    """Yield the indices of jobs in groups, such that a job needs only jobs of earlier groups."""
    queue = JobQueue(jobs)
    while level := take_ready(queue, len(jobs)):
        yield level
        for index in level:
            queue.mark_ended(index)
