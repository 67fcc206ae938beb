"""Filling a table: the order of its runs, records, runs that exist, failures and interruption."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import threading
from pathlib import Path

import pytest
import torch
from run_helpers import InterruptAtStep, StopAfter
from small_table import SMALL_TABLE, load_small_table

from pomona.errors import PomonaError
from pomona.lab import Interrupted, Recipe, train
from pomona.lab.runs.folder import locked_folder
from pomona.lab.sweeps.run_store import RunStore
from pomona.lab.sweeps.sweep import SweepInterrupted
from pomona.lab.tables.filling import TABLE_RUNS, fill_table, trainable_runs, write_table_records


@pytest.fixture
def work_folder(tmp_path, monkeypatch):
    """Return an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """Return the folder, the result and the callbacks of the small table, filled."""
    torch.set_num_threads(1)
    work_folder = tmp_path_factory.mktemp("tables")
    before = Path.cwd()
    os.chdir(work_folder)
    try:
        calls: list[tuple] = []
        result = fill_table(
            load_small_table(work_folder), records=work_folder / "records", jobs=1, on_result=lambda *t: calls.append(t)
        )
    finally:
        os.chdir(before)
    return work_folder, result, calls


def test_a_run_that_starts_from_another_waits_for_it(tmp_path):
    found = load_small_table(tmp_path)
    names = [run.recipe.name for _, run in trainable_runs(found.runs(), RunStore((), ()), tmp_path)]
    assert "mlp-dense-seed0" in names
    assert not [name for name in names if "oneshot" in name or "retrain" in name]
    # The first part of a fine-tuned run is not trained separately.
    assert "mlp-dpf-50-hidden_16_-settle0-epochs1-seed0" in names
    assert "mlp-dpf-50-hidden_16_-settle0-seed0" not in names


def test_a_parent_is_trained_although_a_finetuned_run_contains_it(tmp_path):
    text = SMALL_TABLE.replace('"DPF", "again"]', '"DPF", "DPF + FT", "again"]')
    found = trainable_runs(load_small_table(tmp_path, text).runs(), RunStore((), ()), tmp_path)
    names = [run.recipe.name for _, run in found]
    assert {"mlp-dpf-50-settle0-seed0", "mlp-dpf-50-settle0-epochs1-seed0"} <= set(names)
    assert "mlp-dpf-50-hidden_16_-settle0-seed0" not in names


def test_a_filled_table_compares_with_the_paper(filled):
    work_folder, result, calls = filled
    assert (result["missing"], result["failed"]) == (0, [])
    assert result["complete"] == len(result["cells"]) == 9
    cells = {(c["label"], c["row"], c["column"]): c for c in result["cells"]}
    cell = cells["narrow", "80 %", "DPF"]
    reached = [
        json.loads(file.read_text())["accuracy"]
        for file in sorted((work_folder / "runs" / "tables").glob("mlp-dpf-80-settle0-seed?-????????????/summary.json"))
    ]
    assert len(reached) == 2
    assert (cell["mean"], cell["std"], cell["runs"]) == (statistics.mean(reached), statistics.stdev(reached), 2)
    assert cell["difference"] == cell["mean"] - 90.0
    assert (cell["method"], cell["sparsity"], cell["setting"]["settle"]) == ("dpf", 0.8, 0)
    assert (cells["narrow", "50 %", "DPF"]["paper"], cells["narrow", "50 %", "DPF"]["paper_text"]) == (None, "*")
    assert ("narrow", "80 %", "dense") not in cells  # once, in the first row
    again = cells["narrow", "50 %", "again"]
    assert (again["method"], again["sparsity"], again["paper"]) == ("finetune", 0.5, None)
    # The budget is that of the run that found the mask, to the nearest epoch.
    assert abs(again["cost"] - cells["narrow", "50 %", "DPF"]["cost"]) <= 0.5
    assert [t[0] for t in calls] == sorted(t[0] for t in calls)
    assert calls[-1][:2] == (18, 18)


def test_a_table_may_compare_on_the_validation_part(work_folder):
    text = """
        title = "settled"
        measure = "valid_accuracy"
        show = ["last"]
        [columns]
        settled = { "method.settle" = 0.5 }
        [[part]]
        label = "small"
        recipe = { model = "mlp(hidden=[8])", method = "dpf(every=2, schedule='cubic(until=0.5)')" }
        [part.set]
        data = "digits(validation=400)"
        train = { epochs = 2, batch_size = 450, device = "cpu", average = 0.5 }
    """
    found = fill_table(load_small_table(work_folder, text), jobs=1)
    (one,), (run,) = found["cells"], RunStore((work_folder / "runs",), ()).runs.values()
    assert one["mean"] == run.summary["valid_accuracy"] != run.summary["accuracy"]
    assert one["last"] == run.summary["valid_accuracy_last"]


def test_the_first_part_of_a_finetuned_run_fills_a_cell(filled):
    work_folder, result, calls = filled
    short, long = (
        next(c for c in result["cells"] if c["column"] == n and c["label"] == "wide") for n in ("DPF", "DPF + FT")
    )
    assert len(calls) == 16  # of 18: two are contained in runs with fine-tuning
    assert (short["setting"]["epochs"], long["setting"]["epochs"]) == (1, 2)
    stages = [
        json.loads(f.read_text())["stages"] for f in (work_folder / "runs" / "tables").glob("*hidden*/summary.json")
    ]
    assert short["mean"] == statistics.mean(both[0]["accuracy"] for both in stages)
    assert long["mean"] == statistics.mean(both[1]["accuracy"] for both in stages)


def test_one_shot_starts_from_the_dense_network(filled):
    work_folder, _, _ = filled
    for file in (work_folder / "runs" / "tables").glob("*oneshot*/recipe.toml"):
        recipe = Recipe.load(file)
        assert (recipe.origin.weights, recipe.optimizer.lr) == ("final", 0.02)
        dense = next(
            t for t in load_small_table(work_folder).runs() if t.recipe.fingerprint() == recipe.origin.fingerprint
        )
        assert (dense.recipe.method["name"], dense.recipe.seed) == ("dense", recipe.seed)


def test_records_are_enough_for_the_table(filled, work_folder):
    filled_folder, result, _ = filled
    found = load_small_table(filled_folder)
    assert len(list((filled_folder / "records").glob("*.json"))) == 16
    again = found.compare(RunStore((), (filled_folder / "records",)))
    for cell in again["cells"]:
        assert cell["runs"] == 2
    assert json.loads(json.dumps(again)) == json.loads(json.dumps({k: v for k, v in result.items() if k != "failed"}))


def test_records_are_written_of_runs_that_existed(filled, work_folder):
    filled_folder, _, _ = filled
    shutil.copytree(filled_folder / "runs", work_folder / "runs")
    calls: list[tuple] = []
    fill_table(
        load_small_table(work_folder),
        only_missing=True,
        records=work_folder / "kept",
        on_result=lambda *t: calls.append(t),
    )
    assert calls == []
    assert {f.name for f in (work_folder / "kept").iterdir()} == {f.name for f in (filled_folder / "records").iterdir()}


def test_records_are_written_of_finished_runs_only(filled, tmp_path):
    filled_folder, _, _ = filled
    found, store = load_small_table(filled_folder), RunStore((filled_folder / "runs",), ())
    files = write_table_records(found.select(["column=DPF"]), store, tmp_path)
    assert sorted(tmp_path.glob("*.json")) == sorted(set(files))
    assert len(set(files)) == 6


def test_only_missing_trains_each_run_once(filled, work_folder):
    filled_folder, _, _ = filled
    shutil.copytree(filled_folder / "runs", work_folder / "runs")
    found = load_small_table(work_folder)
    with pytest.raises(PomonaError, match="18 of the 18 runs of small exist already: continue with --only-missing"):
        fill_table(found)
    calls: list[tuple] = []
    gone = next((work_folder / "runs" / "tables").glob("mlp-oneshot-80*seed1*"))
    shutil.rmtree(gone)
    result = fill_table(found, only_missing=True, jobs=1, on_result=lambda *t: calls.append(t))
    assert [t[2].folder.name for t in calls] == [gone.name]
    assert result["missing"] == 0


def test_a_parent_that_is_only_a_record_is_trained_again(filled, work_folder):
    filled_folder, _, _ = filled
    shutil.copytree(filled_folder / "records", work_folder / "results" / "runs")
    for file in (work_folder / "results" / "runs").glob("*oneshot-50*seed0*"):
        file.unlink()
    calls: list[tuple] = []
    result = fill_table(load_small_table(work_folder), only_missing=True, jobs=1, on_result=lambda *t: calls.append(t))
    assert [t[2].recipe.name for t in calls] == ["mlp-dense-seed0", "mlp-oneshot-50-lr0.02-seed0"]
    assert result["missing"] == 0


def test_children_of_a_failed_run_are_not_trained(work_folder):
    text = SMALL_TABLE.replace('model = "mlp(hidden=[8])"', 'model = "mlp(hidden=[])"')  # nothing to prune
    found = load_small_table(work_folder, text).select(["label=narrow", "column=DPF,again", "seed=0"])
    calls: list[tuple] = []
    result = fill_table(found, jobs=1, on_result=lambda *t: calls.append(t[:2]))
    assert calls == [(1, 4), (2, 4)]
    assert [f["name"] for f in result["failed"]] == ["mlp-dpf-50-settle0-seed0", "mlp-dpf-80-settle0-seed0"]
    assert "nothing to prune" in result["failed"][0]["error"]
    assert result["missing"] == 4


def test_a_run_of_another_version_is_found_by_its_children(filled, work_folder):
    """A fingerprint may be that of an older version; child runs refer to their parents by it."""
    filled_folder, _, _ = filled
    shutil.copytree(filled_folder / "runs", work_folder / "runs")
    place = work_folder / "runs" / "tables"
    families = {"dense-seed0-????????????": "oneshot-*-seed0-*", "dpf-50-settle0-seed0-????????????": "*-50-*retrain*"}
    for parent, children in families.items():
        summary = next(place.glob(f"mlp-{parent}")) / "summary.json"
        old = json.loads(summary.read_text())["fingerprint"]
        for file in [summary, *(folder / "recipe.toml" for folder in place.glob(f"mlp-{children}"))]:
            file.write_text(file.read_text().replace(f'"{old}"', '"before"'))
    assert sum('"before"' in file.read_text() for file in place.glob("*/recipe.toml")) == 3
    assert load_small_table(work_folder).compare(RunStore((work_folder / "runs",), ()))["missing"] == 0


def test_a_begun_run_is_resumed_in_its_folder(work_folder):
    found = load_small_table(work_folder).select(["label=narrow", "column=DPF", "sparsity=0.5", "seed=0"])
    (run,) = found.runs()
    with pytest.raises(Interrupted):
        train(run.recipe, work_folder / "runs" / "elsewhere", stop=StopAfter(2))
    calls: list[tuple] = []
    fill_table(found, only_missing=True, jobs=1, on_result=lambda *t: calls.append(t))
    assert [t[2].folder for t in calls] == [Path("runs/elsewhere")]
    assert not (work_folder / TABLE_RUNS).exists()


def test_a_run_with_a_damaged_mask_is_finished_again_before_its_children(filled, work_folder):
    filled_folder, _, _ = filled
    shutil.copytree(filled_folder / "runs", work_folder / "runs")
    for seed in (0, 1):
        (parent,) = (work_folder / "runs" / "tables").glob(f"mlp-dpf-80-settle0-seed{seed}-????????????")
        shutil.rmtree(next(parent.parent.glob(f"{parent.name}-retrain*")))
    (parent / "masks.safetensors").write_bytes(b"no masks")
    result = fill_table(load_small_table(work_folder), only_missing=True, jobs=1)
    assert (result["missing"], result["failed"]) == (0, [])
    assert (parent / "masks.safetensors").stat().st_size > len(b"no masks")


def test_a_run_under_way_in_another_process_comes_last_and_is_waited_for(work_folder):
    found = load_small_table(work_folder).select(["label=narrow", "column=DPF", "seed=0"])
    first, second = (run.to_sweep_run(RunStore((), ()), TABLE_RUNS) for run in found.runs())
    order = []
    with contextlib.ExitStack() as lock:
        lock.enter_context(locked_folder(first.folder))
        end_other_process = threading.Timer(1.0, lock.close)

        def on_result(done, total, run, result):
            order.append(run.folder)
            if len(order) == 1:
                end_other_process.start()

        result = fill_table(found, jobs=1, on_result=on_result)
    assert order == [second.folder, first.folder]
    assert (result["missing"], result["failed"]) == (0, [])


def test_a_run_that_another_process_ends_is_not_trained_again(work_folder):
    found = load_small_table(work_folder).select(["label=narrow", "column=DPF", "seed=0"])
    first, second = (run.to_sweep_run(RunStore((), ()), TABLE_RUNS) for run in found.runs())

    def finish_in_other_process(*arguments):
        lock.close()
        train(first.recipe, first.folder)

    with contextlib.ExitStack() as lock:
        lock.enter_context(locked_folder(first.folder))
        result = fill_table(
            found, jobs=1, on_result=lambda *t: finish_in_other_process() if t[2].folder == second.folder else None
        )
    assert (result["missing"], result["failed"]) == (0, [])


def test_only_missing_continues_a_table_after_ctrl_c(filled, work_folder):
    found = load_small_table(work_folder).select(["label=narrow", "column=DPF"])
    interrupt = InterruptAtStep(5)  # in the second of four runs of three steps
    with pytest.raises(SweepInterrupted, match="stopped with 1 of 4 runs complete in 'runs/tables'"):
        fill_table(found, jobs=1, progress=lambda: interrupt)
    store = RunStore()
    assert [run.state(store) for run in found.runs()] == ["complete", "begun", "missing", "missing"]
    result = fill_table(found, only_missing=True, jobs=1)
    whole = {(c["label"], c["row"], c["column"]): c["mean"] for c in filled[1]["cells"]}
    assert [c["mean"] for c in result["cells"]] == [whole["narrow", row, "DPF"] for row in ("50 %", "80 %")]
