"""The papers' tables: what they need, in which order, what is there, and how it is printed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import statistics
import sys
import types
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from run_helpers import InterruptAtStep, StopAfter

from pomona.errors import PomonaError
from pomona.lab import Interrupted, Recipe, train
from pomona.lab.recipes import bundled as shelf
from pomona.lab.runs.folder import locked_folder
from pomona.lab.sweeps.run_store import RunStore
from pomona.lab.sweeps.sweep import SweepInterrupted
from pomona.lab.tables import catalog, rendering
from pomona.lab.tables.catalog import compute_table, find_table
from pomona.lab.tables.definitions import load_table
from pomona.lab.tables.filling import TABLE_RUNS, fill_table, trainable_runs, write_table_records
from pomona.lab.tables.paper_table import PaperTable, parse_paper_number

SMALL = """
title = "digits"
paper = "nobody, table 0"
seeds = [0, 1]
queue = ["wide", "DPF"]
show = ["cost"]
names = { "method.settle" = "settle" }

[columns]
dense = { method = "dense" }
"one-shot + FT" = { from = "dense", method = "oneshot", "optimizer.lr" = 0.02 }
DPF = { "method.settle" = 0 }
"DPF + FT" = { "method.settle" = 0, "finetune.epochs" = 1 }
again = { from = "DPF", retrain = "init", budget = "flops" }

[[part]]
label = "narrow"
rows = { "method.sparsity" = [0.5, 0.8] }
columns = ["dense", "one-shot + FT", "DPF", "again"]
[part.recipe]
data = "digits"
model = "mlp(hidden=[8])"
method = "dpf(every=2)"
train = { epochs = 1, batch_size = 450, device = "cpu" }
[part.paper]
dense = "95.01 ± 0.04"
DPF = ["*", "90.00 ± 0.10"]

[[part]]
label = "wide"
set = { "model.hidden" = [16] }
rows = { "method.sparsity" = [0.5] }
columns = ["DPF", "DPF + FT"]
[part.recipe]
data = "digits"
model = "mlp(hidden=[8])"
method = "dpf(every=2)"
train = { epochs = 1, batch_size = 450, device = "cpu" }
[part.paper]
DPF = ["88.0"]
"""


def load(folder: Path, text: str = SMALL, *overrides: str) -> PaperTable:
    (folder / "small.toml").write_text(text)
    return load_table(folder / "small.toml", overrides)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The small table, filled."""
    torch.set_num_threads(1)
    here = tmp_path_factory.mktemp("tables")
    before = Path.cwd()
    os.chdir(here)
    try:
        told: list[tuple] = []
        result = fill_table(load(here), records=here / "records", jobs=1, on_result=lambda *t: told.append(t))
    finally:
        os.chdir(before)
    return here, result, told


# ---- the shipped tables


def test_all_tables_and_figures_of_dpf_are_shipped():
    numbers = [*(f"table{k}" for k in range(1, 6)), *(f"figure{k}" for k in (3, 5, 6, 8, 9, 10, 11, 12))]
    assert {f"dpf-{name}" for name in numbers} <= shelf.bundled_tables().keys()
    assert not shelf.bundled_tables().keys() & shelf.bundled_recipes().keys()


@pytest.mark.parametrize("name", shelf.bundled_tables())
def test_every_shipped_table_of_runs_is_well_formed(name):
    found = load_table(shelf.bundled_tables()[name])
    assert found.name == name
    assert found.title
    assert found.paper


def test_table_1_is_as_the_paper_prints_it():
    found = find_table("dpf-table1")
    printed = {(e.label, e.row, e.column): e.paper for e in found.cells}
    assert printed["ResNet-20", "90 %", "DPF"] == "90.88 ± 0.07"
    assert printed["ResNet-20", "95 %", "DSR"] == "*"
    assert printed["WideResNet-28-8", "99.9 %", "SNIP"] == "74.50 ± 2.23"
    assert printed["WideResNet-28-4", "97.5 %", "SM"] == "93.80 ± 0.24"
    assert printed["ResNet-32", "95 %", "dense"] == "93.83 ± 0.12"
    assert printed["ResNet-20", "70 %", "DPF settled"] is None
    assert ("VGG16-D", "95 %", "DSR") not in printed
    assert {e.own_row for e in found.cells if e.column == "dense"} == {""}  # a dense network has no sparsity
    rows = dict.fromkeys((e.label, e.row) for e in found.cells)
    assert len(rows) == 1 + 4 + 2 + 2 + 3 + 3 + 5
    assert [e.column for e in found.cells[:6]] == ["dense", "SNIP", "SM", "DPF", "DPF settled", "DPF soft"]


def test_all_methods_of_table_1_are_trained_alike_and_by_their_own_rules():
    found = {
        (e.label, e.column): e.runs[0].recipe
        for e in find_table("dpf-table1").select(["sparsity=0,0.95", "seed=2"]).cells
    }
    resnet, wide = (found[label, "DPF"] for label in ("ResNet-20", "WideResNet-28-2"))
    assert (resnet.method["every"], resnet.method["settle"], resnet.method["schedule"]["until"]) == (16, 0, 0.75)
    assert (wide.method["every"], wide.method["settle"], wide.method["schedule"]["until"]) == (16, 0, 0.6)
    assert found["ResNet-20", "DPF settled"].method == {**resnet.method, "settle": 0.1}
    assert found["ResNet-56", "DPF"].model == {**resnet.model, "name": "resnet56"}
    assert resnet.model["shortcut"] == "B"
    assert found["ResNet-20", "SM"].method["every"] is None  # an epoch
    assert found["ResNet-20", "DSR"].method["every"] == 100
    for (label, column), recipe in found.items():
        same = wide if label.startswith("Wide") else resnet
        keys = {text.partition(":")[0].partition(".")[0] for text in recipe.differences(same)}
        assert keys <= {"method", "model"}, (label, column)
        assert recipe.seed == 2


def test_table_3_divides_among_the_processes_of_torchrun():
    for run in find_table("dpf-table3").runs():
        assert (run.recipe.train.batch_size % 16, run.recipe.train.drop_last) == (0, True)


def test_tables_share_their_runs():
    small, large = ({run.key for run in find_table(name).runs()} for name in ("dpf-table1", "dpf-table4"))
    assert small < large
    assert find_table("dpf-table1").queue == find_table("dpf-table4").queue
    assert find_table("dpf-figure5").queue == ("DPF", "mask retrained", "dense")
    assert {t.key for t in find_table("dpf-figure3").runs()} < large
    # The dense networks, and what DPF reaches before it is fine-tuned.
    tuned = {t.key for t in find_table("dpf-table2").select(["column=dense,DPF,DPF settled"]).runs()}
    assert tuned < small


def test_what_is_first_is_in_the_papers_tables():
    first, *others = (
        {run.key for run in find_table(f"dpf-{name}").runs()}
        for name in ("first", "table1", "table2", "table5", "onepass")
    )
    assert first <= set.union(*others)


def test_table_5_prunes_filters():
    for entry in find_table("dpf-table5").select(["column=SFP,DPF"]).cells:
        assert entry.runs[0].recipe.method["pattern"] == {"name": "filter", "norm": 2, "of": "filters", "norms": False}
        assert entry.setting["pattern"] == "filter(of='filters', norms=False)"
    assert find_table("dpf-table5").select(["column=dense"]).cells[0].setting == {}


def test_a_table_without_any_run_shows_all_of_it_as_missing(here):
    found = find_table("dpf-table2").compare(RunStore((), ()))
    assert (found["complete"], found["missing"]) == (0, found["runs"])
    cell = next(c for c in found["cells"] if c["column"] == "DPF + FT" and c["sparsity"] == 0.95)
    assert {"model", "method", "sparsity", "setting", "mean", "std", "runs", "paper"} <= cell.keys()
    assert (cell["model"], cell["method"], cell["mean"], cell["runs"]) == ("resnet20", "dpf", None, 0)
    assert (cell["paper"], cell["paper_std"], cell["missing"]) == (90.34, 0.31, [0, 1, 2])
    assert cell["setting"]["finetune"] == 60
    assert json.loads(json.dumps(found)) == found


# ---- which runs, and when


def test_the_queue_is_seed_by_seed_with_what_is_most_telling_first(tmp_path):
    names = [run.name for run in load(tmp_path).runs()]
    first = [
        "mlp-dpf-50-hidden_16_-settle0-seed0",
        "mlp-dpf-50-hidden_16_-settle0-epochs1-seed0",
        "mlp-dpf-50-settle0-seed0",
        "mlp-dpf-80-settle0-seed0",
        "mlp-dense-seed0",
        "mlp-oneshot-50-lr0.02-seed0",
        "mlp-oneshot-80-lr0.02-seed0",
        "mlp-dpf-50-settle0-seed0-retrain-init-flops",
        "mlp-dpf-80-settle0-seed0-retrain-init-flops",
    ]
    assert names == [*first, *(name.replace("seed0", "seed1") for name in first)]


def test_a_run_that_begins_with_another_waits_for_it(tmp_path):
    found = load(tmp_path)
    names = [cell.recipe.name for _, cell in trainable_runs(found.runs(), RunStore((), ()), tmp_path)]
    assert "mlp-dense-seed0" in names
    assert not [name for name in names if "oneshot" in name or "retrain" in name]
    # What fine-tuning passes through is not trained by itself.
    assert "mlp-dpf-50-hidden_16_-settle0-epochs1-seed0" in names
    assert "mlp-dpf-50-hidden_16_-settle0-seed0" not in names


def test_what_others_begin_with_is_trained_though_fine_tuning_passes_through_it(tmp_path):
    text = SMALL.replace('"DPF", "again"]', '"DPF", "DPF + FT", "again"]')
    cells = trainable_runs(load(tmp_path, text).runs(), RunStore((), ()), tmp_path)
    names = [cell.recipe.name for _, cell in cells]
    assert {"mlp-dpf-50-settle0-seed0", "mlp-dpf-50-settle0-epochs1-seed0"} <= set(names)
    assert "mlp-dpf-50-hidden_16_-settle0-seed0" not in names


def test_a_part_may_have_seeds_of_its_own(tmp_path):
    found = load(tmp_path, SMALL.replace('label = "wide"', 'label = "wide"\nseeds = [7]'))
    assert {(e.label, *(t.recipe.seed for t in e.runs)) for e in found.cells} == {("narrow", 0, 1), ("wide", 7)}


def test_settings_are_changed_for_every_run(tmp_path):
    found = load(tmp_path, SMALL, "train.epochs=3", "optimizer.lr=0.5")
    assert {run.recipe.train.epochs for run in found.runs()} == {3}
    assert {run.recipe.optimizer.lr for run in found.runs()} == {0.5}
    with pytest.raises(PomonaError, match="'train.epochs' is not of the form key=value"):
        load(tmp_path, SMALL, "train.epochs")


def test_some_of_a_table(tmp_path):
    found = load(tmp_path)
    some = found.select(["label=narrow", "column=DPF,dense", "sparsity=0.8", "seed=1"])
    assert [(e.column, e.row, [t.recipe.seed for t in e.runs]) for e in some.cells] == [("DPF", "80 %", [1])]
    assert len(found.select(["settle=0"]).cells) == 4
    assert {e.label for e in found.select(["model=mlp", "method=dpf"]).cells} == {"narrow", "wide"}
    with pytest.raises(PomonaError, match="unknown key of --only 'colum': did you mean 'column'"):
        found.select(["colum=DPF"])
    with pytest.raises(PomonaError, match="unknown column of small 'desne': did you mean 'dense'"):
        found.select(["column=DPF,desne"])
    with pytest.raises(PomonaError, match="unknown sparsity of small '70': choose one of 0.0, 0.5, 0.8"):
        found.select(["sparsity=70"])
    with pytest.raises(PomonaError, match="unknown seed of small '7': choose one of 0, 1"):
        found.select(["seed=0,7"])
    with pytest.raises(PomonaError, match="no cell of small matches label=wide and sparsity=0.8"):
        found.select(["label=wide", "sparsity=0.8"])


def test_a_name_with_commas_can_be_picked():
    found, name = find_table("dpf-figure8"), "first weights, same epochs"
    for text, columns in ((name, {name}), (f"'{name}'", {name}), (f'DPF,"{name}"', {"DPF", name})):
        assert {entry.column for entry in found.select([f"column={text}"]).cells} == columns


def test_how_a_run_is_watched_is_not_in_its_name(tmp_path):
    plain, watched = (
        load(tmp_path, SMALL, *more).runs() for more in ([], ["train.eval_every=300", "train.device=cpu"])
    )
    assert [run.name for run in watched] == [run.name for run in plain]
    assert {run.recipe.train.eval_every for run in watched} == {300}
    clipped = load(tmp_path, SMALL, "train.clip=1.0")
    assert all("clip1.0" in run.name for run in clipped.runs())
    assert {entry.setting["train.clip"] for entry in clipped.cells} == {1.0}
    assert not any("train.eval_every" in e.setting for e in load(tmp_path, SMALL, "train.eval_every=9").cells)


@pytest.mark.parametrize("key", ["seed", "method.sparsity"])
def test_what_the_runs_of_a_table_differ_in_is_not_set(tmp_path, key):
    with pytest.raises(PomonaError, match=f"{key} differs between the runs of a table: select runs with --only"):
        load(tmp_path, SMALL, f"{key}=0.5")


# ---- filling


def test_a_filled_table_compares_with_the_paper(done):
    here, result, told = done
    assert (result["missing"], result["failed"]) == (0, [])
    assert result["complete"] == len(result["cells"]) == 9
    cells = {(c["label"], c["row"], c["column"]): c for c in result["cells"]}
    cell = cells["narrow", "80 %", "DPF"]
    reached = [
        json.loads(file.read_text())["accuracy"]
        for file in sorted((here / "runs" / "tables").glob("mlp-dpf-80-settle0-seed?-????????????/summary.json"))
    ]
    assert len(reached) == 2
    assert (cell["mean"], cell["std"], cell["runs"]) == (statistics.mean(reached), statistics.stdev(reached), 2)
    assert cell["difference"] == cell["mean"] - 90.0
    assert (cell["method"], cell["sparsity"], cell["setting"]["settle"]) == ("dpf", 0.8, 0)
    assert (cells["narrow", "50 %", "DPF"]["paper"], cells["narrow", "50 %", "DPF"]["paper_text"]) == (None, "*")
    assert ("narrow", "80 %", "dense") not in cells  # once, in the first row
    again = cells["narrow", "50 %", "again"]
    assert (again["method"], again["sparsity"], again["paper"]) == ("finetune", 0.5, None)
    # As many MACs as the run that found the mask, to the nearest epoch.
    assert abs(again["cost"] - cells["narrow", "50 %", "DPF"]["cost"]) <= 0.5
    assert [t[0] for t in told] == sorted(t[0] for t in told)
    assert told[-1][:2] == (18, 18)


def test_choices_are_made_on_held_out_images(here):
    text = """
        title = "rests"
        measure = "valid_accuracy"
        show = ["last"]
        [columns]
        rest = { "method.settle" = 0.5 }
        [[part]]
        label = "small"
        recipe = { model = "mlp(hidden=[8])", method = "dpf(every=2, schedule='cubic(until=0.5)')" }
        [part.set]
        data = "digits(validation=400)"
        train = { epochs = 2, batch_size = 450, device = "cpu", average = 0.5 }
    """
    found = fill_table(load(here, text), jobs=1)
    (one,), (run,) = found["cells"], RunStore((here / "runs",), ()).runs.values()
    assert one["mean"] == run.summary["valid_accuracy"] != run.summary["accuracy"]
    assert one["last"] == run.summary["valid_accuracy_last"]


def test_what_a_longer_run_passed_through_is_a_cell_of_its_own(done):
    here, result, told = done
    short, long = (
        next(c for c in result["cells"] if c["column"] == n and c["label"] == "wide") for n in ("DPF", "DPF + FT")
    )
    assert len(told) == 16  # of 18: two are served by those with fine-tuning
    assert (short["setting"]["epochs"], long["setting"]["epochs"]) == (1, 2)
    stages = [json.loads(f.read_text())["stages"] for f in (here / "runs" / "tables").glob("*hidden*/summary.json")]
    assert short["mean"] == statistics.mean(both[0]["accuracy"] for both in stages)
    assert long["mean"] == statistics.mean(both[1]["accuracy"] for both in stages)


def test_one_shot_begins_with_the_dense_network(done):
    here, _, _ = done
    for file in (here / "runs" / "tables").glob("*oneshot*/recipe.toml"):
        recipe = Recipe.load(file)
        assert (recipe.origin.weights, recipe.optimizer.lr) == ("final", 0.02)
        dense = next(t for t in load(here).runs() if t.recipe.fingerprint() == recipe.origin.fingerprint)
        assert (dense.recipe.method["name"], dense.recipe.seed) == ("dense", recipe.seed)


def test_records_are_enough_for_the_table(done, here):
    there, result, _ = done
    found = load(there)
    assert len(list((there / "records").glob("*.json"))) == 16
    again = found.compare(RunStore((), (there / "records",)))
    for cell in again["cells"]:
        assert cell["runs"] == 2
    assert json.loads(json.dumps(again)) == json.loads(json.dumps({k: v for k, v in result.items() if k != "failed"}))


def test_records_are_kept_of_what_was_there_before(done, here):
    there, _, _ = done
    shutil.copytree(there / "runs", here / "runs")
    told: list[tuple] = []
    fill_table(load(here), only_missing=True, records=here / "kept", on_result=lambda *t: told.append(t))
    assert told == []
    assert {f.name for f in (here / "kept").iterdir()} == {f.name for f in (there / "records").iterdir()}


def test_kept_records_are_those_of_finished_runs(done, tmp_path):
    there, _, _ = done
    found, store = load(there), RunStore((there / "runs",), ())
    files = write_table_records(found.select(["column=DPF"]), store, tmp_path)
    assert sorted(tmp_path.glob("*.json")) == sorted(set(files))
    assert len(set(files)) == 6


def test_only_missing_trains_nothing_twice(done, here):
    there, _, _ = done
    shutil.copytree(there / "runs", here / "runs")
    found = load(here)
    with pytest.raises(PomonaError, match="18 of the 18 runs of small exist already: continue with --only-missing"):
        fill_table(found)
    told: list[tuple] = []
    gone = next((here / "runs" / "tables").glob("mlp-oneshot-80*seed1*"))
    shutil.rmtree(gone)
    result = fill_table(found, only_missing=True, jobs=1, on_result=lambda *t: told.append(t))
    assert [t[2].folder.name for t in told] == [gone.name]
    assert result["missing"] == 0


def test_a_parent_that_is_only_a_record_is_trained_again(done, here):
    there, _, _ = done
    shutil.copytree(there / "records", here / "results" / "runs")
    for file in (here / "results" / "runs").glob("*oneshot-50*seed0*"):
        file.unlink()
    told: list[tuple] = []
    result = fill_table(load(here), only_missing=True, jobs=1, on_result=lambda *t: told.append(t))
    assert [t[2].recipe.name for t in told] == ["mlp-dense-seed0", "mlp-oneshot-50-lr0.02-seed0"]
    assert result["missing"] == 0


def test_what_begins_with_a_failed_run_is_not_tried(here):
    text = SMALL.replace('model = "mlp(hidden=[8])"', 'model = "mlp(hidden=[])"')  # nothing to prune
    found = load(here, text).select(["label=narrow", "column=DPF,again", "seed=0"])
    told: list[tuple] = []
    result = fill_table(found, jobs=1, on_result=lambda *t: told.append(t[:2]))
    assert told == [(1, 4), (2, 4)]
    assert [f["name"] for f in result["failed"]] == ["mlp-dpf-50-settle0-seed0", "mlp-dpf-80-settle0-seed0"]
    assert "nothing to prune" in result["failed"][0]["error"]
    assert result["missing"] == 4


def test_what_another_version_trained_is_known_by_its_children(done, here):
    """A fingerprint may be that of an older version; children name their parents by it."""
    there, _, _ = done
    shutil.copytree(there / "runs", here / "runs")
    place = here / "runs" / "tables"
    families = {"dense-seed0-????????????": "oneshot-*-seed0-*", "dpf-50-settle0-seed0-????????????": "*-50-*retrain*"}
    for parent, children in families.items():
        summary = next(place.glob(f"mlp-{parent}")) / "summary.json"
        old = json.loads(summary.read_text())["fingerprint"]
        for file in [summary, *(folder / "recipe.toml" for folder in place.glob(f"mlp-{children}"))]:
            file.write_text(file.read_text().replace(f'"{old}"', '"before"'))
    assert sum('"before"' in file.read_text() for file in place.glob("*/recipe.toml")) == 3
    assert load(here).compare(RunStore((here / "runs",), ()))["missing"] == 0


def test_a_run_goes_on_where_it_was_begun(here):
    found = load(here).select(["label=narrow", "column=DPF", "sparsity=0.5", "seed=0"])
    (run,) = found.runs()
    with pytest.raises(Interrupted):
        train(run.recipe, here / "runs" / "elsewhere", stop=StopAfter(2))
    told: list[tuple] = []
    fill_table(found, only_missing=True, jobs=1, on_result=lambda *t: told.append(t))
    assert [t[2].folder for t in told] == [Path("runs/elsewhere")]
    assert not (here / TABLE_RUNS).exists()


def test_a_damaged_mask_stops_only_what_begins_with_it(done, here):
    there, _, _ = done
    shutil.copytree(there / "runs", here / "runs")
    for seed in (0, 1):
        (parent,) = (here / "runs" / "tables").glob(f"mlp-dpf-80-settle0-seed{seed}-????????????")
        shutil.rmtree(next(parent.parent.glob(f"{parent.name}-retrain*")))
    (parent / "masks.safetensors").write_bytes(b"no masks")
    with pytest.warns(
        UserWarning, match="80-settle0-seed1-retrain-init-flops cannot start from its parent run: .*is damaged"
    ):
        result = fill_table(load(here), only_missing=True, jobs=1)
    assert (result["missing"], result["failed"]) == (1, [])


def test_a_run_that_another_sitting_is_at_is_left_to_it(here):
    found = load(here).select(["label=narrow", "column=DPF", "seed=0"])
    first, second = (run.to_sweep_run(RunStore((), ()), TABLE_RUNS) for run in found.runs())
    with locked_folder(first.folder):
        result = fill_table(found, jobs=1)
    assert [one["name"] for one in result["failed"]] == [first.recipe.name]
    assert "another process trains in" in result["failed"][0]["error"]
    assert not any(first.folder.iterdir())
    assert result["missing"] == 1
    # Of one that is done by the end nothing is told.
    shutil.rmtree(second.folder)

    def other(*told):
        lock.close()
        train(first.recipe, first.folder)

    with contextlib.ExitStack() as lock:
        lock.enter_context(locked_folder(first.folder))
        result = fill_table(found, jobs=1, on_result=lambda *t: other() if t[2].folder == second.folder else None)
    assert (result["missing"], result["failed"]) == (0, [])


def test_a_sitting_may_be_cut_off(done, here):
    found = load(here).select(["label=narrow", "column=DPF"])
    presser = InterruptAtStep(5)  # in the second of four runs of three steps
    with pytest.raises(SweepInterrupted, match="stopped with 1 of 4 runs complete in 'runs/tables'"):
        fill_table(found, jobs=1, progress=lambda: presser)
    store = RunStore()
    assert [run.state(store) for run in found.runs()] == ["complete", "begun", "missing", "missing"]
    result = fill_table(found, only_missing=True, jobs=1)
    whole = {(c["label"], c["row"], c["column"]): c["mean"] for c in done[1]["cells"]}
    assert [c["mean"] for c in result["cells"]] == [whole["narrow", row, "DPF"] for row in ("50 %", "80 %")]


# ---- like another


def test_a_table_like_another_takes_some_of_its_rows_and_columns(tmp_path, monkeypatch):
    (tmp_path / "small.toml").write_text(SMALL)
    monkeypatch.setattr(shelf, "bundled_files", lambda: {"small": tmp_path / "small.toml"})
    text = 'title = "less"\nlike = "small"\ncolumns = ["DPF"]\n[[part]]\nlabel = "narrow"\n'
    (tmp_path / "less.toml").write_text(text + 'rows = { "method.sparsity" = [0.8] }\n')
    (only,) = load_table(tmp_path / "less.toml").cells
    assert (only.column, only.row, only.paper, len(only.runs)) == ("DPF", "80 %", "90.00 ± 0.10", 2)
    (tmp_path / "less.toml").write_text(text + 'rows = { "method.sparsity" = [0.9] }\n')
    with pytest.raises(PomonaError, match="unknown value of method.sparsity '0.9': did you mean '0.8'"):
        load_table(tmp_path / "less.toml")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("title", "titel", "unknown key of a table 'titel': did you mean 'title'"),
        ("label =", "lable =", "unknown key of a part 'lable': did you mean 'label'"),
        ('DPF = ["88.0"]', 'DFP = ["88.0"]', "the table small: unknown column 'DFP': did you mean 'DPF'"),
        ('["*", "90.00 ± 0.10"]', '["*"]', "narrow has 1 numbers of DPF for its 2 rows"),
        ('["88.0"]', '["about 88"]', "'about 88' is not of the form '92.42 ± 0.14', '\\*' or '-'"),
        ('from = "DPF"', 'from = "DFP"', "unknown column 'DFP': did you mean 'DPF'"),
        ('from = "DPF", ', "", "again retrains a mask: name the column that finds it with from"),
        ('from = "dense"', 'from = "again"', "one-shot \\+ FT cannot start from a retraining"),
        ('from = "dense"', 'from = "one-shot + FT"', "one-shot \\+ FT starts from itself"),
        ('retrain = "init"', 'retrain = "int"', "unknown start of a retraining 'int': did you mean 'init'"),
        ('"flops"', '"flop"', "unknown budget 'flop': did you mean 'flops'"),
        ("seeds = [0, 1]", "seeds = [0.5]", r"seeds takes whole numbers, got \[0.5\]"),
        ('show = ["cost"]', 'show = ["speed"]', "unknown measure to show 'speed'"),
        ('show = ["cost"]', 'measure = "test_accuracy"', "unknown measure 'test_accuracy'"),
        ("[columns]", "[columns", "cannot be read"),
        ('"optimizer.lr" = 0.02', '"optimizer.lrr" = 0.02', "did you mean 'lr'"),
    ],
)
def test_tables_that_are_not_well_formed(tmp_path, old, new, says):
    assert old in SMALL
    with pytest.raises(PomonaError, match=says):
        load(tmp_path, SMALL.replace(old, new))


@given(st.integers(0, 9999), st.none() | st.integers(0, 999), st.sampled_from(["", "%", " %"]))
def test_numbers_are_read_as_papers_print_them(mean, std, unit):
    text = f"{mean / 100:.2f}" + ("" if std is None else f" ± {std / 100:.2f}") + unit
    assert parse_paper_number(text) == (mean / 100, None if std is None else std / 100)


# ---- printing


def text(grid, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(grid)
    return console.file.getvalue()


def cell(label, row, column, mean, paper=None, std=None, runs=1):
    value, _ = parse_paper_number(paper)
    known = {"model": "mlp", "method": "dpf", "sparsity": 0.5, "setting": {}, "paper": value, "paper_text": paper}
    return known | {"label": label, "row": row, "own": row, "column": column, "mean": mean, "std": std, "runs": runs}


CELLS = [
    cell("A", "50 %", "dense", 95.0, "95.10 ± 0.04"),
    cell("A", "50 %", "DPF", 91.234, "90.00", 0.5, 3),
    cell("A", "80 %", "DPF", None, "*", runs=0),
    cell("B", "80 %", "DPF", 80.0),
]
RESULT = {
    "title": "T",
    "paper": "P",
    "columns": ["dense", "DPF"],
    "across": False,
    "complete": 3,
    "runs": 9,
    "missing": 3,
    "cells": CELLS,
}


def test_a_grid_has_ours_above_the_papers():
    heads, rows = rendering.layout_table(RESULT)
    assert heads == ["", "", "dense", "DPF"]
    assert rows == [
        ["A", "50 %", "95.00 ×1\n95.10 ± 0.04 −0.10", "91.23 ± 0.50 ×3\n90.00 +1.23"],
        ["", "80 %", "", "–\n*"],
        ["B", "80 %", "", "80.00 ×1"],
    ]
    shown = text(rendering.render_table(RESULT))
    assert shown.startswith("T (P)\n")
    assert "3 of 4 cells complete, 3 of 9 runs missing" in shown
    assert shown.count("├") == 1  # between A and B


def test_what_is_too_wide_has_one_line_a_cell():
    wide = max(map(len, text(rendering.render_table(RESULT)).splitlines()))
    assert text(rendering.render_table(RESULT), wide) == text(rendering.render_table(RESULT))
    narrow = text(rendering.render_table(RESULT), wide - 1)
    assert "│ A     │ 50 % │ DPF    │ 91.23 ± 0.50 ×3 │        90.00 │      +1.23 │" in narrow
    assert "below it" not in narrow
    tight = text(
        rendering.render_table(RESULT | {"cells": [cell("ResNet-20", "50 %", "DPF", 91.234, "90.00", 0.5, 3)]}), 44
    )
    assert "91.23 ± 0.50 ×3" in tight
    assert "…" not in tight  # words are folded


def test_across_prints_columns_as_rows():
    heads, rows = rendering.layout_table(RESULT | {"across": True})
    assert heads == ["", "", "50 %", "80 %"]
    assert [row[:2] for row in rows] == [["A", "dense"], ["", "DPF"], ["B", "DPF"]]
    assert rows[1][2:] == ["91.23 ± 0.50 ×3\n90.00 +1.23", "–\n*"]


def test_with_measures_there_is_one_line_a_cell():
    heads, rows = rendering.layout_table(RESULT | {"show": ["cost"], "cells": [CELLS[1] | {"cost": 12.34}, CELLS[2]]})
    assert heads == ["model", "", "method", "ours", "paper", "difference", "cost, dense epochs"]
    assert rows[0] == ["A", "50 %", "DPF", "91.23 ± 0.50 ×3", "90.00", "+1.23", "12.3"]
    assert rows[1] == ["A", "80 %", "DPF", "–", "*", "", "–"]


def test_without_a_papers_numbers_there_is_no_room_for_them():
    heads, rows = rendering.layout_table(RESULT | {"show": ["last"], "cells": [CELLS[3] | {"last": 79.5}]})
    assert heads == ["model", "", "method", "ours", "last weights"]
    assert rows == [["B", "80 %", "DPF", "80.00 ×1", "79.50"]]


def test_markdown_has_a_line_a_row():
    lines = rendering.render_markdown(RESULT).splitlines()
    assert "| A | 50 % | 95.00 ×1<br>95.10 ± 0.04 −0.10 | 91.23 ± 0.50 ×3<br>90.00 +1.23 |" in lines
    assert "| --- | --- | ---: | ---: |" in lines


def test_without_a_cell_there_is_no_grid():
    nothing = {"title": "T", "paper": "", "notes": "Later.", "cells": []}
    assert text(rendering.render_table(nothing)) == "T\nLater.\nnothing was measured yet\n"
    assert rendering.render_markdown(nothing) == "\nLater.\n"


def test_bars_within_a_cell_are_escaped():
    assert "| A\\|B | 80 % | 80.00 ×1 |" in rendering.render_markdown(RESULT | {"cells": [CELLS[3] | {"label": "A|B"}]})


# ---- tables that are computed


def test_a_computed_table_is_found_by_its_name(monkeypatch):
    plain = {"model": "fcn", "method": "magnitude", "sparsity": 0.1, "setting": {"d": 64}, "std": None, "runs": 5}
    result = {"title": "C", "paper": "Q", "cells": [plain | {"mean": 1.5, "paper": 1.25}]}
    module = types.ModuleType("pomona_computed")
    told: list[tuple] = []
    module.TABLES = {
        "made-table1": lambda: result,
        "made-table2": lambda seed=0, progress=None: progress(1, 2) or result,
    }
    monkeypatch.setitem(sys.modules, "pomona_computed", module)
    monkeypatch.setattr(catalog, "COMPUTED_TABLE_MODULES", ("pomona_computed", "pomona.nowhere.at_all"))
    for name in module.TABLES:
        assert compute_table(find_table(name), lambda *t: told.append(t)) is result
    assert told == [(1, 2)]
    heads, rows = rendering.layout_table(result)
    assert heads == ["model", "method", "sparsity", "setting", "ours", "paper", "difference"]
    assert rows == [["fcn", "magnitude", "0.1", "d = 64", "1.5 ×5", "1.25", "+0.25"]]
    assert "computed" in text(rendering.render_table(result))
    with pytest.raises(PomonaError, match="unknown table 'made-table3': did you mean 'made-table"):
        find_table("made-table3")
    with pytest.raises(PomonaError, match="made-table1 is computed"):
        find_table("made-table1", ["seed=1"])
