"""Charts of runs as SVG files, for `--plot`: accuracy over sparsity, and the learning curves of a few runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..lab.recipes.options import DENSE
from ..lab.tables.chart import COLORS, Point, line_chart, sparsity_chart
from .charts import CURVES, curve_of
from .collection import ReportData
from .run_data import RunData
from .series import Group, group_runs

DRAWN_CURVES = ("accuracy", "perplexity", "loss", "sparsity")


def draw_charts(report: ReportData) -> dict[str, str]:
    """Return the charts of a report's runs by the names of their files; a chart without points is left out."""
    groups = group_runs(report.runs)
    drawn = [*draw_accuracies(report, groups), *draw_learning(report.runs)]
    return {re.sub(r"\W+", "-", name.lower()).strip("-") + ".svg": chart for name, chart in drawn}


def draw_accuracies(report: ReportData, groups: Sequence[Group]) -> Iterator[tuple[str, str]]:
    """Yield, for each network with results at several settings, a chart of accuracy over sparsity."""
    for network in report.networks:
        own = [g for g in groups if g.network == network and g.finished and g.runs[0].measure == "accuracy"]
        dense = [group.result() for group in own if group.runs[0].method == DENSE]
        series: dict[str, list[Point]] = {}
        for group in own:
            result = group.result()
            if group.runs[0].method != DENSE and result is not None and group.sparsity < 1:
                series.setdefault(group.series, []).append((group.sparsity, result[0]))
        if series and len(own) > 1:
            reference = (DENSE, dense[0][0]) if dense and dense[0] is not None else None
            yield f"{network}-accuracy", sparsity_chart(series, title=network, reference=reference)


def draw_learning(runs: Sequence[RunData]) -> Iterator[tuple[str, str]]:
    """Yield the learning curves of runs, if there are not more than colors."""
    for key in DRAWN_CURVES if len(runs) <= len(COLORS) else ():
        title, value = CURVES[key]
        series = {run.label: list(zip(*curve, strict=True)) for run in runs if (curve := curve_of(run, value))[0]}
        if series:
            name = f"{runs[0].name}-{key}" if len(runs) == 1 else f"learning-{key}"
            heading = title[0].upper() + title[1:]
            yield name, line_chart(series, title=heading, x_label="epoch", y_label=title, log_axes=(False, False))
