"""Trackers: what each of them stores, resumed runs, tracked trainings, and trackers that fail."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from run_helpers import StopAfter, digits_recipe, have_same_weights, read_metrics, untimed_metrics
from tracker_readers import READERS

from pomona.cli import main
from pomona.errors import PomonaError
from pomona.integrations import trackers
from pomona.integrations.trackers import TRACKERS, Tracking, parse_names
from pomona.lab import Interrupted, train
from pomona.lab.sweeps.axes import SweepRun
from pomona.lab.sweeps.sweep import train_runs

CONFIG = {"name": "mine", "optimizer": {"lr": 0.25}}
INSTALLED = [name for name, tracker in TRACKERS.items() if importlib.util.find_spec(tracker.package)]


class MemoryTracker:
    """A tracker that remembers its calls, and fails in one of them."""

    package, distribution = "json", "json"
    calls: list[tuple]
    fails: str | None

    def remember(self, action, *arguments):
        self.calls.append((action, *arguments))
        if action == self.fails:
            raise RuntimeError("the disk is full.\nTraceback")

    def start(self, folder, name, config, step):
        self.remember("start", folder, name, config, step)

    def log(self, step, values):
        self.remember("log", step, values)

    def finish(self, complete):
        self.remember("finish", complete)


@pytest.fixture
def memory(monkeypatch):
    """Register a tracker called `memory`, and return its class."""
    monkeypatch.setitem(TRACKERS, "memory", MemoryTracker)
    monkeypatch.setattr(MemoryTracker, "calls", [], raising=False)
    monkeypatch.setattr(MemoryTracker, "fails", None, raising=False)
    return MemoryTracker


def small_recipe(**options):
    """Return a recipe of six steps for each of three epochs that is trained in a second."""
    return digits_recipe(model="mlp(hidden=[8])", **options)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_stores_the_configuration_and_the_values_of_both_sessions(tmp_path, name):
    pytest.importorskip(TRACKERS[name].package)
    first = Tracking(name, tmp_path, note=pytest.fail)
    first.start("mine", CONFIG)
    first.log(1, {"loss": 0.5, "note": "text is not tracked", "layers": [1, 2]})
    first.log(2, {"loss": 0.25, "update/flips": 3})
    first.finish(complete=False)
    second = Tracking([name], tmp_path, note=pytest.fail)
    second.start("mine", CONFIG, step=2)
    second.log(3, {"loss": 0.125})
    second.finish()
    config, values = READERS[name](tmp_path / name)
    assert "lr" in config
    assert "0.25" in config
    assert values == {"loss": [(1, 0.5), (2, 0.25), (3, 0.125)], "update/flips": [(2, 3.0)]}
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_tensorboard_hides_the_steps_after_the_last_checkpoint(tmp_path):
    pytest.importorskip("tensorboard")
    for step_before, values in ((0, [(1, 1.0), (2, 2.0), (3, 9.0)]), (2, [(3, 3.0), (4, 4.0)])):
        tracking = Tracking("tensorboard", tmp_path)
        tracking.start("mine", CONFIG, step_before)
        for step, value in values:
            tracking.log(step, {"loss": value})
        tracking.finish()
    assert READERS["tensorboard"](tmp_path / "tensorboard")[1]["loss"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


def test_a_tracked_run_is_the_untracked_one(tmp_path):
    plain = train(small_recipe(), tmp_path / "plain")
    notes: list[str] = []
    tracked = train(small_recipe(), tmp_path / "tracked", trackers=INSTALLED, note=notes.append)
    assert not notes
    assert have_same_weights(tmp_path / "plain", tmp_path / "tracked")
    assert untimed_metrics(tmp_path / "plain") == untimed_metrics(tmp_path / "tracked")
    assert plain["fingerprint"] == tracked["fingerprint"]
    assert plain.keys() == tracked.keys()
    names = {path.name for path in (tmp_path / "tracked").iterdir()} - {
        path.name for path in (tmp_path / "plain").iterdir()
    }
    assert names == ({"tracking"} if INSTALLED else set())
    for folder in ("recipe.toml", "masks.safetensors"):
        assert (tmp_path / "plain" / folder).read_bytes() == (tmp_path / "tracked" / folder).read_bytes()
    for name in INSTALLED:
        assert_equals_metrics(tmp_path / "tracked", name)


def assert_equals_metrics(run: Path, name: str) -> None:
    """Assert that a tracker has the values of a run's metrics.jsonl, each once."""
    _, values = READERS[name](run / "tracking" / name)
    for kind, key, prefix in (("epoch", "loss", ""), ("epoch", "accuracy", ""), ("update", "sparsity", "update/")):
        expected = [(row["step"], pytest.approx(row[key], rel=1e-6)) for row in read_metrics(run, kind)]
        assert values[prefix + key] == expected
    assert not values.keys() & {"kind", "stage", "step", "layers", "update/layers"}


def test_a_resumed_run_continues_its_trackers(tmp_path):
    with pytest.raises(Interrupted):
        train(small_recipe(), tmp_path / "run", trackers=INSTALLED, stop=StopAfter(8))
    train(small_recipe(), tmp_path / "run", trackers=INSTALLED, resume=True)
    for name in INSTALLED:
        assert_equals_metrics(tmp_path / "run", name)


def test_trackers_receive_the_recipe_the_step_and_the_end(tmp_path, memory):
    with pytest.raises(Interrupted):
        train(small_recipe(), tmp_path / "run", trackers=["memory"], stop=StopAfter(8))
    assert memory.calls[0][1:3] == (tmp_path / "run" / "tracking" / "memory", "test")
    assert memory.calls[0][3]["optimizer"]["lr"] == 0.1
    assert (memory.calls[0][4], memory.calls[-1]) == (0, ("finish", False))
    memory.calls.clear()
    train(small_recipe(), tmp_path / "run", trackers=["memory"], resume=True)
    assert (memory.calls[0][4], memory.calls[-1]) == (8, ("finish", True))
    memory.calls.clear()
    train(small_recipe(), tmp_path / "run", trackers=["memory"], resume=True)  # it is complete
    assert memory.calls == []


@pytest.mark.parametrize("action", ["start", "log", "finish"])
def test_training_goes_on_where_a_tracker_fails(tmp_path, memory, monkeypatch, action):
    monkeypatch.setattr(memory, "fails", action)
    notes: list[str] = []
    summary = train(small_recipe(epochs=2), tmp_path / "run", trackers=["memory"], note=notes.append)
    assert summary["epoch"] == 2
    assert notes == [f"tracker 'memory' failed in its {action} and is left out from now on: the disk is full."]
    assert memory.calls[-1][0] == action


def test_the_other_trackers_go_on_where_one_fails(tmp_path, memory, monkeypatch):
    class Other(MemoryTracker):
        calls: list[tuple] = []  # noqa: RUF012
        fails = None

    monkeypatch.setitem(TRACKERS, "other", Other)
    monkeypatch.setattr(memory, "fails", "start")
    tracking = Tracking("memory,other", tmp_path)
    with pytest.warns(UserWarning, match="'memory' failed in its start"):
        tracking.start("mine", CONFIG)
    tracking.log(1, {"loss": 1})
    tracking.finish()
    assert [call[0] for call in Other.calls] == ["start", "log", "finish"]


def test_names_are_parsed_and_the_nearest_is_suggested(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert parse_names("") == parse_names([]) == ()
    assert parse_names(" wandb, mlflow,wandb") == ("wandb", "mlflow")
    with pytest.raises(PomonaError, match="unknown tracker 'tensorbord': did you mean 'tensorboard'?"):
        parse_names("mlflow,tensorbord")


@pytest.mark.parametrize(
    ("name", "line"), [("mlflow", "pip install mlflow-skinny."), ("trackio", "pip install trackio.")]
)
def test_a_missing_package_is_refused_with_the_line_that_installs_it(tmp_path, monkeypatch, name, line):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(PomonaError, match=f"tracker '{name}' is not installed: {line}"):
        train(small_recipe(), tmp_path / "run", trackers=[name])
    assert not (tmp_path / "run").exists()


def test_the_runs_of_a_sweep_are_tracked_in_their_folders(tmp_path, memory):
    runs = [SweepRun(small_recipe(epochs=1), tmp_path / name, {}) for name in ("a", "b")]
    assert [index for index, _ in train_runs(runs, jobs=1, trackers=["memory"])] == [0, 1]
    starts = [call[1] for call in memory.calls if call[0] == "start"]
    assert starts == [tmp_path / name / "tracking" / "memory" for name in ("a", "b")]


@pytest.mark.slow
def test_worker_processes_track_their_runs(tmp_path):
    pytest.importorskip("tensorboard")
    runs = [SweepRun(small_recipe(epochs=1), tmp_path / name, {}) for name in ("a", "b")]
    assert not [result for _, result in train_runs(runs, jobs=2, trackers="tensorboard") if "error" in result]
    for run in runs:
        assert_equals_metrics(run.folder, "tensorboard")


def test_the_command_line_tracks_and_repeats_the_option_when_it_is_interrupted(tmp_path, monkeypatch, capsys, memory):
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(small_recipe(epochs=1).to_toml())
    assert main(["train", "small.toml", "--track", "memory,trackoi"]) == 2
    assert "did you mean 'trackio'?" in capsys.readouterr().err
    assert main(["sweep", "small.toml", "--track", "trackoi"]) == 2
    assert main(["train", "small.toml", "--track", "memory", "--json"]) == 0
    assert memory.calls[-1] == ("finish", True)
    assert main(["sweep", "small.toml", "--over", "seed=0", "--jobs", "1", "--track", "memory", "--json"]) == 0
    assert sum(call == ("finish", True) for call in memory.calls) == 2
    capsys.readouterr()

    def interrupt(*arguments, **options):
        raise Interrupted(Path("runs/test"), 3, 6)

    monkeypatch.setattr("pomona.lab.train", interrupt)
    assert main(["train", "small.toml", "--track", "memory"]) == 130
    assert "to continue: pomona train --resume runs/test --track memory" in capsys.readouterr().err
