"""What `demo`, `train`, `sweep` and `table` write beside their tables: SVG charts (--plot) and a report (--report)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pomona.errors import PomonaError, require

from .output import print_status

if TYPE_CHECKING:
    from pomona.report import ReportData


def require_report(file: Path | None) -> None:
    """Raise PomonaError where a report is asked for and cannot be written, before anything is trained."""
    if file is not None:
        require(not file.is_dir(), f"'{file}' is a folder: give a file for the report, such as report.html.")
        require(has_plotly(), "a report needs plotly: pip install 'pomona[report]'.")


def has_plotly() -> bool:
    """Return whether plotly, whose script draws the charts of a report, is installed."""
    return importlib.util.find_spec("plotly") is not None


def write_run_outputs(folder: Path, plot: Path | None, report: Path | None) -> None:
    """Write the charts and the report of the runs in a folder, if they are asked for."""
    if plot is None and report is None:
        return
    from pomona.report import collect_runs
    from pomona.report.drawings import draw_charts

    found = collect_runs([folder])
    if plot is not None:
        write_charts(draw_charts(found), plot, f"'{folder}'")
    if report is not None:
        write_report_file(found, report)


def write_report_file(report: ReportData, file: Path) -> dict[str, Any]:
    """Write a report, print where it is, and return its file, runs and size."""
    from pomona.report import write_report

    require_report(file)
    write_report(report, file)
    count, size = len(report.runs), file.stat().st_size
    print_status(f"report of {count} run{'s' * (count != 1)}: {file} ({size / 1e6:.1f} MB)")
    return {"file": str(file), "runs": count, "bytes": size}


def write_charts(charts: Mapping[str, str], folder: Path, name: str) -> None:
    """Write charts to a folder; raise PomonaError where there are none or a file cannot be written."""
    require(bool(charts), f"{name} has no chart that can be drawn from the runs that are there.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, chart in charts.items():
            (folder / file).write_text(chart, encoding="utf-8")
    except OSError as error:
        raise PomonaError(f"'{folder}' cannot be written: {error.strerror}.") from error
    print_status(f"written to {folder}: {', '.join(charts)}")
