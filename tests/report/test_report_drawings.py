"""The SVG charts of --plot: which there are, and how many curves they have."""

from __future__ import annotations

from xml.etree import ElementTree

from report_runs import write_grid, write_run

from pomona.report import collect_runs
from pomona.report.drawings import draw_charts

LINES = "{http://www.w3.org/2000/svg}polyline"


def count_curves(charts: dict[str, str]) -> dict[str, int]:
    """Return the number of curves of each chart."""
    return {name: len(ElementTree.fromstring(chart).findall(LINES)) for name, chart in charts.items()}


def test_a_run_has_its_learning_curves(tmp_path):
    charts = draw_charts(collect_runs([write_run(tmp_path / "run", name="<mine> & yours")]))
    assert count_curves(charts) == {f"mine-yours-{key}.svg": 1 for key in ("accuracy", "loss", "sparsity")}


def test_a_grid_has_a_curve_for_each_method(tmp_path):
    charts = draw_charts(collect_runs([write_grid(tmp_path / "grid")]))
    assert count_curves(charts) == {"digits_cnn-on-digits-accuracy.svg": 2}
    assert "dense  95.5" in charts["digits_cnn-on-digits-accuracy.svg"]


def test_runs_under_way_have_learning_curves_only(tmp_path):
    charts = draw_charts(collect_runs([write_grid(tmp_path / "grid", seeds=1, complete=False)]))
    assert count_curves(charts) == {f"learning-{key}.svg": 5 for key in ("accuracy", "loss", "sparsity")}
