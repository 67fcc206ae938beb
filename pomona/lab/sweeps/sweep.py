"""Sweeps: train a recipe for every combination of values on some axes, and compare the results."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from pomona.errors import require
from pomona.integrations.trackers import parse_names

from ..recipes.recipe import Recipe
from ..runs import durable_files, environment
from ..runs.distributed import distributed_context, select_device
from ..runs.folder import encode_json
from ..runs.interruption import Interrupted
from ..runs.recorder import NoteCallback, ProgressListener
from .axes import Axes, SweepRun, expand_runs
from .concurrent_runs import free_gpu_memory, train_concurrently
from .engine import Engine
from .gpus import assignable_gpus
from .job import Job
from .job_queue import JobQueue
from .process_pool import train_in_processes
from .result_table import make_cells
from .run_store import RunStore, StoredRun, write_record

ResultCallback = Callable[[int, int, SweepRun, Mapping[str, Any]], None]  # done, total, run, summary or error


class SweepInterrupted(Exception):
    """Raised when a sweep is stopped by Ctrl-C; the runs that were begun can be resumed."""

    def __init__(self, out: Path, done: int, total: int) -> None:
        super().__init__(
            f"stopped with {done} of {total} runs complete in '{out}': "
            "repeat the command with --only-missing to continue."
        )
        self.out, self.done, self.total = out, done, total


def sweep(
    source: str | Path | Mapping[str, Any],
    axes: Axes | None = None,
    out: str | Path = "runs/sweep",
    *,
    overrides: Sequence[str] = (),
    only_missing: bool = False,
    records: Path | None = None,
    on_result: ResultCallback | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train every run of a sweep in `out/NAME-FINGERPRINT` and return the result, which is also in `out/sweep.json`.

    With `only_missing`, runs that were begun are resumed, and runs that are complete in `out` or have a record are not
    trained again. With `records`, a record of each finished run is written to that folder. A run that fails is listed
    under `failed`, and the others continue. `on_result(done, total, run, summary)` is called after every run; the
    other options are those of `train_runs`.

    Raises:
        SweepInterrupted: on Ctrl-C, once the runs under way have written a checkpoint.
    """
    out, started = Path(out), time.perf_counter()
    runs = expand_runs(source, axes or {}, out, overrides)
    refuse_existing_runs(out, runs, only_missing)
    store = RunStore((out,) if only_missing else (), (), expected={run.folder: run.recipe for run in runs})
    if only_missing and not all(store.find_covering_run(run.recipe) for run in runs):
        store.add_records()
    finished = {i: store.find_result(run.recipe) for i, run in enumerate(runs)}
    results: dict[int, dict[str, Any]] = {i: one.summary for i, one in finished.items() if one and one.summary}
    remaining = [i for i in range(len(runs)) if i not in results]
    for stored in finished.values():
        write_record(stored, records)
    try:
        with closing(train_runs([runs[i] for i in remaining], **options)) as coming:
            for k, result in coming:
                run = runs[remaining[k]]
                results[remaining[k]] = result
                if "error" not in result:
                    write_record(StoredRun(run.recipe, run.folder, result), records)
                if on_result is not None:
                    on_result(len(results), len(runs), run, result)
    except (Interrupted, KeyboardInterrupt) as stopped:
        done = sum("error" not in result for result in results.values())
        raise SweepInterrupted(out, done, len(runs)) from stopped
    comparison = summarize_runs(runs, [results[i] for i in range(len(runs))])
    comparison |= {"seconds": time.perf_counter() - started, "out": str(out), **environment.describe_environment()}
    if distributed_context().is_first:
        durable_files.replace_shared_file(out / "sweep.json", encode_json(comparison))
    return comparison


def train_runs(
    runs: Sequence[SweepRun],
    *,
    jobs: int | None = None,
    concurrent: int | None = None,
    data_dir: str | Path | None = None,
    progress: Callable[[], ProgressListener] | None = None,
    note: NoteCallback = warnings.warn,
    trackers: Sequence[str] = (),
    engine: Engine | None = None,
) -> Generator[tuple[int, dict[str, Any]], None, None]:
    """Yield the index and the summary (or `error`) of each run as it completes.

    `jobs` is the number of processes, each with one CPU thread; by default one per core, or one per GPU where the runs
    use any GPU. `concurrent` trains that many runs at once on the GPU. A run that reads the weights of another one in
    `runs` waits for it. `progress()` makes the progress display of a run where there is one process. `trackers` are
    those of `train`, in the folder of each run. An `engine` trains the runs on other machines, as many at once as it
    was made for.
    """
    require(
        engine is None or (jobs is None and concurrent is None),
        "an engine has its own jobs and concurrent: give them to the engine.",
    )
    require(jobs is None or jobs >= 1, f"jobs must be 1 or more, got {jobs}.")
    require(
        jobs is None or concurrent is None,
        "runs are trained concurrently on one GPU or in several processes: give concurrent or jobs.",
    )
    world_size = distributed_context().world_size
    require(
        world_size == 1 or (concurrent is None and jobs in (None, 1) and engine is None),
        f"the {world_size} processes of torchrun train each run together: leave out jobs, concurrent and engine.",
    )
    names, recipes = parse_names(trackers), [run.recipe for run in runs]
    queued = [Job(run.recipe, run.folder, data_dir, names) for run in runs]
    if engine is not None:
        yield from engine.train(queued, note)
    elif concurrent is not None and queued:
        yield from train_concurrently(queued, concurrent, note)
    elif (count := min(jobs or default_process_count(recipes), len(queued))) > 1:
        yield from train_in_processes(queued, count, note, assignable_gpus(recipes))
    else:
        waiting = JobQueue(queued)
        while (index := waiting.take()) is not None:
            result = queued[index].run(note=note, progress=None if progress is None else progress())
            waiting.mark_ended(index)
            yield index, result
            if torch.cuda.is_initialized():
                free_gpu_memory()


def default_process_count(recipes: Sequence[Recipe]) -> int:
    """Return one process per core, or per GPU where the recipes train on any GPU.

    Under torchrun, and where a recipe trains on a certain GPU or some train on a CPU and others do not, it is one.
    """
    if distributed_context().world_size > 1:
        return 1
    if gpus := assignable_gpus(recipes):
        return len(gpus)
    if any(select_device(recipe.train.device).type != "cpu" for recipe in recipes):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def summarize_runs(runs: Sequence[SweepRun], results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the cells of the result table, and the runs that failed."""
    pairs = list(zip(runs, results, strict=True))
    failed = [
        {"name": run.recipe.name, "folder": str(run.folder), "error": result["error"]}
        for run, result in pairs
        if "error" in result
    ]
    finished = [(run.recipe, run.setting, result) for run, result in pairs if "error" not in result]
    return {"cells": make_cells(finished), "failed": failed}


def refuse_existing_runs(out: Path, runs: Sequence[SweepRun], only_missing: bool) -> None:
    """Raise PomonaError where `out` is a file, or where it holds some of the runs and `only_missing` is not set."""
    require(out.is_dir() or not out.exists(), f"'{out}' is a file: give a folder for the sweep with --out.")
    begun = [] if only_missing else [run for run in runs if run.state() != "missing"]
    require(
        not begun,
        f"{len(begun)} of the {len(runs)} runs exist in '{out}' already: continue with --only-missing, "
        "or give another folder with --out.",
    )
