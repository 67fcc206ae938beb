"""The figures: their points, error bars and cells, and that plotly accepts them."""

from __future__ import annotations

import dataclasses
import json
import statistics

import pytest
from report_runs import LAYERS, write_grid, write_run

from pomona.report import collect_runs
from pomona.report.charts import learning_chart, result_charts
from pomona.report.collection import PaperPoint
from pomona.report.figures import compact, compact_x
from pomona.report.mask_charts import UPDATE_LIMITS, mask_charts, update_limit
from pomona.report.series import group_runs


@pytest.fixture
def report(tmp_path):
    return collect_runs([write_grid(tmp_path / "grid", seeds=2)])


def charts_of(report) -> dict:
    """Return all charts of a report by name."""
    groups = group_runs(report.runs)
    return {c.name: c for c in [*result_charts(report, groups), learning_chart(groups), *mask_charts(groups)]}


def figure_of(report, name: str) -> dict:
    """Return the first figure of a chart."""
    return next(iter(charts_of(report)[name].choices.values()))


def test_points_are_means_with_the_deviation_over_seeds(report):
    traces = {trace["name"]: trace for trace in figure_of(report, "sparsity")["data"]}
    assert list(traces) == ["dense", "dense, single runs", "dpf", "dpf, single runs", "rigl", "rigl, single runs"]
    assert traces["dpf"]["y"] == [90.5, 80.5]  # from the sparsest
    assert traces["dpf"]["x"] == pytest.approx([0.1, 0.2])
    assert traces["dpf"]["error_y"]["array"] == pytest.approx([statistics.stdev([0, 1])] * 2, rel=1e-4)
    assert traces["dpf, single runs"]["y"] == [90, 91, 80, 81]
    assert traces["dense"]["x"] == [1]
    assert "seeds 0, 1" in traces["dpf"]["text"][0]


def test_seeds_with_teachers_of_their_own_are_one_point(report):
    runs = [
        dataclasses.replace(run, settings={**run.settings, "teacher.fingerprint": f"{run.seed:012x}"})
        for run in report.runs
    ]
    assert [len(group.runs) for group in group_runs(runs)] == [len(group.runs) for group in group_runs(report.runs)]


def test_costs_that_were_not_measured_have_no_chart(report, tmp_path):
    assert {"sparsity", "macs", "bytes"} <= charts_of(report).keys()
    assert "latency" not in charts_of(report)
    folder = write_run(tmp_path / "timed")
    (folder / "latency.json").write_text('{"milliseconds": 1.5}')
    assert figure_of(collect_runs([folder]), "latency")["data"][0]["x"] == [1.5]


def test_the_paper_is_beside_ours_at_its_sparsity(report):
    points = (PaperPoint("digits_cnn on digits", "dpf", 0.9, 91.0, 0.2), PaperPoint("other", "dpf", 0.9, 70.0, None))
    both = dataclasses.replace(report, papers=points)
    chart = charts_of(both)["sparsity"]
    assert list(chart.choices) == ["digits_cnn on digits", "other"]
    ours, other = chart.choices.values()
    trace = next(trace for trace in ours["data"] if trace["name"] == "dpf, paper")
    assert (trace["x"], trace["y"], trace["error_y"]["array"]) == ([pytest.approx(0.1)], [91], [0.2])
    own = next(trace for trace in ours["data"] if trace["name"] == "dpf")
    assert trace["marker"]["color"] == own["marker"]["color"]
    assert [trace["name"] for trace in other["data"]] == ["dpf, paper"]


def test_each_run_has_a_learning_curve_and_each_group_one_entry_in_the_legend(report):
    traces = figure_of(report, "learning")["data"]
    assert len(traces) == len(report.runs)
    assert sum(trace["showlegend"] for trace in traces) == 5
    assert {len(trace["y"]) for trace in traces} == {3}
    assert {(trace["x0"], trace["dx"]) for trace in traces} == {(1, 1)}


def test_accuracies_with_fresh_statistics_come_first_where_they_were_measured(tmp_path):
    folder = write_run(tmp_path / "run")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first = next(row for row in rows if row["kind"] == "epoch")
    first["accuracy_reestimated"] = 77.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    choices = charts_of(collect_runs([folder]))["learning"].choices
    fresh, plain = (figure["data"][0]["y"] for figure in list(choices.values())[:2])
    assert (fresh[0], fresh[1:]) == (77.0, plain[1:])
    assert plain[0] == pytest.approx(first["accuracy"], rel=1e-4)


def test_the_heat_map_has_a_cell_for_every_layer_and_update(report):
    chart = charts_of(report)["layers"]
    assert len(chart.choices) == 8
    for figure in chart.choices.values():
        (trace,) = figure["data"]
        assert trace["y"] == ["first", "second"]
        assert trace["x"] == [0, 1, 2]
        assert [len(row) for row in trace["z"]] == [3] * len(LAYERS)


def test_flips_are_shares_of_the_mask(report):
    charts = charts_of(report)
    assert len(charts["flips"].choices[""]["data"]) == 8
    assert charts["flips"].choices[""]["data"][0]["y"] == [10, 10, 10]  # 40 of 400 entries
    assert charts["iou"].choices[""]["data"][0]["y"] == [0.9] * 3
    assert charts["settled"].choices[""]["data"][0]["y"] == [80, 90, 100]


def test_very_many_updates_are_thinned(tmp_path):
    low, high = UPDATE_LIMITS
    report = collect_runs([write_run(tmp_path / "run", epochs=20, updates=2 * high)])
    assert len(figure_of(report, "layers")["data"][0]["x"]) == high
    assert update_limit([*report.runs] * 100_000) == low


def test_runs_without_masks_have_no_mask_charts(tmp_path):
    report = collect_runs([write_run(tmp_path / "run", "dense")])
    assert charts_of(report).keys() == {"sparsity", "macs", "bytes", "learning"}


def test_plotly_accepts_every_figure(report):
    graph_objects = pytest.importorskip("plotly.graph_objects")
    for chart in charts_of(report).values():
        for figure in chart.choices.values():
            painted = repaint(figure)
            assert len(graph_objects.Figure(painted).data) == len(figure["data"])


def repaint(value):
    """Return a figure with a color in place of each reference to the page's palette."""
    if isinstance(value, dict):
        return {key: repaint(item) for key, item in value.items()}
    if isinstance(value, list):
        return [repaint(item) for item in value]
    return "#123456" if isinstance(value, str) and value.startswith("@") else value


def test_numbers_are_short():
    assert compact([1 / 3, None, float("nan"), 123456.7]) == [0.33333, None, None, 123460.0]
    assert compact_x([1, 2, 3]) == {"x0": 1, "dx": 1}
    assert compact_x([2, 4, 6]) == {"x0": 2, "dx": 2}
    assert compact_x([1, 2, 4]) == {"x": [1, 2, 4]}
    assert compact_x([5]) == {"x": [5]}
    assert compact_x([0.5, 1.0]) == {"x": [0.5, 1.0]}
