"""Charts of results: accuracy against sparsity, MACs, bytes and latency, and learning curves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..lab.recipes.options import DENSE
from .collection import PaperPoint, ReportData
from .figures import (
    DASHES,
    PALETTE_SIZE,
    Chart,
    Figure,
    color_of,
    compact,
    escape_text,
    layout,
    line_trace,
    number_names,
)
from .run_data import Row, RunData
from .series import Group, format_percent, mean_of

RESULT_TITLES = {"accuracy": "test accuracy, %", "perplexity": "test perplexity"}
SPARSITY_TICKS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
FEW_RUNS = 12  # curves of more runs are drawn lighter, since they cover each other
MAX_OWN_TICKS = 8  # sparsities that are marked themselves; of more, those of SPARSITY_TICKS


@dataclass(frozen=True)
class Cost:
    """A cost of a network, against which results are drawn."""

    name: str
    title: str
    caption: str
    axis: str
    value: Callable[[RunData], float | None]
    suffix: str = ""  # unit of the ticks


def density(run: RunData) -> float | None:
    """Return the share of the targets that is left; None where it is nothing, which a logarithm cannot show."""
    left = 1 - run.reached_sparsity
    return left if left > 0 else None


COSTS = (
    Cost("sparsity", "Accuracy against sparsity", "", "sparsity: the share of the targets that is pruned", density),
    Cost(
        "macs",
        "Accuracy against MACs",
        "Multiply–accumulates with a nonzero weight, for one sample.",
        "MACs left",
        lambda run: (run.summary or {}).get("macs_left"),
    ),
    Cost(
        "bytes",
        "Accuracy against bytes",
        "Nonzero parameters in float32, and one mask bit for each parameter of a pruned network.",
        "bytes",
        lambda run: run.stored_bytes,
        "B",
    ),
    Cost(
        "latency",
        "Accuracy against latency",
        "Median of one forward pass of one sample on one CPU thread, in the faster of the plain and the packed form.",
        "milliseconds per sample",
        lambda run: run.latency.get("milliseconds"),
    ),
)


def result_charts(report: ReportData, groups: Sequence[Group]) -> list[Chart]:
    """Return the charts of results against each cost that the runs have; the reader chooses the network."""
    colors = series_colors([*(group.series for group in groups), *(point.series for point in report.papers)])
    charts = []
    for cost in COSTS:
        choices = {}
        for network in report.networks:
            own = [group for group in groups if group.network == network]
            papers = [point for point in report.papers if point.network == network] if cost.name == "sparsity" else []
            figure = result_figure(cost, own, papers, colors)
            if figure["data"]:
                choices[network] = figure
        caption = cost.caption or result_caption(groups, bool(report.papers))
        charts.append(Chart(cost.name, cost.title, caption, choices, "Network", wide=cost.name == "sparsity"))
    return [chart for chart in charts if chart.has_points]


def result_caption(groups: Sequence[Group], has_papers: bool) -> str:
    """Return what the points of the first chart are."""
    seeds = max((len(group.finished) for group in groups), default=0)
    means = (
        "Means over seeds with one standard deviation; small dots are single runs." if seeds > 1 else "One seed each."
    )
    return means + " Open diamonds are the paper's." * has_papers


def result_figure(
    cost: Cost, groups: Sequence[Group], papers: Sequence[PaperPoint], colors: Mapping[str, int]
) -> Figure:
    """Return a figure of results against a cost, with a curve for each series and the paper's points beside it."""
    measure = groups[0].runs[0].measure if groups else "accuracy"
    measured = [group for group in groups if point_of(group, cost) is not None]
    data = []
    for series in dict.fromkeys(group.series for group in measured):
        own = sorted((g for g in measured if g.series == series), key=lambda group: point_of(group, cost) or 0)
        data += series_traces(series, own, cost, colors[series])
    for series in dict.fromkeys(point.series for point in papers):
        data.append(paper_trace(series, [p for p in papers if p.series == series and p.sparsity < 1], colors[series]))
    axis: dict[str, Any] = {"type": "log"}
    if cost.name == "sparsity":
        found = {round(one.asked_sparsity, 4) for one in measured} | {round(point.sparsity, 4) for point in papers}
        ticks = sorted(found) if len(found) <= MAX_OWN_TICKS else list(SPARSITY_TICKS)
        axis |= {
            "autorange": "reversed",
            "tickvals": [1 - tick for tick in ticks if tick < 1],
            "ticktext": [format_percent(tick) for tick in ticks if tick < 1],
        }
    else:
        axis |= {"tickformat": "~s", "ticksuffix": cost.suffix, "dtick": "D2"}
    return {"data": data, "layout": layout(cost.axis, RESULT_TITLES[measure], xaxis=axis, shapes=dense_line(groups))}


def series_traces(series: str, groups: Sequence[Group], cost: Cost, color: int) -> list[Figure]:
    """Return the means of a series with their error bars and, where there are several seeds, its single runs."""
    results = [result for group in groups if (result := group.result()) is not None]
    deviations = [std or 0.0 for _, std in results]
    traces: list[Figure] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": compact(point_of(group, cost) for group in groups),
            "y": compact(mean for mean, _ in results),
            "error_y": {"array": compact(deviations), "visible": any(deviations), "color": color_of(color), "width": 4},
            "name": escape_text(series),
            "legendgroup": escape_text(series),
            "text": [escape_text(describe_group(group)).replace("\n", "<br>") for group in groups],
            "hovertemplate": "%{text}<extra></extra>",
            "line": {"color": color_of(color), "width": 2},
            "marker": {"color": color_of(color), "size": 9},
        }
    ]
    runs = [run for group in groups if len(group.finished) > 1 for run in group.finished]
    if runs:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": compact(map(cost.value, runs)),
                "y": compact(run.result for run in runs),
                "name": escape_text(f"{series}, single runs"),
                "legendgroup": escape_text(series),
                "showlegend": False,
                "text": [escape_text(run.label) for run in runs],
                "hovertemplate": "<b>%{text}</b><br>%{y:.2f}<extra></extra>",
                "marker": {"color": color_of(color), "size": 5, "opacity": 0.45},
            }
        )
    return traces


def paper_trace(series: str, points: Sequence[PaperPoint], color: int) -> Figure:
    """Return the paper's points of a series."""
    points = sorted(points, key=lambda point: point.sparsity)
    deviations = [point.std or 0.0 for point in points]
    texts = [f"{p.mean:.2f}" + (f" ± {p.std:.2f}" if p.std is not None else "") for p in points]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": compact(1 - point.sparsity for point in points),
        "y": compact(point.mean for point in points),
        "error_y": {"array": compact(deviations), "visible": any(deviations), "color": color_of(color), "width": 4},
        "name": escape_text(f"{series}, paper"),
        "meta": escape_text(f"{series}, paper"),
        "text": [f"{text} at {format_percent(p.sparsity)}" for text, p in zip(texts, points, strict=True)],
        "hovertemplate": "<b>%{meta}</b><br>%{text}<extra></extra>",
        "line": {"color": color_of(color), "width": 1.2, "dash": "dot"},
        "marker": {"color": color_of(color), "size": 10, "symbol": "diamond-open", "line": {"width": 1.6}},
    }


def dense_line(groups: Sequence[Group]) -> list[Figure]:
    """Return a horizontal line at the result of the dense network, if there is one."""
    dense = [result for group in groups if group.runs[0].method == DENSE and (result := group.result()) is not None]
    if len(dense) != 1:
        return []
    y = dense[0][0]
    line = {"dash": "dot", "width": 1, "color": "@ink"}
    return [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line, "layer": "below"}]


def series_colors(names: Iterable[str]) -> dict[str, int]:
    """Return the color of each series; that of a dense network is the last of the palette, a gray."""
    found = dict.fromkeys(names)
    gray = {name: PALETTE_SIZE - 1 for name in found if name == DENSE}
    return {name: index % (PALETTE_SIZE - 1) for index, name in enumerate(n for n in found if n not in gray)} | gray


def point_of(group: Group, cost: Cost) -> float | None:
    """Return the mean cost of the finished runs of a group; None where one of them does not have it."""
    return mean_of([cost.value(run) for run in group.finished])


def describe_group(group: Group) -> str:
    """Return the hover text of a group: its name, its result and its seeds."""
    result = group.result()
    assert result is not None
    mean, std = result
    value = f"{mean:.2f}" + (f" ± {std:.2f}" if std is not None else "")
    unit = " %" if group.runs[0].measure == "accuracy" else ""
    seeds = ", ".join(str(run.seed) for run in group.finished)
    names = group.finished[0].name if len(group.finished) == 1 else f"{len(group.finished)} runs"
    return (
        f"{group.label}\n{value}{unit} {group.runs[0].measure}\n{names} · seed{'s' * (len(group.finished) > 1)} {seeds}"
    )


# ---- learning curves

FRESH = "accuracy_reestimated"  # with batch-norm statistics estimated anew, where the mask had just changed
CURVES: dict[str, tuple[str, Callable[[Row], float | None]]] = {  # title of the axis, and the value of an epoch
    "fresh": ("test accuracy with fresh batch-norm statistics, %", lambda row: row.get(FRESH, row.get("accuracy"))),
    "accuracy": ("test accuracy, %", lambda row: row.get("accuracy")),
    "perplexity": ("test perplexity", lambda row: row.get("perplexity")),
    "loss": ("training loss", lambda row: row.get("loss")),
    "test_loss": ("test loss", lambda row: row.get("test_loss")),
    "valid_accuracy": ("validation accuracy, %", lambda row: row.get("valid_accuracy")),
    "sparsity": ("sparsity of the targets, %", lambda row: 100 * row["sparsity"] if "sparsity" in row else None),
    "lr": ("learning rate", lambda row: row.get("lr")),
    "epsilon": ("privacy budget spent, ε", lambda row: row.get("epsilon")),
}


def learning_chart(groups: Sequence[Group]) -> Chart:
    """Return the learning curves of all runs; the reader chooses what is drawn."""
    choices = {}
    has_fresh = any(FRESH in row for group in groups for run in group.runs for row in run.epochs)
    for key, (title, value) in CURVES.items():
        data = [
            line_trace(*curve, name, label=run.label, hover="epoch %{x}: %{y:.4~g}", **style)
            for name, run, style in styled_runs(groups)
            if (curve := curve_of(run, value))[0]
        ]
        if data and (has_fresh or key != "fresh"):
            choices[title[0].upper() + title[1:]] = {"data": data, "layout": layout("epoch", title)}
    caption = (
        "One curve for each run; the color is the method, the dash is the sparsity. A click in the legend hides one."
    )
    note = " Right after a mask update, batch-norm statistics are out of date and the plain accuracy dips." * has_fresh
    return Chart("learning", "Learning curves", caption + note, choices, "Measure", wide=True)


def curve_of(run: RunData, value: Callable[[Row], float | None]) -> tuple[list[float], list[float]]:
    """Return the epochs at which a value was recorded, and the values."""
    points = [(row["epoch"], found) for row in run.epochs if (found := value(row)) is not None]
    return [x for x, _ in points], [y for _, y in points]


def styled_runs(groups: Sequence[Group]) -> list[tuple[str, RunData, dict[str, Any]]]:
    """Return every run with its name in the legend and the style of its curves: a color by series, a dash by sparsity.

    The runs of a group have one entry in the legend.
    """
    colors = series_colors(group.series for group in groups)
    levels = number_names(f"{level:.4f}" for level in sorted({group.asked_sparsity for group in groups}))
    several = len({group.network for group in groups}) > 1
    opacity = 1.0 if sum(len(group.runs) for group in groups) <= FEW_RUNS else 0.7
    found = []
    for group in groups:
        name = f"{group.network}: {group.label}" if several else group.label
        dash = DASHES[levels[f"{group.asked_sparsity:.4f}"] % len(DASHES)]
        style = {
            "color": colors[group.series],
            "line": {"dash": dash},
            "legendgroup": escape_text(name),
            "opacity": opacity,
        }
        found += [(name, run, {**style, "showlegend": k == 0}) for k, run in enumerate(group.runs)]
    return found
