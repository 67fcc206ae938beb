"""The store of runs: runs are found by their recipe, in folders and as records, whole or as part of a longer run."""

from __future__ import annotations

import dataclasses
import json
import shutil
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest
from run_helpers import StopAfter

from pomona.errors import PomonaError
from pomona.lab import Recipe, train
from pomona.lab.runs import retrain
from pomona.lab.runs.interruption import Interrupted
from pomona.lab.sweeps.run_store import RunStore, StoredRun, read_record, without_finetune, write_record

BASE = {
    "name": "small",
    "data": "digits",
    "model": "mlp(hidden=[8])",
    "method": "dpf(sparsity=0.5, every=2)",
    "train": {"epochs": 2, "batch_size": 450, "device": "cpu"},
}
SHORT = Recipe.load(BASE)
LONG = Recipe.load(BASE | {"finetune": {"epochs": 1}})


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Return a folder with two runs: one training without fine-tuning, and the same with fine-tuning."""
    place = tmp_path_factory.mktemp("store")
    train(SHORT, place / "short")
    train(LONG, place / "inner" / "long")
    return place


def test_runs_are_found_by_the_settings_that_affect_the_result(place):
    store = RunStore((place,), ())
    found = store.find_result(Recipe.load(BASE, ["name=other", "train.eval_every=2", "train.checkpoint_every=0"]))
    assert found is not None
    assert found.folder == place / "short"
    assert found.summary == json.loads((place / "short" / "summary.json").read_text())
    assert store.find_result(Recipe.load(BASE, ["seed=1"])) is None
    assert store.find_result(LONG).folder == place / "inner" / "long"


def test_a_folder_with_the_expected_recipe_is_not_parsed_again(place, monkeypatch):
    folder = place / "short"
    plain = RunStore((place,), ())
    parsed = []
    load = Recipe.load_stored
    monkeypatch.setattr(Recipe, "load_stored", lambda source, *rest: parsed.append(source) or load(source, *rest))
    store = RunStore((place,), (), expected={folder: SHORT})
    assert parsed == [place / "inner" / "long" / "recipe.toml"]
    assert store.runs == plain.runs
    # A folder that has another recipe than the expected one is read as it is.
    other = RunStore((place,), (), expected={folder: Recipe.load(BASE, ["seed=1"])})
    assert other.runs == plain.runs
    assert len(parsed) == 3


def test_a_finetuned_run_contains_the_result_before_fine_tuning(place):
    """On a CPU the result equals that of a separate run, bit for bit."""
    alone, within = (
        RunStore((place / "short",), ()).find_result(SHORT),
        RunStore((place / "inner",), ()).find_result(SHORT),
    )
    clock = {"seconds", "images_per_second", "stages", "machine", "command", "cost"}
    lasting = [{k: v for k, v in run.summary.items() if k not in clock} for run in (alone, within)]
    # The remaining model is that of the end: fine-tuning does not change the masks.
    assert lasting[0] == lasting[1]
    assert within.folder is None
    assert within.cost() == pytest.approx(alone.cost())
    assert within.summary["seconds"] < RunStore((place / "inner",), ()).find_result(LONG).summary["seconds"]


def test_a_run_without_fine_tuning_is_not_found_for_a_finetuned_recipe(place):
    assert RunStore((place / "short",), ()).find_result(LONG) is None


def test_records_remain_without_their_folders(place, tmp_path):
    store = RunStore((place,), ())
    for recipe in (SHORT, LONG):
        file = write_record(store.find_covering_run(recipe), tmp_path / "records")
        assert file.name == f"small-{recipe.fingerprint()}.json"
        assert file.stat().st_size < 20_000
    again = RunStore((), (tmp_path / "records",))
    for recipe in (SHORT, LONG):
        found = again.find_result(recipe)
        assert found.folder is None
        assert found.recipe == recipe
        assert found.cost() == retrain.training_cost(store.find_folder(recipe))
        assert found.summary["accuracy"] == store.find_result(recipe).summary["accuracy"]
        kept = {"seed", "command", "accuracy", "sparsity", "seconds", "machine", "versions", "commit"}
        assert kept <= found.summary.keys()


def test_a_folder_is_preferred_to_a_record_that_is_added_later(place, tmp_path):
    write_record(RunStore((place,), ()).find_covering_run(LONG), tmp_path)
    store = RunStore((place / "inner",), ())
    store.add_records((tmp_path,))
    assert store.runs[LONG.fingerprint()].folder == place / "inner" / "long"
    assert store.find_covering_run(SHORT).folder == place / "inner" / "long"
    # One with another fine-tuning, of which only the record is left, does not take its place either.
    other = Recipe.load(BASE | {"finetune": {"epochs": 2}})
    summary = store.find_covering_run(LONG).summary | {"fingerprint": other.fingerprint()}
    store.add_run(StoredRun(other, None, summary))
    assert store.find_covering_run(SHORT).folder == place / "inner" / "long"


def test_no_record_is_written_of_a_record(place, tmp_path):
    record = write_record(RunStore((place,), ()).find_covering_run(SHORT), tmp_path / "a")
    write_record(RunStore((), (tmp_path / "a",)).find_covering_run(SHORT), tmp_path / "b")
    assert record.is_file()
    assert not (tmp_path / "b").exists()


def test_only_the_first_process_of_torchrun_writes_records(place, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert write_record(RunStore((place,), ()).find_covering_run(SHORT), tmp_path / "a") is None
    assert not (tmp_path / "a").exists()


def test_a_record_contains_no_path(place, tmp_path):
    recipe, folder = retrain.prepare_retraining(place / "short", out=tmp_path / "again")
    train(recipe, folder)
    store = RunStore((tmp_path,), ())
    file = write_record(store.find_covering_run(recipe), tmp_path / "records")
    assert str(place) not in file.read_text()
    assert json.loads(file.read_text())["recipe"]["origin"]["run"] == "short"
    # The retraining is found by its parent, with and without its folder.
    for one in (store, RunStore((), (tmp_path / "records",))):
        assert (
            one.retrained[SHORT.fingerprint(), "init"].summary["accuracy"]
            == store.find_result(recipe).summary["accuracy"]
        )


def test_an_option_missing_in_a_record_has_its_default(place, tmp_path):
    file = write_record(RunStore((place,), ()).find_covering_run(SHORT), tmp_path)
    record = json.loads(file.read_text())
    del record["recipe"]["train"]["clip"], record["recipe"]["method"]["settle"]
    file.write_text(json.dumps(record))
    assert RunStore((), (tmp_path,)).find_result(SHORT) is not None
    assert RunStore((), (tmp_path,)).find_result(Recipe.load(BASE, ["method.settle=0"])) is None


def test_a_record_without_a_recipe_is_ignored(tmp_path):
    (tmp_path / "a.json").write_text('{"accuracy": 90.0}')
    assert read_record(tmp_path / "a.json") is None
    assert RunStore((), (tmp_path,)).runs == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "", "it cannot be read"),
        (lambda text: text[:-100], "it cannot be read"),
        (lambda text: "[]", None),
        (lambda text: "3", "it cannot be read"),
        (lambda text: '{"recipe": 3}', "it cannot be read"),
        (lambda text: text.replace('"digits"', '"digit"'), "unknown data set 'digit': did you mean 'digits'"),
        (lambda text: text.replace('"seed": 0', '"seed": 1', 1), "it has the seed 1, and its recipe has 0"),
        (
            lambda text: text.replace('"method": "dpf"', '"method": "set"'),
            "it has the method set, and its recipe has dpf",
        ),
        (lambda text: text.replace('"accuracy"', '"accurate"'), "it does not have accuracy"),
        (lambda text: text.replace('"macs_left"', '"mac"').replace('"params"', '"p"'), "not have params, macs_left"),
        (lambda text: json.dumps(json.loads(text) | {"stages": []}), "it does not have stages"),
    ],
)
def test_invalid_records_are_ignored_with_a_warning(place, tmp_path, change, message):
    file = write_record(RunStore((place,), ()).find_covering_run(SHORT), tmp_path)
    file.write_text(change(file.read_text()))
    with (
        pytest.warns(UserWarning, match=f"the record '{file.name}' is ignored: .*{message}")
        if message
        else nullcontext()
    ):
        assert RunStore((), (tmp_path,)).runs == {}


@pytest.mark.parametrize("text", ["", '{"fingerp', "[]", "{}", '{"fingerprint": "a"}'])
def test_a_run_with_a_damaged_summary_is_not_complete(place, tmp_path, text):
    shutil.copytree(place / "short", tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text(text)
    store = RunStore((tmp_path,), ())
    assert store.find_result(SHORT) is None
    assert store.find_folder(SHORT) == tmp_path / "run"


def test_the_cost_of_a_damaged_run_is_unknown(place, tmp_path):
    shutil.copytree(place / "short", tmp_path / "run")
    run = RunStore((tmp_path,), ()).find_result(SHORT)
    assert run.cost() is not None
    for name in ("metrics.jsonl", "model.safetensors", "masks.safetensors"):
        whole = (tmp_path / "run" / name).read_bytes()
        (tmp_path / "run" / name).write_bytes(whole[:-40])
        assert run.cost() is None, name
        (tmp_path / "run" / name).write_bytes(whole)


def test_a_begun_run_has_a_folder_and_no_result(place, tmp_path):
    recipe = dataclasses.replace(SHORT, seed=5)
    with pytest.raises(Interrupted):
        train(recipe, tmp_path / "begun", stop=StopAfter(2))
    store = RunStore((tmp_path,), ())
    assert store.find_result(recipe) is None
    assert store.find_folder(recipe) == tmp_path / "begun"
    assert store.find_folder(recipe, complete=True) is None
    (tmp_path / "begun" / "recipe.toml").write_text("no recipe")
    assert RunStore((tmp_path,), ()).find_folder(recipe) is None


def test_a_complete_run_is_preferred_to_a_begun_one(place, tmp_path):
    shutil.copytree(place / "short", tmp_path / "a-begun")
    (tmp_path / "a-begun" / "summary.json").unlink()
    for order in ((tmp_path, place), (place, tmp_path)):
        assert RunStore(order, ()).find_folder(SHORT) == place / "short"
    write_record(RunStore((place,), ()).find_covering_run(SHORT), tmp_path / "records")  # a record is complete too
    assert RunStore((tmp_path,), (tmp_path / "records",)).find_result(SHORT).folder is None


def test_a_run_is_resumed_with_other_settings_without_effect(tmp_path):
    with pytest.raises(Interrupted):
        train(SHORT, tmp_path, stop=StopAfter(2))
    other = Recipe.load(BASE, ["train.eval_every=2", "train.log_every=1", "train.checkpoint_steps=1"])
    assert other.fingerprint() == SHORT.fingerprint()
    assert train(other, tmp_path, resume=True)["accuracy"] == train(SHORT, tmp_path / "whole")["accuracy"]
    with pytest.raises(PomonaError, match=r"started with other settings \(train.clip"):
        train(Recipe.load(BASE, ["train.clip=1.0"]), tmp_path, resume=True)


def test_without_finetune_changes_nothing_else(place):
    assert without_finetune(LONG).fingerprint() == SHORT.fingerprint()
    assert without_finetune(SHORT) == dataclasses.replace(SHORT, finetune=without_finetune(SHORT).finetune)


def test_records_in_an_archive_are_those_of_the_folder(place, tmp_path):
    records = tmp_path / "records"
    write_record(RunStore((place,), ()).runs[SHORT.fingerprint()], records)
    (records / "damaged.json").write_text("{")
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        for file in records.iterdir():
            archive.write(file, file.name)
    with pytest.warns(UserWarning, match="the record 'damaged.json' is ignored"):
        found = [RunStore((), (folder,)).runs for folder in (records, tmp_path / "packed")]
    assert found[0] == found[1]
    assert list(found[0]) == [SHORT.fingerprint()]
