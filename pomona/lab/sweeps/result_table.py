"""What runs reached, side by side: of a sweep by method and sparsity, of a paper's table as it is printed there."""

from __future__ import annotations

import functools
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from ..recipes.options import DENSE
from ..recipes.recipe import Recipe

Run = tuple[Recipe, Mapping[str, Any], Mapping[str, Any]]  # with what sets it apart, and its summary


def cells(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """One cell for each model, method, sparsity and setting, with the mean over its seeds."""
    groups: dict[str, list[Run]] = {}
    for recipe, setting, summary in runs:
        key = [summary["model"], summary["data"], summary["method"], recipe.method.get("sparsity", 0.0), setting]
        groups.setdefault(json.dumps(key), []).append((recipe, setting, summary))
    return [cell(group) for group in groups.values()]


def cell(runs: Sequence[Run], measure: str = "accuracy") -> dict[str, Any]:
    """Runs that differ in their seeds as one, by a measure. Accuracies are in per cent; a language model has
    perplexities in their place."""
    recipe, setting, first = runs[0]
    measure = measure if measure in first else measure.replace("accuracy", "perplexity")
    values = [summary[measure] for _, _, summary in runs]
    last = f"{measure}_last"  # before the weights were averaged
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
        **({"last": statistics.mean(summary[last] for _, _, summary in runs)} if last in first else {}),
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


# ---- a paper's table

# What may stand beside the accuracies: how it is called, and how it is written.
SHOW: dict[str, tuple[str, Callable[[float], str]]] = {
    "reached": ("sparsity", "{:.2%}".format),
    "params_left": ("parameters", "{:,.0f}".format),
    "macs_left": ("MACs", "{:,.0f}".format),
    "cost": ("cost, dense epochs", "{:.1f}".format),
    "seconds": ("seconds", "{:.0f}".format),
    "last": ("last weights", "{:.2f}".format),
}


def layout(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of a table: by rows and columns as the paper has it, or one line a cell."""
    cells = result["cells"]
    if not cells:
        return [], []
    if result.get("show") or not all("column" in cell for cell in cells):
        return lines(cells, result.get("show", ()))
    across = bool(result["across"])
    grid = {(c["label"], *((c["row"], c["column"])[:: -1 if across else 1])): c for c in cells}
    rows = list(dict.fromkeys((label, row) for label, row, _ in grid))
    columns = list(dict.fromkeys(column for _, _, column in grid))
    if not across:
        columns.sort(key=result["columns"].index)
    texts = [[*row, *(both(grid.get((*row, column))) for column in columns)] for row in rows]
    for above, text in reversed(list(itertools.pairwise(texts))):
        text[0] = "" if text[0] == above[0] else text[0]  # a label once
    return ["", "", *columns], texts


def lines(cells: Sequence[Mapping[str, Any]], measures: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """One line a cell."""
    shown: dict[str, Callable[[Mapping[str, Any]], str]] = {"ours": ours}
    if any(map(printed, cells)):
        shown |= {"paper": printed, "difference": difference}
    shown |= {SHOW[key][0]: functools.partial(beside, key) for key in measures}
    texts = [[*places(cell).values(), *(text(cell) for text in shown.values())] for cell in cells]
    return [*places(cells[0]), *shown], texts


def beside(measure: str, cell: Mapping[str, Any]) -> str:
    """What stands beside a cell's accuracy."""
    return "–" if cell.get(measure) is None else SHOW[measure][1](cell[measure])


def places(cell: Mapping[str, Any]) -> dict[str, str]:
    """What a cell is of."""
    if "column" in cell:
        return {"model": cell["label"], "": cell["own"], "method": cell["column"]}
    rest = ", ".join(f"{key} = {value}" for key, value in cell["setting"].items())
    return {"model": cell["model"], "method": cell["method"], "sparsity": f"{cell['sparsity']:.4g}", "setting": rest}


def both(cell: Mapping[str, Any] | None) -> str:
    """Ours above the paper's, with the difference."""
    if cell is None:
        return ""
    below = printed(cell)
    return "\n".join([ours(cell), *([f"{below} {difference(cell)}".strip()] if below else [])])


def ours(cell: Mapping[str, Any]) -> str:
    if cell["mean"] is None:
        return "–"
    std = cell["std"]
    if "column" in cell:
        return f"{number(cell)} ×{cell['runs']}"
    return f"{cell['mean']:.4g}" + (f" ± {std:.2g}" if std is not None else "") + f" ×{cell['runs']}"


def printed(cell: Mapping[str, Any]) -> str:
    if cell.get("paper_text") is not None:
        return str(cell["paper_text"])
    return "" if cell["paper"] is None else f"{cell['paper']:.4g}"


def difference(cell: Mapping[str, Any]) -> str:
    if cell["mean"] is None or cell["paper"] is None:
        return ""
    return f"{cell['mean'] - cell['paper']:{'+.2f' if 'column' in cell else '+.2g'}}".replace("-", "−")


def state(result: Mapping[str, Any]) -> str:
    """What of a table of runs is there."""
    if not result["cells"]:
        return "nothing was measured yet"
    if "missing" not in result:
        return "computed"
    done = f"{result['complete']} of {len(result['cells'])} cells complete"
    return done + (f", {result['missing']} of {result['runs']} runs missing" if result["missing"] else "")


LEGEND = "ours with the number of runs, below it the paper's and the difference; * did not converge there"


def paper(result: Mapping[str, Any]) -> Group:
    """A paper's table for a person: as it is printed there, or one line a cell where that is too wide."""
    heads, rows = layout(result)
    notes = [escape(result["notes"])] if result.get("notes") else []
    grid: list[Table | Fitting] = [framed(heads, rows)] if rows else []
    if rows and "ours" not in heads:
        grid = [Fitting(Group(*grid, LEGEND), framed(*lines(result["cells"], ())))]
    return Group(escape(heading_of(result)), *grid, *notes, state(result))


class Fitting:
    """The first of some renderables that is not too wide, else the last of them."""

    def __init__(self, *ways: Group | Table) -> None:
        self.ways = ways

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        endless = options.update(max_width=10_000)
        widths = [Measurement.get(console, endless, way).maximum for way in self.ways]
        fits = (way for way, width in zip(self.ways, widths, strict=True) if width <= options.max_width)
        yield next(fits, self.ways[-1])


def framed(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Rows in a frame, with a line between what has different labels; where there is no room, words are folded."""
    grid = Table()
    for k, head in enumerate(heads):
        word = k < texts(heads)
        grid.add_column(escape(head), justify="left" if word else "right", no_wrap=not word, overflow="fold")
    label = ""
    for row in rows:
        if label and row[0] not in ("", label):
            grid.add_section()
        label = row[0] or label
        grid.add_row(*map(escape, row))
    return grid


def heading_of(result: Mapping[str, Any]) -> str:
    return result["title"] + (f" ({result['paper']})" if result["paper"] else "")


def texts(heads: Sequence[str]) -> int:
    """How many of the first columns are words."""
    return heads.index("ours") if "ours" in heads else 2


def markdown(result: Mapping[str, Any]) -> str:
    """The rows of a paper's table, and its notes, for a page."""
    heads, rows = layout(result)
    rule = ["---" if k < texts(heads) else "---:" for k in range(len(heads))]
    bars = [heads, rule, *rows] if rows else []
    lines = ["| " + " | ".join(text.replace("|", "\\|").replace("\n", "<br>") for text in bar) + " |" for bar in bars]
    notes = ["", result["notes"]] if result.get("notes") else []
    return "\n".join([*lines, *notes]) + "\n"
