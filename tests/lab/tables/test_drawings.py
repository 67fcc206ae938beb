"""Charts of tables and what runs tell about their masks, from records made up by hand."""

from __future__ import annotations

import json
import re

import pytest
from small_table import SMALL_TABLE, load_small_table

from pomona.lab.sweeps.run_store import RunStore
from pomona.lab.tables import mask_figures
from pomona.lab.tables.drawings import CHART_KINDS, draw_charts
from pomona.lab.tables.rendering import layout_table

TRACKED = {
    "settled": [0.5, 0.9, 0.96, 1.0],
    "delta": [0.25, 0.5, None],
    "iou": [0.5, 0.75, None],
    "stages": [{"stage": "train", "layers": {"first": 0.5, "second": 1.0}}],
}


def record_runs(table, folder, **changes) -> RunStore:
    """Write a record of each run of a table that was not retrained, with other accuracies for other seeds."""
    folder.mkdir()
    for run in table.runs():
        if run.retraining is None and run.parent is None:
            about = run.recipe.to_dict()
            facts = {"model": "mlp", "method": about["method"]["name"], "data": "digits", "seed": run.recipe.seed}
            facts |= {"fingerprint": run.recipe.fingerprint(), "epoch": 1, "sparsity": 0.5, "seconds": 1.0, "params": 9}
            facts |= {"nonzeros": 5, "macs": 9, "macs_left": 5, "stages": [{"stage": "train", "layers": {}}]}
            record = facts | {"accuracy": 90.0 + run.recipe.seed, "recipe": about} | changes
            (folder / f"{run.name}.json").write_text(json.dumps(record))
    return RunStore((), (folder,))


def read_points(chart: str) -> list[list[tuple[float, float]]]:
    """Return the points of each curve of a chart, in pixels."""
    curves = re.findall(r'<polyline points="([^"]+)"', chart)
    return [[tuple(map(float, point.split(","))) for point in curve.split()] for curve in curves]


def test_curves_and_numbers_of_runs():
    stage = {"stage": "train", "layers": {"a": 0.7, "b": 0.8}}
    twice = [TRACKED, TRACKED | {"settled": [0.5, 0.7, 0.98, 1.0], "stages": [stage]}]
    assert mask_figures.mean_curve("changing", [TRACKED]) == pytest.approx([50, 10, 4, 0])
    assert mask_figures.mean_curve("changing", twice) == pytest.approx([50, 20, 3, 0])
    assert mask_figures.mean_curve("layers", twice) == pytest.approx([60, 90])
    assert mask_figures.mean_curve("delta", [TRACKED, {"stages": [{}]}]) == [0.25, 0.5, None]
    found = mask_figures.describe_masks(twice)
    assert found == {"settled_epoch": 2, "delta": 0.5, "iou": 0.75, "empty_layers": 0.5}
    assert set(mask_figures.describe_masks([]).values()) == {None}


def test_a_table_has_a_chart_for_each_label_and_column(tmp_path):
    text = SMALL_TABLE.replace('show = ["cost"]', 'show = ["settled_epoch", "empty_layers"]\ncharts = ["changing"]')
    table = load_small_table(tmp_path, text).select(["column=dense,DPF"])
    store = record_runs(table, tmp_path / "records", **TRACKED)
    charts = draw_charts(table, store)
    assert list(charts) == ["small-narrow-dense.svg", "small-narrow-dpf.svg", "small-wide-dpf.svg"]
    curves = read_points(charts["small-narrow-dpf.svg"])
    assert [len(curve) for curve in curves] == [4, 4]  # one curve for each sparsity
    assert curves[0][0][1] < curves[0][-1][1]  # the shares fall, and pixels count from above
    assert all(name in charts["small-narrow-dpf.svg"] for name in ("50 %", "80 %", "still change"))
    heads, rows = layout_table(table.compare(store))
    assert heads[-2:] == ["epoch after which ≤ 5 % of the mask changes", "empty layers"]
    assert rows[-1][-2:] == ["2", "1.0"]


def test_epochs_without_updates_are_left_out_and_charts_without_runs_too(tmp_path):
    text = SMALL_TABLE.replace('show = ["cost"]', 'charts = ["delta", "iou", "layers"]')
    table = load_small_table(tmp_path, text).select(["label=wide", "column=DPF"])
    assert draw_charts(table, RunStore((), ())) == {}
    charts = draw_charts(table, record_runs(table, tmp_path / "records", delta=[0.25, 0.5, None]))
    assert list(charts) == ["small-delta-wide-dpf.svg"]
    assert [len(curve) for curve in read_points(charts["small-delta-wide-dpf.svg"])] == [2]


def test_accuracies_over_sparsity_have_the_dense_network_as_reference(tmp_path):
    table = load_small_table(tmp_path, SMALL_TABLE.replace('show = ["cost"]', 'charts = ["accuracy"]'))
    charts = draw_charts(table, record_runs(table, tmp_path / "records"))
    assert list(charts) == ["small-narrow.svg", "small-wide.svg"]
    assert [len(curve) for curve in read_points(charts["small-narrow.svg"])] == [2]
    assert "dense  90.5" in charts["small-narrow.svg"]
    assert "means of 2 runs" in charts["small-narrow.svg"]
    assert "dense" not in charts["small-wide.svg"]


def test_every_kind_of_chart_is_known():
    assert CHART_KINDS == ("accuracy", "changing", "delta", "iou", "layers")
