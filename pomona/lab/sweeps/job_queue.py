"""The queue of a sweep's jobs: each waits for the jobs of the same sweep whose trained weights its run reads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ..runs.folder import is_in_use
from .job import Job

POLL_SECONDS = 0.2  # how often a thread that waits for a job looks whether it should stop


class JobQueue:
    """Jobs in their order, taken by threads or by one process; a job is ready once those that it needs have ended.

    A job whose needed job has failed is ready too: its run finds no weights and fails with a sentence that says so.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.waiting = list(range(len(jobs)))
        self.changed = threading.Condition()
        indices = {job.folder.resolve(): index for index, job in enumerate(jobs)}
        required = [[run.resolve() for run in job.recipe.required_runs()] for job in jobs]
        self.needed = [{indices[run] for run in runs if run in indices} for runs in required]  # jobs that must end

    def take(self) -> int | None:
        """Remove the first job that is ready and return its index; None if none is ready.

        A run that another process trains comes last: that process may end it meanwhile.
        """
        with self.changed:
            ready = [index for index in self.waiting if not self.needed[index]]
            if not ready:
                return None
            chosen = next((index for index in ready if not is_in_use(self.jobs[index].folder)), ready[0])
            self.waiting.remove(chosen)
            return chosen

    def wait_and_take(self, stop: Callable[[], bool]) -> int | None:
        """Remove a job like `take`, once one is ready; return None if no job waits any more, or `stop()` is true."""
        with self.changed:
            while self.waiting and not stop():
                ready = self.take()
                if ready is not None:
                    return ready
                self.changed.wait(POLL_SECONDS)
            return None

    def put_back(self, index: int) -> None:
        """Return a job that was taken and has not ended; it is the first again."""
        with self.changed:
            self.waiting.insert(0, index)

    def mark_ended(self, index: int) -> None:
        """Let the jobs that need this one begin."""
        with self.changed:
            for others in self.needed:
                others.discard(index)
            self.changed.notify_all()
