"""The tables of the page: results, runs, differences of recipes and certificates."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from report_runs import write_grid, write_run

from pomona.report import collect_runs
from pomona.report.collection import PaperPoint
from pomona.report.series import group_runs
from pomona.report.tables import (
    certificate_table,
    difference_table,
    format_seconds,
    format_unit,
    group_table,
    key_figures,
    run_table,
)


def cells_of(table: str) -> list[list[str]]:
    """Return the texts of a table, row by row."""
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)]


def test_settings_are_listed_with_means_paper_and_costs(tmp_path):
    report = collect_runs([write_grid(tmp_path / "grid")])
    report = dataclasses.replace(report, papers=(PaperPoint("digits_cnn on digits", "dpf", 0.9, 91.0, None),))
    header, *rows = cells_of(group_table(report, group_runs(report.runs)))
    assert len(rows) == 5
    row = dict(zip(header, next(row for row in rows if row[1:3] == ["dpf", "90 %"]), strict=True))
    assert (row["result"], row["seeds"], row["paper"], row["difference"]) == ("90.50 ± 0.71", "2", "91.00", "-0.50")
    assert (row["parameters left"], row["MACs left"], row["bytes"]) == ("100 (10 %)", "1 k (10 %)", "525 B")


def test_all_runs_are_listed_also_those_under_way(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", seed=1, complete=False)
    states = [row[3] for row in cells_of(run_table(collect_runs([tmp_path]).runs))]
    assert states == ["state", "complete", "epoch 3 of 3"]


def test_only_settings_that_differ_are_listed(tmp_path):
    report = collect_runs([write_grid(tmp_path / "grid")])
    header, *rows = cells_of(difference_table(group_runs(report.runs)))
    assert header[:3] == ["setting of", "name", "sparsity"]
    assert {"epochs", "train.epochs", "seed", "optimizer.lr"}.isdisjoint(header)
    assert next(row for row in rows if row[0] == "dpf 80 %")[:3] == ["dpf 80 %", "dpf", "0.8"]
    assert difference_table(group_runs(report.runs[:1])) == ""


def test_certificates_are_listed_where_there_are_any(tmp_path):
    plain, certified = write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1)
    assert certificate_table(collect_runs([plain]).runs) == ""
    found = {"sparsity": None, "region": "Ball(radius=1.0)", "error": 0.123, "found": 0.1, "output": 2.0, "layers": []}
    (certified / "certificate.json").write_text(json.dumps(found))
    private = write_run(tmp_path / "c", "dense", private={"method": "gip", "epsilon": 2.0, "delta": 1e-5})
    _, first, second = cells_of(certificate_table(collect_runs([plain, certified, private]).runs))
    assert first == ["dpf-90-seed1", "outputs move by at most 0.123 on Ball(radius=1.0)", "an attack found 0.1"]
    assert second[1] == "(2, 1e-05)-differential privacy"


def test_key_figures_count_runs_and_name_the_best(tmp_path):
    report = collect_runs([write_grid(tmp_path / "grid")])
    tiles = dict(re.findall(r"<dd>(.*?)</dd><dt>(.*?)</dt>", key_figures(report, group_runs(report.runs))))
    assert {v: k for k, v in tiles.items()} == {
        "runs": "10",
        "settings": "5",
        "best test accuracy": "96.00 %",
        "highest sparsity": "90 %",
        "smallest network": "525 B",
    }


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0, "0 B"), (999, "999 B"), (999.9, "1 kB"), (1234, "1.23 kB"), (5e6, "5 MB")]
)
def test_units_have_prefixes(value, text):
    assert format_unit(value, "B") == text


@pytest.mark.parametrize(("seconds", "text"), [(1.234, "1.23 s"), (61, "1 min 01 s"), (3720, "1 h 02 min")])
def test_durations_are_short(seconds, text):
    assert format_seconds(seconds) == text
