"""Paper tables: the order of runs, the selection of cells, and the numbers of the paper."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_table import load_small_table

from pomona.errors import PomonaError
from pomona.lab.sweeps.run_store import RunStore
from pomona.lab.tables.catalog import find_table
from pomona.lab.tables.paper_table import parse_paper_number


@pytest.fixture
def work_folder(tmp_path, monkeypatch):
    """Return an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_runs_every_cell_is_missing(work_folder):
    found = find_table("dpf-table2").compare(RunStore((), ()))
    assert (found["complete"], found["missing"]) == (0, found["runs"])
    cell = next(c for c in found["cells"] if c["column"] == "DPF + FT" and c["sparsity"] == 0.95)
    assert {"model", "method", "sparsity", "setting", "mean", "std", "runs", "paper"} <= cell.keys()
    assert (cell["model"], cell["method"], cell["mean"], cell["runs"]) == ("resnet20", "dpf", None, 0)
    assert (cell["paper"], cell["paper_std"], cell["missing"]) == (90.34, 0.31, [0, 1, 2])
    assert cell["setting"]["finetune"] == 60
    assert json.loads(json.dumps(found)) == found


def test_runs_are_ordered_by_seed_and_then_by_the_queue(tmp_path):
    names = [run.name for run in load_small_table(tmp_path).runs()]
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


def test_select(tmp_path):
    found = load_small_table(tmp_path)
    some = found.select(["label=narrow", "column=DPF,dense", "sparsity=0.8", "seed=1"])
    assert [(cell.column, cell.row, [run.recipe.seed for run in cell.runs]) for cell in some.cells] == [
        ("DPF", "80 %", [1])
    ]
    assert len(found.select(["settle=0"]).cells) == 4
    assert {cell.label for cell in found.select(["model=mlp", "method=dpf"]).cells} == {"narrow", "wide"}
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


def test_runs_are_compared_by_the_last_epoch_the_fresh_statistics_or_the_best_epoch(tmp_path):
    records = {0: {"accuracy": 80.0, "accuracy_reestimated": 90.0}, 1: {"accuracy": 84.0, "accuracy_best": 85.0}}
    table = load_small_table(tmp_path).select(["label=wide", "column=DPF"])
    (tmp_path / "records").mkdir()
    for run in table.runs():
        facts = {"model": "mlp", "method": "dpf", "data": "digits", "seed": run.recipe.seed, "epoch": 1, "macs": 9}
        facts |= {"fingerprint": run.recipe.fingerprint(), "stages": [{"stage": "train"}]}
        facts |= {"sparsity": 0.5, "seconds": 1.0, "params": 9}
        record = facts | {"nonzeros": 5, "macs_left": 5, "recipe": run.recipe.to_dict()} | records[run.recipe.seed]
        (tmp_path / "records" / f"{run.name}.json").write_text(json.dumps(record))
    store = RunStore((), (tmp_path / "records",))
    found = {measure: table.compare(store, measure)["cells"][0] for measure in ("last", "fresh", "best")}
    assert [(cell["mean"], cell["runs"]) for cell in found.values()] == [(82.0, 2), (87.0, 2), (85.0, 1)]
    assert found["last"]["fresh"] == 87.0
    assert "best" not in found["last"]  # one of the runs was not evaluated after each epoch
    assert "fresh" not in found["fresh"]
    assert found["best"]["difference"] == -3.0
    assert found["best"]["missing"] == []


def test_select_accepts_a_name_with_commas():
    found, name = find_table("dpf-figure8"), "first weights, same epochs"
    for text, columns in ((name, {name}), (f"'{name}'", {name}), (f'DPF,"{name}"', {"DPF", name})):
        assert {cell.column for cell in found.select([f"column={text}"]).cells} == columns


@given(st.integers(0, 9999), st.none() | st.integers(0, 999), st.sampled_from(["", "%", " %"]))
def test_parse_paper_number(mean, std, unit):
    text = f"{mean / 100:.2f}" + ("" if std is None else f" ± {std / 100:.2f}") + unit
    assert parse_paper_number(text) == (mean / 100, None if std is None else std / 100)
