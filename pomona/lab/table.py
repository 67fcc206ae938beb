"""What runs reached, side by side: one record for each method and sparsity, and a table of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from .recipe import DENSE, Recipe

Run = tuple[Recipe, Mapping[str, Any], Mapping[str, Any]]  # with what sets it apart, and its summary


def cells(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """One cell for each model, method, sparsity and setting, with the mean over its seeds."""
    groups: dict[str, list[Run]] = {}
    for recipe, setting, summary in runs:
        key = [summary["model"], summary["data"], summary["method"], recipe.method.get("sparsity", 0.0), setting]
        groups.setdefault(json.dumps(key), []).append((recipe, setting, summary))
    return [cell(group) for group in groups.values()]


def cell(runs: Sequence[Run]) -> dict[str, Any]:
    """Runs that differ in their seeds as one. Accuracies are in per cent; a language model has perplexities."""
    recipe, setting, first = runs[0]
    measure = "accuracy" if "accuracy" in first else "perplexity"
    values = [summary[measure] for _, _, summary in runs]
    return {
        "model": first["model"],
        "method": first["method"],
        "sparsity": recipe.method.get("sparsity", 0.0),
        "setting": {
            "data": first["data"],
            "epochs": first["epoch"],
            "seeds": [summary["seed"] for _, _, summary in runs],
            **({} if measure == "accuracy" else {"measure": measure}),
            **setting,
        },
        "mean": statistics.mean(values),
        "std": statistics.stdev(values) if len(runs) > 1 else None,
        "runs": len(runs),
        "paper": None,
        "reached": statistics.mean(summary["sparsity"] for _, _, summary in runs),
        "params": first["params"],
        "params_left": round(statistics.mean(summary["nonzeros"] for _, _, summary in runs)),
        "macs": first["macs"],
        "macs_left": round(statistics.mean(summary["macs_left"] for _, _, summary in runs)),
        "seconds": statistics.mean(summary["seconds"] for _, _, summary in runs),
    }


WIDE = 6  # so many columns fit a terminal


def table(cells: Sequence[Mapping[str, Any]]) -> Group:
    """Sparsities (and other settings) by methods: mean ± standard deviation, the best at each sparsity marked.

    Methods are columns, or rows where there are many.
    """
    dense = [c for c in cells if c["method"] == DENSE]
    pruned = [c for c in cells if c["method"] != DENSE]
    found = {(row(c), column(c, pruned)): c for c in pruned}
    rows, columns = (list(dict.fromkeys(key[k] for key in found)) for k in (0, 1))
    texts = {key: show(c, [found[key[0], m] for m in columns if (key[0], m) in found]) for key, c in found.items()}
    if len(columns) > WIDE:
        grid = fill("method", columns, rows, {(m, s): text for (s, m), text in texts.items()})
    else:
        grid = fill("sparsity", rows, columns, texts)
    grid.caption = "★ the best at its sparsity" if len(columns) > 1 else None
    return Group(*map(heading, dense), *[grid] * bool(pruned))


def fill(corner: str, rows: Sequence[str], columns: Sequence[str], texts: Mapping[tuple[str, str], str]) -> Table:
    """A table of texts by row and column."""
    grid = Table(corner, caption_justify="left")
    for name in columns:
        grid.add_column(escape(name), justify="right", no_wrap=True)
    for name in rows:
        grid.add_row(escape(name), *(texts.get((name, column), "–") for column in columns))
    return grid


def heading(dense: Mapping[str, Any]) -> str:
    """What was trained, and what it is without pruning."""
    setting = dense["setting"]
    measure = setting.get("measure", "accuracy in %")
    return f"{dense['model']} on {setting['data']}, {measure} · dense after {setting['epochs']} epochs: {number(dense)}"


def row(cell: Mapping[str, Any]) -> str:
    """The sparsity, and what else of the recipe sets cells apart."""
    common = ("data", "epochs", "seeds", "measure", "options")
    rest = [f"{key}={value}" for key, value in cell["setting"].items() if key not in common]
    return " ".join([f"{100 * cell['sparsity']:g} %", *rest])


def column(cell: Mapping[str, Any], among: Sequence[Mapping[str, Any]]) -> str:
    """The method, with its options where it is there in several ways."""
    mine, *ways = (c["setting"].get("options", {}) for c in (cell, *among) if c["method"] == cell["method"])
    text = ", ".join(f"{key}={value}" for key, value in mine.items())
    return f"{cell['method']}({text})" if any(way != mine for way in ways) else cell["method"]


def show(cell: Mapping[str, Any], rivals: Iterable[Mapping[str, Any]]) -> str:
    """A cell, marked where no rival is better in print."""
    sign = -1 if cell["setting"].get("measure") == "perplexity" else 1
    best = max(sign * rival["mean"] for rival in rivals)
    return f"[bold green]★ {number(cell)}[/]" if sign * cell["mean"] > best - 0.005 else number(cell)


def number(cell: Mapping[str, Any]) -> str:
    return f"{cell['mean']:.2f}" + (f" ± {cell['std']:.2f}" if cell["std"] is not None else "")
