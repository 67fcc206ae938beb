"""The charts of a table, as SVG: accuracies over sparsity, and what its runs tell about their masks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..recipes.options import DENSE
from ..sweeps.run_store import RunStore
from .chart import Point, line_chart, sparsity_chart
from .mask_figures import CURVES, mean_curve
from .paper_table import PaperTable, TableCell

ACCURACY = "accuracy"
CHART_KINDS = (ACCURACY, *CURVES)


def draw_charts(table: PaperTable, store: RunStore) -> dict[str, str]:
    """Return the charts of a table by the names of their files; a chart without any run is left out."""
    found = {}
    for kind in table.charts:
        drawn = draw_accuracies(table, store) if kind == ACCURACY else draw_curves(kind, table, store)
        for names, chart in drawn:
            parts = [table.name, *[kind] * (len(table.charts) > 1), *names]
            found["-".join(re.sub(r"\W+", "-", part.lower()).strip("-") for part in parts) + ".svg"] = chart
    return found


def draw_accuracies(table: PaperTable, store: RunStore) -> Iterator[tuple[list[str], str]]:
    """Yield, for each label of a table, a chart of accuracy over sparsity with one curve per column."""
    cells = [cell for cell in table.compare(store)["cells"] if cell["mean"] is not None]
    for label in dict.fromkeys(cell["label"] for cell in cells):
        own = [cell for cell in cells if cell["label"] == label]
        dense = next((cell for cell in own if cell["method"] == DENSE), None)
        series: dict[str, list[Point]] = {}
        for cell in own:
            if cell is not dense:
                series.setdefault(cell["column"], []).append((cell["sparsity"], cell["mean"]))
        if series:
            reference = None if dense is None else (dense["column"], dense["mean"])
            yield [label], sparsity_chart(series, title=label, subtitle=count_runs(own), reference=reference)


def draw_curves(kind: str, table: PaperTable, store: RunStore) -> Iterator[tuple[list[str], str]]:
    """Yield, for each label and column of a table, a chart with one curve of a kind per row."""
    curve_kind, groups = CURVES[kind], dict.fromkeys((cell.label, cell.column) for cell in table.cells)
    for label, column in groups:
        series: dict[str, list[Point]] = {}
        for cell in (cell for cell in table.unique_cells if (cell.label, cell.column) == (label, column)):
            values = mean_curve(kind, finished_summaries(cell, store))
            points = [(float(x), y) for x, y in enumerate(values, curve_kind.first_x) if y is not None]
            series |= {cell.row or column: points} if points else {}
        if series:
            yield (
                [label, column],
                line_chart(
                    series,
                    title=curve_kind.title,
                    subtitle=f"{label}, {column}",
                    x_label=curve_kind.x_label,
                    y_label=curve_kind.y_label,
                    log_axes=(False, False),
                ),
            )


def finished_summaries(cell: TableCell, store: RunStore) -> list[dict[str, Any]]:
    """Return the summaries of a cell's finished runs."""
    results = (run.find_result(store) for run in cell.runs)
    return [run.summary for run in results if run is not None and run.summary is not None]


def count_runs(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return over how many runs the means of cells are taken."""
    counts = sorted({cell["runs"] for cell in cells})
    return f"means of {counts[0]}" + (f" to {counts[-1]}" if len(counts) > 1 else "") + " runs"
