"""What runs reached, side by side: one record for each method and sparsity, and a table of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group
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


def table(cells: Sequence[Mapping[str, Any]]) -> Group:
    """Rows are sparsities (and other settings), columns methods: mean ± standard deviation, the best marked."""
    dense = [c for c in cells if c["method"] == DENSE]
    pruned = [c for c in cells if c["method"] != DENSE]
    grid = Table(caption_justify="left")
    grid.add_column("sparsity", justify="right")
    columns = list(dict.fromkeys(column(c, pruned) for c in pruned))
    for name in columns:
        grid.add_column(name, justify="right", no_wrap=True)
    rows: dict[str, dict[str, Mapping[str, Any]]] = {}
    for c in pruned:
        rows.setdefault(row(c), {})[column(c, pruned)] = c
    for name, found in rows.items():
        grid.add_row(name, *(show(found[c], found.values()) if c in found else "–" for c in columns))
    grid.caption = "★ the best of its row" if len(columns) > 1 else None
    return Group(*map(heading, dense), *[grid] * bool(pruned))


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
    """A cell, marked where no other of its row is better in print."""
    sign = -1 if cell["setting"].get("measure") == "perplexity" else 1
    best = max(sign * rival["mean"] for rival in rivals)
    return f"[bold green]★ {number(cell)}[/]" if sign * cell["mean"] > best - 0.005 else number(cell)


def number(cell: Mapping[str, Any]) -> str:
    return f"{cell['mean']:.2f}" + (f" ± {cell['std']:.2f}" if cell["std"] is not None else "")
