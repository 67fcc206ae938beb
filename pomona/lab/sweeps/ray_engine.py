"""The engine for clusters of Ray: each run is a task, packed on GPUs by the share of one that it takes.

A task whose worker or machine vanishes is submitted again, and its run continues from the checkpoint in its folder.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pomona.errors import PomonaError, require

from ..runs.recorder import NoteCallback
from .concurrent_runs import MAX_CONCURRENT
from .engine import train_remotely
from .job import Job
from .remote_job import RemoteJob, RemoteResult, make_remote, needs_gpu

POLL_SECONDS = 0.5  # how often the sweep looks for Ctrl-C while it waits for results
CONNECT_SECONDS = 10  # how long the head of a cluster may take to accept a connection
STOP_SECONDS = 120  # how long tasks may take to write their checkpoints after Ctrl-C


@dataclass(frozen=True)
class RayEngine:
    """Runs as tasks of a Ray cluster.

    `address` is that of the cluster, such as "auto", "HOST:6379" or "ray://HOST:10001"; by default RAY_ADDRESS, a
    cluster that runs on this machine, or else a new one on this machine. `concurrent` runs share a GPU. `jobs` limits
    how many runs are submitted at once.
    """

    address: str | None = None
    concurrent: int | None = None
    jobs: int | None = None

    def train(self, jobs: Sequence[Job], note: NoteCallback) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the index and the summary (or `error`) of each job as it completes.

        Ctrl-C and SIGTERM raise KeyboardInterrupt once the runs under way have written a checkpoint.
        """
        concurrent = self.concurrent or 1
        require(
            1 <= concurrent <= MAX_CONCURRENT,
            f"concurrent takes 1 to {MAX_CONCURRENT} runs on one GPU, got {self.concurrent}.",
        )
        ray = import_ray()
        if not jobs:
            return
        with connected(ray, self.address):
            has_gpus = ray.cluster_resources().get("GPU", 0) > 0
            on_gpu = [job for job in jobs if needs_gpu(job.recipe, has_gpus)]
            require(
                self.concurrent is None or bool(on_gpu),
                "concurrent runs share a GPU, and no run of this sweep uses one: leave out --concurrent.",
            )
            if on_gpu and not has_gpus:
                note("the Ray cluster has no GPU: the runs wait until one joins.")
            yield from train_remotely(jobs, RayCarrier(ray, 1 / concurrent, has_gpus), self.jobs, note)


@dataclass(frozen=True)
class RayCarrier:
    """Tasks of the cluster that this process is connected to, each with one CPU and this share of a GPU."""

    ray: Any
    share: float
    has_gpus: bool

    def submit(self, jobs: Sequence[Job]) -> list[Any]:
        """Submit jobs, and return the reference of each one's result."""
        references = []
        for job in jobs:
            share = self.share if needs_gpu(job.recipe, self.has_gpus) else 0
            task = self.ray.remote(num_cpus=1, num_gpus=share, max_retries=0)(run_remote_job)
            references.append(task.options(name=job.recipe.name).remote(make_remote(job)))
        return references

    def wait(self, submitted: Sequence[Any]) -> Sequence[Any]:
        """Wait a moment, and return those that have ended."""
        return self.ray.wait(list(submitted), num_returns=len(submitted), timeout=POLL_SECONDS)[0]

    def fetch(self, ended: Any) -> tuple[RemoteResult, str]:
        """Return what a task has brought, and why where it has brought nothing."""
        try:
            return self.ray.get(ended), "its worker was told to stop"
        except self.ray.exceptions.RayTaskError as error:  # a run reports its errors; this one is of what is around it
            cause = " ".join(str(error.cause).split())
            return RemoteResult({"error": f"{type(error.cause).__name__}: {cause}"}), ""
        except self.ray.exceptions.RayError as error:
            return RemoteResult(None), f"its worker ended ({type(error).__name__})"

    def leave(self, submitted: Sequence[Any]) -> None:
        """Let tasks under way write a checkpoint, and cancel those that wait."""
        if not submitted:
            return
        for reference in submitted:
            with suppress(self.ray.exceptions.RayError):
                self.ray.cancel(reference)  # SIGINT, which a run answers with a checkpoint
        self.ray.wait(list(submitted), num_returns=len(submitted), timeout=STOP_SECONDS)


def run_remote_job(remote: RemoteJob) -> RemoteResult:
    """Train a run; the function of a Ray task."""
    return remote.run()


def import_ray() -> Any:
    """Return the module `ray`; raise PomonaError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise PomonaError("the engine 'ray' needs the package ray: pip install 'pomona[ray]'.") from error
    return ray


@contextmanager
def connected(ray: Any, address: str | None) -> Iterator[None]:
    """Connect to a cluster or start one, unless this process is connected; leave it as it was."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        reach(address)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PomonaError(
            f"there is no Ray cluster at '{address}' ({reason}): start one with `ray start --head`, or give another "
            "address."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def reach(address: str | None) -> None:
    """Open a connection to the host and port of an address, if it has one: Ray itself would try for minutes."""
    found = re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:(\d+)", address or "")
    if found is not None:
        socket.create_connection((found[1], int(found[2])), CONNECT_SECONDS).close()
