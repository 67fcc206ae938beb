"""Tables of the report as HTML. Cells are plain text, and only `html_table` makes HTML of them."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .collection import ReportData
from .run_data import RunData
from .series import Group, differing_settings, format_percent, format_value, mean_of, shorten

UNITS = ("", "k", "M", "G", "T", "P")


def html_table(headers: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """Return a table; the first `texts` columns are aligned to the left, the others, numbers, to the right."""
    kinds = [""] * texts + [' class="num"'] * (len(headers) - texts)

    def line(tag: str, cells: Sequence[str]) -> str:
        marked = (f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(marked)}</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table><thead>{line("th", headers)}</thead><tbody>\n{body}\n</tbody></table></div>'


def key_figures(report: ReportData, groups: Sequence[Group]) -> str:
    """Return the figures at the head of the page: runs, settings, the best result and the smallest network."""
    finished = [run for run in report.runs if run.result is not None]
    facts = {"runs": str(len(report.runs)), "settings": str(len(groups))}
    if len(finished) < len(report.runs):
        facts["complete"] = str(len(finished))
    accurate = [(run.result or 0.0, run.label) for run in finished if run.measure == "accuracy"]
    if accurate:
        facts["best test accuracy"] = f"{max(accurate)[0]:.2f} %"
    if report.runs:
        facts["highest sparsity"] = format_percent(max(run.reached_sparsity for run in report.runs))
    sizes = [run.stored_bytes for run in report.runs if run.stored_bytes is not None]
    if sizes:
        facts["smallest network"] = format_unit(min(sizes), "B")
    tiles = (f"<div><dd>{html.escape(value)}</dd><dt>{html.escape(name)}</dt></div>" for name, value in facts.items())
    return f'<dl class="tiles">{"".join(tiles)}</dl>'


def group_table(report: ReportData, groups: Sequence[Group]) -> str:
    """Return the table of settings: the mean result over seeds beside the paper's, and the costs."""
    papers = {(p.network, p.series, round(p.sparsity, 4)): p for p in report.papers}
    shown = [group for group in groups if group.finished]
    has_paper, has_latency = bool(papers), any(run.latency for run in report.runs)
    headers = ["network", "method", "sparsity", "result", "seeds"]
    headers += ["paper", "difference"] * has_paper
    headers += ["parameters left", "MACs left", "bytes", *["latency"] * has_latency, "time"]
    rows = []
    for group in shown:
        mean, std = group.result() or (0.0, None)
        row = [group.network, group.series, format_percent(group.sparsity), format_result(mean, std)]
        row.append(str(len(group.finished)))
        if has_paper:
            paper = papers.get((group.network, group.series, round(group.asked_sparsity, 4)))
            row += ["", ""] if paper is None else [format_result(paper.mean, paper.std), f"{mean - paper.mean:+.2f}"]
        row += [format_left(group, "nonzeros", "params"), format_left(group, "macs_left", "macs")]
        row.append(format_unit(mean_of([run.stored_bytes for run in group.finished]), "B"))
        if has_latency:
            row.append(format_unit(mean_of([run.latency.get("milliseconds") for run in group.finished]), "ms"))
        row.append(format_seconds(group.mean("seconds") or 0.0))
        rows.append(row)
    return html_table(headers, rows, texts=2)


def run_table(runs: Sequence[RunData]) -> str:
    """Return the table of all runs, with those that are still training."""
    rows = []
    for run in runs:
        last: Mapping[str, Any] = run.summary or (run.epochs[-1] if run.epochs else {})
        result = last.get(run.measure)
        done = "complete" if run.summary is not None else f"epoch {last.get('epoch', 0)} of {run.total_epochs}"
        rows.append(
            [
                run.name,
                run.method,
                str(run.folder or "record"),
                done,
                str(run.seed),
                format_percent(run.reached_sparsity),
                "–" if result is None else f"{result:.2f}",
                format_seconds(last.get("seconds", 0.0)),
            ]
        )
    headers = ["run", "method", "folder", "state", "seed", "sparsity", "result", "time"]
    return html_table(headers, rows, texts=4)


def difference_table(groups: Sequence[Group]) -> str:
    """Return the table of the settings in which runs differ, besides their seeds; nothing where there is none."""
    settings = [group.runs[0].settings for group in groups]
    keys = differing_settings(settings) if settings else []
    if not keys:
        return ""
    rows = [
        [group.label, *(format_value(own.get(key)) for key in keys)]
        for group, own in zip(groups, settings, strict=True)
    ]
    return html_table(["setting of", *map(shorten, keys)], rows, texts=1 + len(keys))


def certificate_table(runs: Sequence[RunData]) -> str:
    """Return the certificates of runs: bounds on the outputs of pruned networks and privacy budgets."""
    rows = []
    for run in runs:
        if "error" in run.certificate:
            found = run.certificate
            bound = f"outputs move by at most {found['error']:.4g} on {found.get('region', 'the region')}"
            rows.append([run.label, bound, f"an attack found {found.get('found', 0.0):.4g}"])
        private = (run.summary or {}).get("private")
        if isinstance(private, Mapping) and "epsilon" in private:
            guarantee = f"({private['epsilon']:.4g}, {private.get('delta', 0):.1g})-differential privacy"
            rows.append([run.label, guarantee, ""])
    return html_table(["run", "certificate", "compare"], rows, texts=3) if rows else ""


# ---- numbers


def format_result(mean: float, std: float | None) -> str:
    """Return a mean with its standard deviation where there is one."""
    return f"{mean:.2f}" + (f" ± {std:.2f}" if std is not None else "")


def format_left(group: Group, left: str, whole: str) -> str:
    """Return a count and its share of the whole, as in "3.2k (10 %)"."""
    count, total = group.mean(left), group.mean(whole)
    if count is None or not total:
        return "–"
    return f"{format_unit(count)} ({100 * count / total:.3g} %)"


def format_unit(value: float | None, unit: str = "") -> str:
    """Return a number with three digits and a prefix of its unit, as in "12.3 kB"; a dash for None."""
    if value is None:
        return "–"
    power = 0
    while abs(value) >= 999.5 and power < len(UNITS) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {UNITS[power]}{unit}".strip()


def format_seconds(seconds: float) -> str:
    """Return a duration as in "12 s", "3 min 20 s" or "2 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
