"""Refused folders and recipes: what a run refuses, and that nothing is written or lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from run_helpers import (
    StopAfter,
    digits_recipe,
    have_same_weights,
)

from pomona.errors import PomonaError
from pomona.lab import Interrupted, Recipe, train
from pomona.lab.runs import checkpoint
from pomona.lab.runs.folder import is_in_use, locked_folder, require_same_tensors
from pomona.lab.runs.run import Run


def test_a_folder_in_use_is_refused(complete_run):
    with pytest.raises(PomonaError, match="is not empty: go on with --resume, or give another folder"):
        train(complete_run[1], complete_run[0])


def test_nothing_to_resume_is_refused(tmp_path):
    with pytest.raises(PomonaError, match="no run to resume"):
        train(digits_recipe(), tmp_path / "run", resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(PomonaError, match="is a file"):
        train(digits_recipe(), tmp_path / "file")
    assert not (tmp_path / "run").exists()


def test_another_recipe_is_refused(complete_run):
    with pytest.raises(PomonaError, match=r"other settings \(train.epochs: 4, not 3\)"):
        train(digits_recipe(epochs=4), complete_run[0], resume=True)


def stopped(folder: Path, made: Recipe) -> None:
    with pytest.raises(Interrupted):
        train(made, folder, stop=StopAfter(2))


def test_a_checkpoint_of_another_model_is_refused_by_its_tensor(tmp_path):
    mine, theirs = (digits_recipe("dense", model=f"mlp(hidden=[{width}])") for width in (8, 12))
    stopped(tmp_path / "mine", mine)
    stopped(tmp_path / "theirs", theirs)
    shutil.rmtree(tmp_path / "mine" / "checkpoint")
    shutil.copytree(tmp_path / "theirs" / "checkpoint", tmp_path / "mine" / "checkpoint")
    before = {p: p.read_bytes() for p in (tmp_path / "mine").rglob("*") if p.is_file()}
    with pytest.raises(PomonaError, match=r"of another model: '.*weight' is 12×64 there and 8×64 here"):
        train(mine, tmp_path / "mine", resume=True)
    assert {p: p.read_bytes() for p in (tmp_path / "mine").rglob("*") if p.is_file()} == before


def test_a_checkpoint_with_other_tensors_is_refused():
    with pytest.raises(PomonaError, match="'b' is missing there and 2×3 here"):
        require_same_tensors({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(2, 3)}, Path("run"))
    with pytest.raises(PomonaError, match="'b' is a number there and missing here"):
        require_same_tensors({"b": torch.tensor(1)}, {}, Path("run"))


def test_two_processes_do_not_train_in_one_folder(tmp_path, complete_run):
    made, folder = complete_run[1], tmp_path / "run"
    stopped(folder, made)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with locked_folder(folder), pytest.raises(PomonaError, match="another process trains in '.*run': wait for it"):
        train(made, folder, resume=True)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    train(made, folder, resume=True)
    assert have_same_weights(complete_run[0], folder)


def test_of_two_runs_that_start_in_one_folder_the_slower_is_refused(tmp_path, monkeypatch):
    made, folder = digits_recipe("dense", epochs=1), tmp_path / "run"
    begin = Run.begin_stage

    def slow(self, *args, **options):
        begin(self, *args, **options)
        if not folder.exists():
            monkeypatch.setattr(Run, "begin_stage", begin)
            train(made, folder)

    monkeypatch.setattr(Run, "begin_stage", slow)
    with pytest.raises(PomonaError, match="is not empty: go on with --resume"):
        train(made, folder)
    assert checkpoint.load(folder)["step"] == 6


def test_a_kill_while_writing_the_first_file_leaves_the_folder_usable(tmp_path, complete_run):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.toml.part").write_text('name = "sma')
    train(complete_run[1], folder)
    assert have_same_weights(complete_run[0], folder)
    assert not (folder / "recipe.toml.part").exists()


def test_a_damaged_summary_is_written_again(tmp_path, complete_run):
    folder = tmp_path / "run"
    shutil.copytree(complete_run[0], folder)
    (folder / "summary.json").write_bytes((complete_run[0] / "summary.json").read_bytes()[:50])
    assert train(complete_run[1], folder, resume=True)["accuracy"] == complete_run[2]["accuracy"]
    assert json.loads((folder / "summary.json").read_text())["fingerprint"] == complete_run[1].fingerprint()


def test_a_recipe_that_differs_from_its_checkpoint_is_refused(tmp_path):
    folder = tmp_path / "run"
    stopped(folder, digits_recipe("dense", epochs=2))
    edited = digits_recipe("dense", epochs=5)
    (folder / "recipe.toml").write_text(edited.to_toml())
    with pytest.raises(PomonaError, match="started with other settings"):
        train(edited, folder, resume=True)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: digits_recipe(model="lstm"), "model 'lstm' does not fit data set 'digits', which holds images: .*mlp"),
        (lambda: digits_recipe(model="mlp(hidden=[])"), "nothing to prune"),
        (lambda: digits_recipe(model="mlp(in_features=5)"), "does not run on samples of shape"),
        (
            lambda: digits_recipe({"name": "dpf", "pattern": {"name": "balanced", "block": 7}, "sparsity": 0.5}),
            "blocks of 7 do not divide the rows of",
        ),
        (lambda: digits_recipe(batch_size=2000, drop_last=True), "batch_size 2000"),
        (
            lambda: Recipe.load({"data": "cifar10", "model": "resnet20"}),
            "data set 'cifar10' was not found in",
        ),
        (
            lambda: Recipe.load({"data": "digits(validation=5000)", "model": "mlp"}),
            "validation must be",
        ),
    ],
)
def test_a_bad_recipe_writes_nothing(tmp_path, monkeypatch, made, says):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("POMONA_DATA", raising=False)
    with pytest.raises(PomonaError, match=says):
        train(made(), tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["summary of another run", "model that was cut off", "no model"])
def test_a_complete_run_with_a_wrong_file_is_finished_again(tmp_path, complete_run, name):
    folder = tmp_path / "run"
    shutil.copytree(complete_run[0], folder)
    model = folder / "model.safetensors"
    if name == "summary of another run":
        other = json.loads((folder / "summary.json").read_text()) | {"seed": 7, "accuracy": 100.0}
        (folder / "summary.json").write_text(json.dumps(other))
    elif name == "model that was cut off":
        model.write_bytes(model.read_bytes()[:-1000])
    else:
        model.unlink()
    assert train(complete_run[1], folder, resume=True)["accuracy"] == complete_run[2]["accuracy"]
    assert have_same_weights(complete_run[0], folder)


@pytest.mark.parametrize("cut", [1, 40, 10_000])
def test_metrics_that_lost_their_end_are_noted(tmp_path, complete_run, cut):
    folder, notes = tmp_path / "run", []
    stopped(folder, complete_run[1])
    metrics = folder / "metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.write_bytes(whole[: max(0, len(whole) - cut)])
    train(complete_run[1], folder, resume=True, note=notes.append)
    rows = [json.loads(line) for line in metrics.read_bytes().splitlines()]  # no line is half of one
    lost = len(whole) - (whole[: max(0, len(whole) - cut)].rfind(b"\n") + 1)
    assert [f"has lost {lost} bytes since the checkpoint" in note for note in notes] == [True]
    assert rows[-1]["kind"] == "epoch"
    assert have_same_weights(complete_run[0], folder)


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint.previous", "checkpoint.part"])
def test_a_file_in_place_of_a_checkpoint_does_not_stop_the_run(tmp_path, complete_run, name):
    folder = tmp_path / "run"
    stopped(folder, complete_run[1])
    place = folder / name
    if place.is_dir():
        place.rename(folder / "checkpoint.previous")
    place.write_text("not a checkpoint")
    train(complete_run[1], folder, resume=True, note=lambda text: None)
    assert have_same_weights(complete_run[0], folder)
    assert (folder / "checkpoint").is_dir()


def test_a_folder_is_in_use_only_while_it_is_locked(tmp_path):
    assert not is_in_use(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()
    with locked_folder(tmp_path):
        assert is_in_use(tmp_path)
    assert not is_in_use(tmp_path)
