"""Sweeps on Ray: the same results as on this machine, also where workers vanish."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sweep_recipe import SMALL_RECIPE

from pomona.errors import PomonaError
from pomona.lab import Recipe
from pomona.lab.sweeps.axes import expand_runs
from pomona.lab.sweeps.engine import MAX_ATTEMPTS
from pomona.lab.sweeps.job import Job
from pomona.lab.sweeps.ray_engine import RayEngine, connected
from pomona.lab.sweeps.sweep import SweepInterrupted, sweep

ray = pytest.importorskip("ray")

PATHS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
AXES = {"method": ["dense", "dpf(sparsity=0.5, every=2)"], "seed": [0, 1]}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Start a Ray cluster on this machine, with two CPUs and two GPUs that nothing uses, for all tests here."""
    environment = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *PATHS])}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


def model_files(out: Path) -> dict[str, bytes]:
    """Return the trained weights of every run below a folder."""
    return {file.parent.name: file.read_bytes() for file in out.glob("*/model.safetensors")}


def means(result: dict) -> list[tuple]:
    """Return the figures of a sweep's cells."""
    return [(cell["method"], cell["sparsity"], cell["mean"], cell["std"], cell["runs"]) for cell in result["cells"]]


def long_recipe(epochs: int, **train) -> dict:
    """Return the small recipe with more epochs."""
    return SMALL_RECIPE | {"train": SMALL_RECIPE["train"] | {"epochs": epochs, "eval_every": epochs} | train}


def kill_workers_once(out: Path, names: set[str], killed: dict[str, int], ended: threading.Event) -> None:
    """Kill the process that trains each of the named runs, once it has written a checkpoint, until the sweep ends."""
    while names - killed.keys() and not ended.is_set():
        for name in names - killed.keys():
            if (out / name / "checkpoint" / "state.json").exists() and (process := folder_user(out / name)):
                os.kill(process, signal.SIGKILL)
                killed[name] = process
        time.sleep(0.01)


def folder_user(folder: Path) -> int | None:
    """Return the process that has a folder open, which is the one that trains in it."""
    for handle in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(handle) == str(folder):
                return int(handle.parts[2])
        except OSError:  # the process has ended
            continue
    return None


@pytest.mark.slow
def test_a_sweep_whose_workers_are_killed_gives_the_same_table_and_weights(tmp_path):
    torch.set_num_threads(1)
    recipe = long_recipe(400, checkpoint_every=20)
    plain = sweep(recipe, AXES, tmp_path / "plain", jobs=1)
    names = {run.folder.name for run in expand_runs(recipe, AXES, tmp_path / "ray")}
    killed: dict[str, int] = {}
    ended = threading.Event()
    killer = threading.Thread(target=kill_workers_once, args=(tmp_path / "ray", names, killed, ended))
    killer.start()
    notes: list[str] = []
    try:
        distributed = sweep(recipe, AXES, tmp_path / "ray", engine=RayEngine(), records=tmp_path, note=notes.append)
    finally:
        ended.set()
        killer.join()
    assert killed.keys() == names
    assert sum("its worker ended (WorkerCrashedError); it is taken up again" in text for text in notes) == 4
    assert means(distributed) == means(plain)
    assert distributed["failed"] == []
    assert model_files(tmp_path / "ray") == model_files(tmp_path / "plain")
    assert len(list(tmp_path.glob("*.json"))) == 4  # a record of each run


def test_a_sweep_on_ray_equals_the_plain_sweep(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    plain = sweep(SMALL_RECIPE, AXES, "plain", jobs=1)
    distributed = sweep(SMALL_RECIPE, AXES, "ray", engine=RayEngine(jobs=1))
    assert means(distributed) == means(plain)
    assert model_files(tmp_path / "ray") == model_files(tmp_path / "plain")


@dataclass(frozen=True)
class GpuJob(Job):
    """A job that returns the GPU that Ray has given to it, once so many jobs are under way."""

    together: int = 2

    def run(self, *args, **options):
        self.folder.mkdir()
        deadline = time.monotonic() + 60
        while len(list(self.folder.parent.iterdir())) < self.together and time.monotonic() < deadline:
            time.sleep(0.05)
        return {"gpu": os.environ["CUDA_VISIBLE_DEVICES"]}


@dataclass(frozen=True)
class DyingJob(Job):
    """A job that kills its process every time."""

    def run(self, *args, **options):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(("concurrent", "gpus"), [(None, ["0", "1"]), (2, ["0", "0"])])
def test_concurrent_runs_share_a_gpu(tmp_path, concurrent, gpus):
    recipe = Recipe.load(SMALL_RECIPE, ["train.device=cuda"])
    jobs = [GpuJob(recipe, tmp_path / f"run{k}") for k in range(2)]
    results = dict(RayEngine(concurrent=concurrent).train(jobs, print))
    assert sorted(result["gpu"] for result in results.values()) == gpus


@pytest.mark.slow
def test_a_run_whose_worker_always_dies_fails_alone(tmp_path):
    recipe = Recipe.load(SMALL_RECIPE)
    notes: list[str] = []
    jobs = [DyingJob(recipe, tmp_path / "dies"), Job(recipe, tmp_path / "lives")]
    results = dict(RayEngine().train(jobs, notes.append))
    assert f"its worker ended (WorkerCrashedError), {MAX_ATTEMPTS} times" in results[0]["error"]
    assert results[1]["seed"] == 0
    assert len(notes) == MAX_ATTEMPTS - 1


@pytest.mark.slow
def test_ctrl_c_lets_tasks_write_a_checkpoint(tmp_path):
    recipe, axes = long_recipe(100_000, checkpoint_every=0), {"seed": [0, 1, 2]}
    runs = expand_runs(recipe, axes, tmp_path)

    def press() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and sum((run.folder / "metrics.jsonl").exists() for run in runs) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(SweepInterrupted, match="stopped with 0 of 3 runs"):
        sweep(recipe, axes, tmp_path, engine=RayEngine())
    assert sorted(run.state() for run in runs) == ["begun", "begun", "missing"]
    assert len(list(tmp_path.glob("*/checkpoint/state.json"))) == 2


@pytest.mark.parametrize(
    ("engine", "settings", "message"),
    [
        (RayEngine(concurrent=2), [], "no run of this sweep uses one: leave out --concurrent"),
        (RayEngine(concurrent=99), [], "concurrent takes 1 to 24 runs on one GPU, got 99"),
        (RayEngine(), ["train.device=cuda:1"], "an engine chooses the GPU itself: set train.device"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(tmp_path, engine, settings, message):
    with pytest.raises(PomonaError, match=message):
        sweep(SMALL_RECIPE, {"seed": [0]}, tmp_path, overrides=settings, engine=engine)
    with pytest.raises(PomonaError, match="an engine has its own jobs and concurrent"):
        sweep(SMALL_RECIPE, {"seed": [0]}, tmp_path, engine=engine, jobs=2)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "[::1]:1"])
def test_an_address_without_a_cluster_is_refused_at_once(address):
    message = rf"there is no Ray cluster at '{re.escape(address)}' \(.*refused\): start one with `ray start --head`"
    disconnected = SimpleNamespace(is_initialized=lambda: False)
    with pytest.raises(PomonaError, match=message), connected(disconnected, address):
        pass
