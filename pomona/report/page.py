"""The HTML page of a report: sections of charts and tables, with plotly.js, the style and the script inside.

Text of users is escaped where it becomes HTML, and the figures are JSON in which no tag can begin.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from ..errors import PomonaError
from ..lab.runs.durable_files import replace_file, write_errors
from ..untrusted import reading
from ..version import __version__
from .charts import learning_chart, result_charts
from .collection import ReportData
from .figures import Chart
from .mask_charts import mask_charts
from .series import group_runs
from .tables import certificate_table, difference_table, group_table, key_figures, run_table

REPORT_FILE = "report.html"


@dataclass(frozen=True)
class Section:
    """A section of the page: charts, HTML, or both."""

    name: str
    title: str
    charts: Sequence[Chart] = ()
    content: str = ""  # HTML


def make_sections(report: ReportData) -> list[Section]:
    """Return the sections that have something to show, in the order of the page."""
    groups = group_runs(report.runs)
    finished = any(group.finished for group in groups)
    summary = group_table(report, groups) if finished else ""
    details = f"<details><summary>All {len(report.runs)} runs</summary>{run_table(report.runs)}</details>"
    curves = learning_chart(groups)
    sections = [
        Section("overview", "", content=key_figures(report, groups)),
        Section("results", "Results", result_charts(report, groups)),
        Section("summary", "Summary", content=summary + (details if summary else run_table(report.runs))),
        Section("training", "Training", [curves] if curves.has_points else []),
        Section("masks", "Masks", mask_charts(groups)),
        Section("certificates", "Certificates", content=certificate_table(report.runs)),
        Section("recipes", "What differs between the recipes", content=difference_table(groups)),
    ]
    return [section for section in sections if section.charts or section.content]


def render_page(report: ReportData, live: bool = False) -> str:
    """Return the page of a report as HTML; a live page asks its server for news.

    Raises:
        PomonaError: where plotly, whose script draws the charts, is not installed.
    """
    with reading(f"a run of '{report.title}'"):
        sections = make_sections(report)
    links = (f'<a href="#{one.name}">{html.escape(one.title)}</a>' for one in sections if one.title)
    return Template(read_asset("page.html")).substitute(
        title=html.escape(report.title),
        subtitle=html.escape(describe_networks(report)),
        version=html.escape(__version__),
        live="true" if live else "false",
        links="".join(links),
        sections="\n".join(map(render_section, sections)),
        figures=encode_script_json(figure_data(sections)),
        style=read_asset("page.css"),
        script=read_asset("page.js"),
        plotly=read_plotly_script(),
    )


def write_report(report: ReportData, file: Path) -> Path:
    """Write the page of a report to a file and return it."""
    page = render_page(report)
    with write_errors(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, page.encode())
    return file


def describe_networks(report: ReportData) -> str:
    """Return the networks of a report in a line; of many, the first."""
    names = report.networks
    return " · ".join(names[:4]) + f" and {len(names) - 4} more" * (len(names) > 4)


def render_section(section: Section) -> str:
    """Return a section as HTML, with a place for each of its charts."""
    heading = f"<h2>{html.escape(section.title)}</h2>" if section.title else ""
    charts = "\n".join(map(render_chart, section.charts))
    grid = f'<div class="charts">{charts}</div>' if charts else ""
    content = f'<div class="content">{section.content}</div>' if section.content else ""
    return f'<section id="{section.name}">{heading}{grid}{content}</section>'


def render_chart(chart: Chart) -> str:
    """Return the place of a chart: its title, its caption and, where there are several figures, their choice."""
    options = "".join(f"<option>{html.escape(label)}</option>" for label in chart.choices)
    label = html.escape(chart.choice_title)
    choice = f'<label class="choice">{label} <select>{options}</select></label>' if len(chart.choices) > 1 else ""
    return (
        f'<figure class="chart{" wide" * chart.wide}" id="chart-{chart.name}"><figcaption>'
        f"<h3>{html.escape(chart.title)}</h3><p>{html.escape(chart.caption)}</p>{choice}</figcaption>"
        f'<div class="plot" role="img" aria-label="{html.escape(chart.title)}"></div></figure>'
    )


def figure_data(sections: Iterable[Section]) -> dict[str, Any]:
    """Return the figures of all charts by the charts' names, in the order of their choices."""
    return {chart.name: list(chart.choices.values()) for section in sections for chart in section.charts}


def live_data(report: ReportData) -> dict[str, Any]:
    """Return what a live page replaces when there is news: its figures and the HTML of its tables."""
    sections = make_sections(report)
    contents = {section.name: section.content for section in sections if section.content}
    return {"figures": without_nan(figure_data(sections)), "contents": contents}


def encode_script_json(value: Any) -> str:
    """Return JSON that may stand in a script element: no tag or comment can begin in it."""
    return json.dumps(without_nan(value), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def without_nan(value: Any) -> Any:
    """Return nested values with None, a gap in a curve, for each number that JSON does not have."""
    if isinstance(value, dict):
        return {key: without_nan(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_asset(name: str) -> str:
    """Return the text of a file in `assets`."""
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def read_plotly_script() -> str:
    """Return plotly.js, which the Python package contains; raise PomonaError where it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise PomonaError("a report needs plotly: pip install 'pomona[report]'.") from error
    return str(get_plotlyjs())
