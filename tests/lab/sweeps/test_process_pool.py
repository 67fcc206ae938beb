"""The process pool: a run whose process is killed is resumed once, each process has a GPU, and none is orphaned."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from sweep_recipe import SMALL_RECIPE

from pomona.lab import Recipe, train
from pomona.lab.sweeps import process_pool
from pomona.lab.sweeps.axes import expand_runs
from pomona.lab.sweeps.gpus import assignable_gpus
from pomona.lab.sweeps.job import Job
from pomona.lab.sweeps.process_pool import train_in_processes
from pomona.lab.sweeps.sweep import default_process_count, sweep, train_runs


@dataclass(frozen=True)
class KillingJob(Job):
    """A job that kills its process once for each file RUN.N beside its folder."""

    def run(self, *args, **options):
        for mark in sorted(self.folder.parent.glob(f"{self.folder.name}.*")):
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(*args, **options)


def test_a_run_whose_process_is_killed_is_resumed_once(tmp_path):
    recipes = [Recipe.load(SMALL_RECIPE, [f"seed={k}"]) for k in range(3)]
    jobs = [KillingJob(recipe, tmp_path / f"run{k}") for k, recipe in enumerate(recipes)]
    (tmp_path / "run0.1").touch()
    (tmp_path / "run1.1").touch()
    (tmp_path / "run1.2").touch()
    results = dict(train_in_processes(jobs, 2, note=lambda text: None))
    assert results.keys() == {0, 1, 2}
    assert "its process ended twice (killed, -9)" in results[1]["error"]
    for k in (0, 2):
        alone = train(recipes[k], tmp_path / "alone" / str(k))
        assert results[k]["accuracy"] == alone["accuracy"]
        a, b = (folder / "model.safetensors" for folder in (tmp_path / f"run{k}", tmp_path / "alone" / str(k)))
        assert a.read_bytes() == b.read_bytes()


@dataclass(frozen=True)
class ServerKillingJob(Job):
    """A job that kills the fork server and its process, once."""

    def run(self, *args, **options):
        mark = self.folder.with_suffix(".mark")
        if not mark.exists():
            mark.touch()
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(*args, **options)


@pytest.mark.slow
def test_a_killed_fork_server_is_started_again(tmp_path):
    recipe = Recipe.load(SMALL_RECIPE)
    results = list(train_in_processes([ServerKillingJob(recipe, tmp_path / "run")], 1, note=lambda text: None))
    assert results[0][1]["fingerprint"] == recipe.fingerprint()


def test_a_fork_server_that_is_killed_while_it_starts_a_process_is_asked_again(tmp_path, monkeypatch):
    start, errors = process_pool.CONTEXT.Process.start, [ConnectionRefusedError(), EOFError("unexpected EOF")]

    def fail_twice(process):
        if errors:
            raise errors.pop()
        start(process)

    monkeypatch.setattr(process_pool.CONTEXT.Process, "start", fail_twice)
    job = Job(Recipe.load(SMALL_RECIPE), tmp_path / "run")
    assert "error" not in dict(train_in_processes([job], 1, note=lambda text: None))[0]


def test_a_process_that_is_killed_without_a_job_is_replaced(tmp_path):
    jobs = [Job(Recipe.load(SMALL_RECIPE, [f"seed={k}"]), tmp_path / f"run{k}") for k in range(2)]
    results = train_in_processes(jobs, 1, note=lambda text: None)
    first = next(results)
    for process in process_pool.CONTEXT.active_children():
        process.kill()
        process.join()
    assert {first[0], next(results)[0]} == {0, 1}
    assert "error" not in first[1]
    assert train(jobs[1].recipe, jobs[1].folder, resume=True)["seed"] == 1
    assert list(results) == []


@dataclass(frozen=True)
class GpuJob(KillingJob):
    """A job that returns the GPU that its process sees, once four jobs are done: each needs a process of its own."""

    def run(self, *args, **options):
        super().run(*args, **options)
        self.folder.with_suffix(".done").touch()
        deadline = time.monotonic() + 120
        while len(list(self.folder.parent.glob("*.done"))) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        return {"gpu": os.environ["CUDA_VISIBLE_DEVICES"]}


def test_each_process_sees_one_gpu_and_its_successor_the_same(tmp_path):
    recipe = Recipe.load(SMALL_RECIPE)
    jobs = [GpuJob(recipe, tmp_path / f"run{k}") for k in range(4)]
    (tmp_path / "run1.1").touch()  # kills a process, and another one takes its place
    results = dict(train_in_processes(jobs, 4, lambda text: None, gpus=["3", "5", "GPU-af", "7"]))
    assert {result["gpu"] for result in results.values()} == {"3", "5", "GPU-af", "7"}


@pytest.fixture
def eight_gpus(monkeypatch):
    """Let this process believe that it has eight GPUs; processes that it starts have those of the machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def any_gpu(**train) -> dict:
    """Return the small recipe, for any GPU or, where there is none, for the CPU."""
    return SMALL_RECIPE | {"train": SMALL_RECIPE["train"] | {"device": "auto"} | train}


def test_a_plain_sweep_uses_every_gpu(tmp_path, monkeypatch, eight_gpus):
    started: list[str] = []

    class RecordingWorker(process_pool.Worker):
        def __init__(self, stop, place, gpu):
            started.append(gpu)
            super().__init__(stop, place, gpu)

    monkeypatch.setattr(process_pool, "Worker", RecordingWorker)
    results = dict(train_runs(expand_runs(any_gpu(), {"seed": list(range(9))}, tmp_path)))
    assert [results[k]["seed"] for k in range(9)] == list(range(9))
    assert started == list("01234567")


@pytest.mark.parametrize(
    ("device", "visible", "gpus"),
    [
        ("auto", None, list("01234567")),
        ("cuda", "6,GPU-af", ["6", "GPU-af"]),
        ("cuda:1", None, []),  # a certain GPU
        ("cpu", None, []),
    ],
)
def test_processes_share_out_the_visible_gpus(monkeypatch, eight_gpus, device, visible, gpus):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    recipes = [Recipe.load(any_gpu(device=device), [f"seed={k}"]) for k in range(2)]
    assert assignable_gpus(recipes) == gpus
    if device != "cpu":
        assert default_process_count(recipes) == max(len(gpus), 1)
    assert assignable_gpus([*recipes, Recipe.load(SMALL_RECIPE)]) == []


def wait_until(condition: Callable[[], bool], seconds: float = 180) -> None:
    """Wait until a condition holds; fail if it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def group_is_empty(group: int) -> bool:
    """Return whether every process of a process group has ended."""
    with suppress(ProcessLookupError):
        os.killpg(group, 0)
        return False
    return True


KILLED_SWEEP = """
from pomona.lab.sweeps.sweep import sweep

sweep({recipe!r}, {axes!r}, {out!r}, jobs=2)
"""


@pytest.mark.slow
def test_a_killed_sweep_leaves_no_process_and_its_runs_resume(tmp_path):
    # The only checkpoint is the one that a process writes when it notices that the sweep is gone.
    options = SMALL_RECIPE["train"] | {"epochs": 400, "eval_every": 400, "checkpoint_every": 0}
    recipe, axes, out = SMALL_RECIPE | {"train": options}, {"seed": [0, 1]}, tmp_path / "killed"
    runs = expand_runs(recipe, axes, out)
    script = KILLED_SWEEP.format(recipe=recipe, axes=axes, out=str(out))
    killed = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    wait_until(lambda: all((run.folder / "metrics.jsonl").exists() for run in runs))
    killed.kill()
    killed.wait()
    wait_until(lambda: group_is_empty(killed.pid))
    assert [run.state() for run in runs] == ["begun", "begun"]
    assert all((run.folder / "checkpoint" / "state.json").is_file() for run in runs)
    torch.set_num_threads(1)
    resumed = sweep(recipe, axes, out, only_missing=True, jobs=1)
    whole = sweep(recipe, axes, tmp_path / "whole", jobs=1)
    assert [cell["mean"] for cell in resumed["cells"]] == [cell["mean"] for cell in whole["cells"]]
    for run in runs:
        file = Path(run.folder.name) / "model.safetensors"
        assert (out / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
