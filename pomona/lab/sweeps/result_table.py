"""The result table of a sweep: one cell per method, sparsity and setting, with the mean over seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from ..recipes.options import DENSE
from ..recipes.recipe import Recipe
from .measures import measured_value

FinishedRun = tuple[Recipe, Mapping[str, Any], Mapping[str, Any]]  # recipe, values on the axes, summary
MAX_COLUMNS = 6  # methods that fit a terminal as columns; more methods become rows
TIE = 0.005  # accuracies closer than this are equal when printed with two decimals


def make_cells(runs: Iterable[FinishedRun]) -> list[dict[str, Any]]:
    """Return one cell for each model, data set, method, sparsity and setting; its runs differ in their seeds."""
    groups: dict[str, list[FinishedRun]] = {}
    for recipe, setting, summary in runs:
        key = [summary["model"], summary["data"], summary["method"], recipe.method.get("sparsity", 0.0), setting]
        groups.setdefault(json.dumps(key), []).append((recipe, setting, summary))
    return [make_cell(group) for group in groups.values()]


def make_cell(runs: Sequence[FinishedRun], measure: str = "accuracy") -> dict[str, Any]:
    """Return the cell of runs that differ in their seeds, with the mean and standard deviation of a measure.

    Accuracies are in per cent; of a language model the perplexity takes the place of the accuracy.
    """
    recipe, setting, first = runs[0]
    summaries = [summary for _, _, summary in runs]
    values = [value for summary in summaries if (value := measured_value(summary, measure)) is not None]
    measure = measure.replace("accuracy", "perplexity") if "perplexity" in first else measure
    last = f"{measure}_last"  # of the weights before they were averaged
    return {
        "model": first["model"],
        "method": first["method"],
        "sparsity": recipe.method.get("sparsity", 0.0),
        "setting": {
            "data": first["data"],
            "epochs": first["epoch"],
            "seeds": [summary["seed"] for summary in summaries],
            **({} if measure == "accuracy" else {"measure": measure}),
            **setting,
        },
        **mean_and_deviation(values),
        "reached": statistics.mean(summary["sparsity"] for summary in summaries),
        **costs(summaries),
        **({"last": statistics.mean(summary[last] for summary in summaries)} if last in first else {}),
    }


def mean_and_deviation(values: Sequence[float]) -> dict[str, Any]:
    """Return the entries of a cell that describe its values: mean, std and runs, with no value of a paper."""
    std = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "std": std, "runs": len(values), "paper": None}


def costs(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entries of a cell that describe its cost: parameters, MACs and seconds."""
    first = summaries[0]
    return {
        "params": first["params"],
        "params_left": round(statistics.mean(summary["nonzeros"] for summary in summaries)),
        "macs": first["macs"],
        "macs_left": round(statistics.mean(summary["macs_left"] for summary in summaries)),
        "seconds": statistics.mean(summary["seconds"] for summary in summaries),
    }


def render_table(cells: Sequence[Mapping[str, Any]]) -> Group:
    """Return a table of sparsities (and other settings) by methods, with the best mean at each sparsity marked.

    Methods are columns, or rows where there are more than `MAX_COLUMNS`.
    """
    dense = [cell for cell in cells if cell["method"] == DENSE]
    pruned = [cell for cell in cells if cell["method"] != DENSE]
    found = {(row_label(cell), column_label(cell, pruned)): cell for cell in pruned}
    rows, columns = (list(dict.fromkeys(key[k] for key in found)) for k in (0, 1))
    texts = {}
    for (row, column), cell in found.items():
        rivals = [found[row, other] for other in columns if (row, other) in found]
        texts[row, column] = format_cell(cell, rivals)
    if len(columns) > MAX_COLUMNS:
        grid = grid_table("method", columns, rows, {(m, s): text for (s, m), text in texts.items()})
    else:
        grid = grid_table("sparsity", rows, columns, texts)
    grid.caption = "★ the best at its sparsity" if len(columns) > 1 else None
    return Group(*map(dense_heading, dense), *[grid] * bool(pruned))


def grid_table(corner: str, rows: Sequence[str], columns: Sequence[str], texts: Mapping[tuple[str, str], str]) -> Table:
    """Return a table of texts by row and column; `corner` is the heading of the row labels."""
    grid = Table(corner, caption_justify="left")
    for name in columns:
        grid.add_column(escape(name), justify="right", no_wrap=True)
    for name in rows:
        grid.add_row(escape(name), *(texts.get((name, column), "–") for column in columns))
    return grid


def dense_heading(dense: Mapping[str, Any]) -> str:
    """Return a heading with the model, the data and the result of the dense network."""
    setting = dense["setting"]
    measure = setting.get("measure", "accuracy in %")
    result = f"dense after {setting['epochs']} epochs: {format_mean(dense)}"
    return f"{dense['model']} on {setting['data']}, {measure} · {result}"


def row_label(cell: Mapping[str, Any]) -> str:
    """Return the sparsity of a cell, and the values of the axes besides method and seed."""
    common = ("data", "epochs", "seeds", "measure", "options")
    rest = [f"{key}={value}" for key, value in cell["setting"].items() if key not in common]
    return " ".join([f"{100 * cell['sparsity']:g} %", *rest])


def column_label(cell: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> str:
    """Return the method of a cell, with its options where `cells` hold the method with other options too."""
    own, *others = (c["setting"].get("options", {}) for c in (cell, *cells) if c["method"] == cell["method"])
    text = ", ".join(f"{key}={value}" for key, value in own.items())
    return f"{cell['method']}({text})" if any(other != own for other in others) else cell["method"]


def format_cell(cell: Mapping[str, Any], rivals: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of a cell, marked where no rival is better in print."""
    sign = -1 if cell["setting"].get("measure") == "perplexity" else 1
    best = max(sign * rival["mean"] for rival in rivals)
    return f"[bold green]★ {format_mean(cell)}[/]" if sign * cell["mean"] > best - TIE else format_mean(cell)


def format_mean(cell: Mapping[str, Any]) -> str:
    """Return the mean of a cell, with its standard deviation where there is one."""
    return f"{cell['mean']:.2f}" + (f" ± {cell['std']:.2f}" if cell["std"] is not None else "")
