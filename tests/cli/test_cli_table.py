"""The command `table`: tables of runs, computed tables, the list of tables, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_helpers import SMALL_TABLE, read_files


def test_a_table_is_filled_printed_and_recorded(run_command):
    Path("mine.toml").write_text(SMALL_TABLE)
    code, out, err = run_command("table", "mine.toml")
    assert code == 0, err
    assert "0 of 2 cells complete, 2 of 2 runs missing" in out
    assert "95.01 ± 0.04" in out
    code, out, err = run_command("sweep", "mine.toml", "--only", "column=DPF", "--jobs", "1", "--record", "--json")
    assert code == 0, err
    (cell,) = json.loads(out)["cells"]
    assert (cell["method"], cell["sparsity"], cell["runs"], cell["paper"]) == ("dpf", 0.5, 1, None)
    (record,) = Path("results/runs").glob("*.json")
    assert json.loads(record.read_text())["accuracy"] == cell["mean"]
    code, out, err = run_command("table", "mine.toml", "--json")
    shown = json.loads(out)
    assert [c["mean"] for c in shown["cells"]] == [None, cell["mean"]]
    assert shown["missing"] == 1
    assert json.loads(run_command("table", "mine.toml", "--measure", "best", "--json")[1])["cells"][1]["runs"] == 1
    code, out, err = run_command("table", "mine.toml", "--markdown")
    assert f"{cell['mean']:.2f} ×1<br>fresh {cell['fresh']:.2f}, best {cell['best']:.2f}<br>*" in out
    assert "–<br>95.01 ± 0.04" in out
    code, out, err = run_command("sweep", "mine.toml", "--dry-run", "--json")
    assert [run["state"] for run in json.loads(out)] == ["missing", "complete"]


def test_charts_of_a_table_are_drawn(run_command):
    code, _, err = run_command("table", "dpf-figure14", "--only", "label=ResNet-20", "--plot", "charts/new")
    assert code == 0, err
    files = sorted(file.name for file in Path("charts/new").iterdir())
    assert "dpf-figure14-resnet-20-dpf-settled.svg" in files
    assert all(name in err for name in files)
    assert all(file.read_text().startswith("<svg") for file in Path("charts/new").iterdir())


def test_a_table_without_cells_is_printed(run_command, monkeypatch):
    from pomona.lab.tables import catalog

    monkeypatch.setattr(catalog, "computed_tables", lambda: {"nil": lambda: {"title": "T", "paper": "P", "cells": []}})
    for option in ([], ["--markdown"]):
        code, out, err = run_command("table", "nil", *option)
        assert (code, err) == (0, "")
        assert "nothing was measured yet" in out
    assert json.loads(run_command("table", "nil", "--json")[1])["cells"] == []


def test_without_a_name_all_tables_are_listed(run_command, work_folder):
    before = read_files(work_folder)
    code, out, err = run_command("table", "--json")
    assert code == 0, err
    found = {table["name"]: table for table in json.loads(out)}
    assert {"dpf-table1", "dpf-figure12"} <= found.keys()
    assert found["dpf-table2"]["missing"] <= found["dpf-table2"]["runs"] == 135
    assert read_files(work_folder) == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["table", "dpf-tabel1"], "did you mean 'dpf-table1'?"),
        (["table", "small.toml"], "'small.toml' is a recipe, not a table"),
        (["table", "dpf-resnet20"], "'dpf-resnet20' is a recipe, not a table"),
        (["table", "dpf-table1", "--only", "sparsity=0.1"], "unknown sparsity of dpf-table1 '0.1'"),
        (["table", "dpf-table1", "--only", "label=resnet-20"], "did you mean 'ResNet-20'?"),
        (["table", "dpf-table1", "--set", "seed=5"], "seed differs between the runs of a table"),
        (["table", "dpf-table1", "--runs", "nowhere"], "'nowhere' is not a folder"),
        (["table", "dpf-table1", "--markdown", "--json"], "give --markdown or --json"),
        (["table", "--only", "seed=0"], "--only applies to one table"),
        (["table", "--measure", "best"], "--measure applies to one table"),
        (["table", "dpf-table1", "--measure", "frehs"], "did you mean 'fresh'?"),
        (["table", "dpf-rate", "--measure", "fresh"], "on held-out images here"),
        (["table", "gip", "--measure", "fresh"], "gip is computed, not trained"),
        (["table", "--plot", "charts"], "--plot applies to one table"),
        (["table", "dpf-table1", "--plot", "charts"], "dpf-table1 has no chart that can be drawn"),
        (["table", "dpf-figure14", "--plot", "small.toml"], "'small.toml' cannot be written"),
        (["table", "gip", "--only", "seed=0"], "gip is computed, not trained"),
        (["table", "dpf-table1", "--set", "train.epoch=3"], "did you mean 'epochs'?"),
        (["table", "dpf-table1", "--weights", "small.toml"], "dpf-table1 is filled from runs: leave out --weights"),
        (["table", "--weights", "small.toml"], "--weights applies to one table"),
        (["table", "qian-table3", "--weights", "small.toml"], "--weights applies to qian-table1, qian-figure1"),
        (["table", "qian-figure2", "--weights", "nowhere.pt"], "'nowhere.pt' is not a file"),
    ],
)
def test_invalid_arguments_of_table_are_refused(assert_refused, arguments, expected):
    assert_refused(arguments, expected)


def test_a_figure_of_the_weights_in_a_file(run_command):
    import torch

    torch.save({f"{k}.weight": torch.tensor([[k - 1.0, k + 1.0]]) for k in range(3)}, "weights.pt")
    code, out, err = run_command("table", "qian-figure2", "--weights", "weights.pt", "--json")
    assert code == 0, err
    assert [cell["mean"] for cell in json.loads(out)["cells"]] == [0, 1, 2]
    code, out, err = run_command("table", "qian-table1", "--weights", "weights.pt")
    assert code == 0, err
    assert "d E w²" in out
