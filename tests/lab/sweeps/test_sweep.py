"""Sweeps: results, runs that are complete or missing, failures, interruption and torchrun."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from run_helpers import InterruptAtStep, RecordingListener, run_in_two_processes
from sweep_recipe import SMALL_RECIPE

from pomona.errors import PomonaError
from pomona.lab import Interrupted, Recipe, train
from pomona.lab.runs import run as run_module
from pomona.lab.runs.folder import FolderInUse, read_summary
from pomona.lab.sweeps import job, run_store
from pomona.lab.sweeps.axes import expand_runs
from pomona.lab.sweeps.run_store import RECORDS
from pomona.lab.sweeps.sweep import SweepInterrupted, sweep


def modification_times(folder: Path) -> dict[Path, int]:
    """Return when each file below a folder was modified, except sweep.json."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "sweep.json"}


AXES = {"method": ["dense", "oneshot(sparsity=0.5)"], "seed": [0, 1]}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Return the folder, the result and the callbacks of a sweep of four runs; a test that sweeps again copies it."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("sweep") / "out"
    calls: list[tuple] = []
    result = sweep(SMALL_RECIPE, AXES, out, jobs=1, on_result=lambda *t: calls.append(t))
    return out, result, calls


def test_a_sweep_gives_the_mean_over_seeds(swept):
    out, result, calls = swept
    dense, oneshot = result["cells"]
    assert (dense["method"], dense["sparsity"], oneshot["method"], oneshot["sparsity"]) == (
        "dense",
        0.0,
        "oneshot",
        0.5,
    )
    reached = [
        json.loads((run.folder / "summary.json").read_text())["accuracy"]
        for run in expand_runs(SMALL_RECIPE, AXES, out)
    ]
    assert (dense["mean"], dense["std"]) == (statistics.mean(reached[:2]), statistics.stdev(reached[:2]))
    assert oneshot["mean"] == statistics.mean(reached[2:])
    assert oneshot["runs"] == 2
    assert oneshot["setting"] == {"data": "digits", "epochs": 1, "seeds": [0, 1], "options": {"sparsity": 0.5}}
    assert {"model", "method", "sparsity", "setting", "mean", "std", "runs", "paper"} <= oneshot.keys()
    assert result["failed"] == []
    assert json.loads((out / "sweep.json").read_text()) == result
    assert [(t[0], t[1]) for t in calls] == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.fixture
def swept_copy(swept, tmp_path) -> Path:
    """Return a copy of the folder of that sweep, which a test may change."""
    return Path(shutil.copytree(swept[0], tmp_path / "copy"))


def test_complete_runs_are_not_trained_again(swept, swept_copy):
    out, result = swept_copy, swept[1]
    with pytest.raises(PomonaError, match="4 of the 4 runs exist in '.*' already: continue with --only-missing"):
        sweep(SMALL_RECIPE, AXES, out)
    before = modification_times(out)
    calls: list[tuple] = []
    again = sweep(SMALL_RECIPE, AXES, out, only_missing=True, on_result=lambda *t: calls.append(t))
    assert again["cells"] == result["cells"]
    assert calls == []
    assert modification_times(out) == before


def test_the_files_of_complete_runs_are_read_once(swept_copy, monkeypatch):
    opened = []
    open_file = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: opened.append(Path(path)) or open_file(path, *rest))
    records: list[Path] = []
    monkeypatch.setattr(run_store, "read_record", records.append)
    sweep(SMALL_RECIPE, AXES, swept_copy, only_missing=True)
    for name in ("recipe.toml", "summary.json"):
        assert sorted(path for path in opened if path.name == name) == sorted(swept_copy.glob(f"*/{name}"))
    assert records == []  # which are only read where a run is not complete in its folder


def test_missing_runs_are_added(swept_copy):
    out = swept_copy
    before = modification_times(out)
    more = sweep(SMALL_RECIPE, AXES | {"seed": [0, 1, 2]}, out, only_missing=True, jobs=1)
    assert [c["runs"] for c in more["cells"]] == [3, 3]
    after = modification_times(out)
    assert all(after[path] == stamp for path, stamp in before.items() if path != out)


def test_a_record_replaces_its_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep(SMALL_RECIPE, {"seed": [0, 1]}, "first", records=RECORDS, jobs=1)
    assert len(list(RECORDS.glob("seed?-*.json"))) == 2
    calls: list[tuple] = []
    result = sweep(
        SMALL_RECIPE, {"seed": [0, 1, 2]}, "second", only_missing=True, jobs=1, on_result=lambda *t: calls.append(t)
    )
    assert [t[2].recipe.seed for t in calls] == [2]
    assert (result["cells"][0]["runs"], result["cells"][0]["setting"]["seeds"]) == (3, [0, 1, 2])


def test_records_are_written_of_runs_that_were_complete(swept_copy, tmp_path):
    sweep(SMALL_RECIPE, AXES, swept_copy, only_missing=True, records=tmp_path / "records")
    written = {file.name.rpartition("-")[0] for file in (tmp_path / "records").iterdir()}
    assert written >= {"dense-seed0", "oneshot-50-seed1"}


def test_a_summary_of_other_settings_is_ignored(swept_copy):
    (first, *_) = expand_runs(SMALL_RECIPE, AXES, swept_copy)
    summary = first.load_summary()
    (first.folder / "summary.json").write_text(json.dumps(summary | {"fingerprint": "another"}))
    assert (first.load_summary(), first.state()) == (None, "begun")


@pytest.mark.parametrize("text", ["", "{}"])
def test_a_run_with_a_damaged_summary_is_trained_again(swept, swept_copy, text):
    (gone,) = swept_copy.glob("oneshot-50-seed1-*/summary.json")
    gone.write_text(text)
    calls: list[tuple] = []
    again = sweep(SMALL_RECIPE, AXES, swept_copy, only_missing=True, jobs=1, on_result=lambda *t: calls.append(t))
    assert [t[2].folder for t in calls] == [gone.parent]
    assert [c["mean"] for c in again["cells"]] == [c["mean"] for c in swept[1]["cells"]]


def test_a_failed_run_is_listed_and_the_others_continue(tmp_path):
    # Without a hidden layer there is nothing that dpf could prune.
    result = sweep(SMALL_RECIPE | {"model": "mlp(hidden=[])"}, {"method": ["dpf", "dense"]}, tmp_path, jobs=1)
    assert [c["method"] for c in result["cells"]] == ["dense"]
    (failed,) = result["failed"]
    assert failed["name"] == "dpf"
    assert "nothing to prune" in failed["error"]


def test_an_unexpected_error_is_listed_with_its_type(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a kernel\nis missing")

    monkeypatch.setattr(job, "train", broken)
    result = sweep(SMALL_RECIPE, {"seed": [0]}, tmp_path, jobs=1)
    assert result["failed"][0]["error"] == "RuntimeError: a kernel is missing"


def test_only_missing_continues_after_ctrl_c(tmp_path, swept):
    base = SMALL_RECIPE | {"train": {**SMALL_RECIPE["train"], "checkpoint_every": 0}}
    interrupt = InterruptAtStep(5)  # the second step of the second run
    with pytest.raises(
        SweepInterrupted, match="stopped with 1 of 4 runs complete in .*repeat the command with --only-missing"
    ):
        sweep(base, AXES, tmp_path, jobs=1, progress=lambda: interrupt)
    states = [run.state() for run in expand_runs(base, AXES, tmp_path)]
    assert states == ["complete", "begun", "missing", "missing"]
    calls: list[tuple] = []
    result = sweep(base, AXES, tmp_path, only_missing=True, jobs=1, on_result=lambda *t: calls.append(t))
    assert [(t[0], t[3]["step"]) for t in calls] == [(2, 3), (3, 3), (4, 3)]
    assert [c["mean"] for c in result["cells"]] == [c["mean"] for c in swept[1]["cells"]]


def test_a_file_as_folder_and_zero_jobs_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PomonaError, match="'.*file' is a file"):
        sweep(SMALL_RECIPE, {}, tmp_path / "file")
    with pytest.raises(PomonaError, match="jobs must be 1 or more, got 0"):
        sweep(SMALL_RECIPE, {}, tmp_path, jobs=0)


@pytest.mark.slow
def test_ctrl_c_lets_every_process_write_a_checkpoint(tmp_path):
    base = SMALL_RECIPE | {
        "train": {**SMALL_RECIPE["train"], "epochs": 100_000, "eval_every": 100_000, "checkpoint_every": 0}
    }
    axes = {"seed": [0, 1, 2]}
    runs = expand_runs(base, axes, tmp_path)

    def press() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not all((run.folder / "metrics.jsonl").exists() for run in runs[:2]):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(SweepInterrupted, match="stopped with 0 of 3 runs"):
        sweep(base, axes, tmp_path, jobs=2)
    assert [run.state() for run in runs] == ["begun", "begun", "missing"]
    assert all((run.folder / "checkpoint" / "state.json").is_file() for run in runs[:2])


def test_a_run_that_another_process_began_first_is_waited_for(tmp_path, monkeypatch):
    recipe, order = Recipe.load(SMALL_RECIPE), []

    def train_after_the_other(*arguments, **options):
        order.append(options["resume"])
        if len(order) == 1:  # between the look at the folder and the training, the other process trains the run
            train(recipe, tmp_path / "run")
        return train(*arguments, **options)

    monkeypatch.setattr(job, "train", train_after_the_other)
    result = job.Job(recipe, tmp_path / "run").run()
    assert result == read_summary(tmp_path / "run")
    assert order == [False, True]


def test_a_folder_with_foreign_files_fails_the_run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    assert "is not empty" in job.Job(Recipe.load(SMALL_RECIPE), tmp_path / "run").run()["error"]


def test_a_run_that_another_process_ended_meanwhile_is_not_trained_again(tmp_path, monkeypatch):
    recipe = Recipe.load(SMALL_RECIPE, ["train.checkpoint_every=0"])
    with pytest.raises(Interrupted):
        train(recipe, tmp_path / "run", stop=lambda: True)
    load, started = run_module.load_data, []

    def load_while_the_other_ends(*arguments, **options):
        if not started:
            started.append(True)
            train(recipe, tmp_path / "run", resume=True)
        return load(*arguments, **options)

    monkeypatch.setattr(run_module, "load_data", load_while_the_other_ends)
    with pytest.raises(FolderInUse, match="another process has trained in '.*run' meanwhile: repeat the command"):
        train(recipe, tmp_path / "run", resume=True)
    started.clear()
    listener = RecordingListener()
    (tmp_path / "run" / "summary.json").unlink()
    result = job.Job(recipe, tmp_path / "run").run(progress=listener)
    assert result == read_summary(tmp_path / "run")
    assert not [call for call in listener.calls if call[0] == "start"]  # the other process has finished it


TWO_SWEEPS = """
import os, sys, time
from pathlib import Path
from pomona.lab.sweeps.sweep import sweep
from run_helpers import RecordingListener

listener = RecordingListener()
Path({out!r} + sys.argv[1]).touch()
while not Path({out!r} + sys.argv[2]).exists():  # until the other sweep is ready too
    time.sleep(0.01)
result = sweep({recipe!r}, {axes!r}, {out!r}, only_missing=True, jobs=1, progress=lambda: listener)
assert not result["failed"], result["failed"]
print(len([call for call in listener.calls if call[0] == "start"]), result["cells"][0]["mean"])
"""


@pytest.mark.slow
def test_two_sweeps_share_the_runs_of_a_folder(tmp_path):
    options = SMALL_RECIPE["train"] | {"epochs": 200, "eval_every": 200}
    recipe, axes, out = SMALL_RECIPE | {"train": options}, {"seed": [0, 1, 2, 3, 4]}, str(tmp_path / "out")
    script = TWO_SWEEPS.format(recipe=recipe, axes=axes, out=out)
    paths = [str(Path(__file__).parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    both = [
        subprocess.Popen(
            [sys.executable, "-c", script, *pair],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        for pair in ("ab", "ba")
    ]
    trained, means = zip(*(process.communicate(timeout=300)[0].split() for process in both), strict=True)
    assert [process.returncode for process in both] == [0, 0]
    assert sum(map(int, trained)) == 5  # no run was trained twice
    assert min(map(int, trained)) >= 1
    assert means[0] == means[1]


@pytest.mark.slow
def test_processes_of_torchrun_train_each_run_together(tmp_path):
    recipe = Recipe.load(SMALL_RECIPE, ["train.drop_last=true", "train.batch_size=400"])
    run_in_two_processes(f"sweep({recipe.to_dict()!r}, {{'seed': [0, 1, 2]}}, {str(tmp_path / 'out')!r})")
    found = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert (found["cells"][0]["runs"], found["failed"]) == (3, [])
    assert {json.loads(f.read_text())["world"] for f in (tmp_path / "out").glob("*/summary.json")} == {2}


@pytest.mark.parametrize("options", [{"jobs": 2}, {"concurrent": 2}])
def test_torchrun_refuses_jobs_and_concurrent_runs(tmp_path, monkeypatch, options):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(PomonaError, match="the 4 processes of torchrun train each run together: leave out jobs"):
        sweep(SMALL_RECIPE, {}, tmp_path, **options)
