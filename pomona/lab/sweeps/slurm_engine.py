"""The engine for clusters of Slurm, through submitit: the runs of a sweep are job arrays.

A run whose time is up, or whose machine is taken from it, writes a checkpoint and is queued again. The folder `slurm`
beside the runs has the submitted job files, the logs, and which run is which job: a sweep that is repeated takes up the
jobs that are still queued, and submits none of them twice.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pomona.errors import PomonaError, require

from ..runs import durable_files
from ..runs.folder import read_finished_run
from ..runs.recorder import NoteCallback
from .engine import SweepSubmitted, in_levels, train_remotely
from .job import Job
from .remote_job import RemoteJob, RemoteResult, make_remote, needs_gpu

POLL_SECONDS = 1.0  # how often the sweep looks whether jobs have ended
MAX_ARRAY = 1000  # jobs of one array; Slurm's default limit is 1,001
MAX_TIMEOUTS = 1000  # how often a run may use up its time and be queued again
DEFAULT_TIME = 240  # minutes
JOBS_FILE = "jobs.json"  # the job of each run, by the name of its folder
QUEUED = ("PENDING", "RUNNING", "REQUEUED", "COMPLETING", "CONFIGURING", "SUSPENDED")
GPU_OPTIONS = ("gpus_per_node", "gpus_per_task", "gres")  # each of which replaces the GPU that a run asks for


@dataclass(frozen=True)
class SlurmEngine:
    """Runs as jobs of Slurm.

    `options` are those of sbatch: partition, account, qos, time (minutes or HH:MM:SS), mem, cpus_per_task, constraint,
    and so on; `gpus` is the number of GPUs of a run, by default 1 unless its recipe is for the CPU. At most `jobs` runs
    are trained at once. Without `wait` the runs are submitted, and SweepSubmitted is raised.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    jobs: int | None = None
    wait: bool = True

    def train(self, jobs: Sequence[Job], note: NoteCallback) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the index and the summary (or `error`) of each job as it completes.

        Ctrl-C ends the waiting; the jobs remain with Slurm.
        """
        carrier = SlurmCarrier(import_submitit(), self.options, self.jobs, note)
        if not jobs:
            return
        if self.wait:
            yield from train_remotely(jobs, carrier, None, note)
            return
        before: list[Any] = []
        for level in in_levels(jobs):
            before = carrier.submit([jobs[index] for index in level], after=before)
        raise SweepSubmitted(len(jobs), carrier.identifiers)


class SlurmTask:
    """The function of a job: train a run, and queue it again after a checkpoint when Slurm asks for the machine."""

    def __call__(self, remote: RemoteJob) -> RemoteResult:
        """Train the run; Slurm's signal before the end of the time stops it with a checkpoint."""
        told: list[Any] = []
        queue_again = signal.signal(signal.SIGUSR2, lambda number, frame: told.append((number, frame)))
        result = remote.run(stop=lambda: bool(told))
        if told and result.result is None and callable(queue_again):
            queue_again(*told[0])  # submitit's handler, which ends the process
        return result

    def checkpoint(self, remote: RemoteJob) -> Any:
        """Return what is queued again: the same run, which then finds its checkpoint."""
        return import_submitit().helpers.DelayedSubmission(self, remote)


@dataclass
class SlurmCarrier:
    """Job arrays, all with the same options."""

    submitit: Any
    options: Mapping[str, Any]
    parallel: int | None
    note: NoteCallback
    identifiers: list[str] = field(default_factory=list)  # of the arrays that were submitted
    earlier: dict[str, Job] = field(default_factory=dict)  # by identifier, the runs that an earlier sweep submitted

    def submit(self, jobs: Sequence[Job], after: Sequence[Any] = ()) -> list[Any]:
        """Submit jobs of one folder as arrays that begin when the jobs `after` have ended; return Slurm's jobs."""
        folder = jobs[0].folder.parent.resolve() / "slurm"
        known = self.find_queued(folder, jobs)
        new = [job for job in jobs if job.folder.name not in known]
        for start in range(0, len(new), MAX_ARRAY):
            part = new[start : start + MAX_ARRAY]
            executor = self.make_executor(folder, part, after)
            try:
                array = executor.map_array(SlurmTask(), [make_remote(job) for job in part])
            except self.submitit.core.utils.FailedJobError as error:
                raise PomonaError(f"sbatch refuses the jobs ({shorten(error)}): change --slurm.") from error
            known |= {job.folder.name: one for job, one in zip(part, array, strict=True)}
            self.identifiers.append(array[0].job_id.split("_")[0])
        write_jobs(folder, {name: one.job_id for name, one in known.items()})
        return [known[job.folder.name] for job in jobs]

    def find_queued(self, folder: Path, jobs: Sequence[Job]) -> dict[str, Any]:
        """Return the jobs that an earlier sweep has submitted and Slurm has not ended, by the folder's name."""
        stored, by_name = read_jobs(folder), {job.folder.name: job for job in jobs}
        found = {name: self.submitit.SlurmJob(folder, stored[name]) for name in by_name if name in stored}
        if found:
            self.submitit.SlurmJob.watcher.update()  # asks for all of them at once
        queued = {name: one for name, one in found.items() if one.get_info(mode="cache").get("State") in QUEUED}
        if queued:
            self.note(f"{len(queued)} runs are queued already: they are not submitted again.")
        self.earlier |= {one.job_id: by_name[name] for name, one in queued.items()}
        self.identifiers += dict.fromkeys(one.job_id.split("_")[0] for one in queued.values())
        return queued

    def make_executor(self, folder: Path, jobs: Sequence[Job], after: Sequence[Any]) -> Any:
        """Return submitit's executor with the options of sbatch."""
        on_gpu = any([needs_gpu(job.recipe, True) for job in jobs])  # noqa: C419  every recipe is checked
        given = dict(self.options)
        gpus = given.pop("gpus", int(on_gpu))
        values = {"job_name": "pomona", "time": DEFAULT_TIME, **given}
        values["time"] = parse_minutes(values["time"])
        if gpus and not any(option in given for option in GPU_OPTIONS):
            values["gpus_per_node"] = gpus
        if self.parallel is not None:
            values["array_parallelism"] = self.parallel
        if after:
            values["dependency"] = ":".join(["afterany", *dict.fromkeys(one.job_id.split("_")[0] for one in after)])
        try:
            executor = self.submitit.SlurmExecutor(folder, max_num_timeout=MAX_TIMEOUTS)
        except RuntimeError as error:  # there is no srun
            raise PomonaError(
                "there is no srun here: start the sweep on a machine of a Slurm cluster, or leave out --engine."
            ) from error
        known = executor._valid_parameters()
        others = {name.replace("_", "-"): value for name, value in values.items() if name not in known}
        executor.update_parameters(
            **{name: value for name, value in values.items() if name in known}, additional_parameters=others
        )
        return executor

    def wait(self, submitted: Sequence[Any]) -> Sequence[Any]:
        """Wait a moment, and return those that have ended."""
        time.sleep(POLL_SECONDS)
        return [one for one in submitted if one.done()]

    def fetch(self, ended: Any) -> tuple[RemoteResult, str]:
        """Return what a job has brought, and why where it has brought nothing.

        Of a job that an earlier sweep submitted, only the summary in the run's folder is read: a pickle in a folder of
        unknown origin is not.
        """
        reason = f"Slurm ended its job {ended.job_id} ({ended.state})"
        if (job := self.earlier.get(ended.job_id)) is not None:
            return RemoteResult(read_finished_run(job.folder, job.recipe, job.recipe.fingerprint())), reason
        try:
            return ended.result(), "Slurm told its job to stop"
        except self.submitit.core.utils.FailedJobError as error:  # a run reports its errors; this one is around it
            return RemoteResult({"error": shorten(error)}), ""
        except self.submitit.core.utils.UncompletedJobError:
            return RemoteResult(None), reason

    def leave(self, submitted: Sequence[Any]) -> None:
        """Say how to end the jobs that remain with Slurm."""
        if submitted:
            arrays = dict.fromkeys(one.job_id.split("_")[0] for one in submitted)
            self.note(f"{len(submitted)} runs remain with Slurm: end them with scancel {' '.join(arrays)}.")


def import_submitit() -> Any:
    """Return the module `submitit`; raise PomonaError where it is not installed."""
    try:
        import submitit
    except ImportError as error:
        raise PomonaError("the engine 'slurm' needs the package submitit: pip install 'pomona[slurm]'.") from error
    return submitit


def parse_minutes(value: Any) -> int:
    """Return a time limit in minutes: a number of them, or as sbatch takes it, such as "8:00:00" or "2-12"."""
    text = str(value)
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    require(
        re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text) is not None and int(text.replace("-", "").replace(":", "")) > 0,
        f"time takes minutes, HH:MM:SS or DAYS-HH, got {text!r}.",
    )
    first = "hours" if dash or len(parts) == 3 else "minutes"
    factors = {"hours": (60.0, 1.0, 1 / 60), "minutes": (1.0, 1 / 60)}[first]
    minutes = 1440 * int(days or 0) + sum(factor * int(part) for factor, part in zip(factors, parts, strict=False))
    return max(1, round(minutes))


def read_jobs(folder: Path) -> dict[str, str]:
    """Return Slurm's job of each run, by the name of its folder."""
    with suppress(OSError, ValueError):
        found = json.loads((folder / JOBS_FILE).read_bytes())
        if isinstance(found, dict):
            return {str(name): str(identifier) for name, identifier in found.items()}
    return {}


def write_jobs(folder: Path, jobs: Mapping[str, str]) -> None:
    """Add jobs to those that are stored."""
    folder.mkdir(parents=True, exist_ok=True)
    durable_files.replace_shared_file(folder / JOBS_FILE, json.dumps({**read_jobs(folder), **jobs}, indent=1).encode())


def shorten(error: Exception) -> str:
    """Return an error's text in one line, of a long one the end."""
    return " ".join(str(error).split())[-300:]
