"""How a paper's table is printed: our results beside the paper's, for a terminal or as Markdown.

The functions take the table as `PaperTable.compare` or the function of a computed table returns it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from ..sweeps.measures import DETAILS
from ..sweeps.result_table import format_mean

# Further measures that a table may show: the heading of the column, and the format of a value.
MEASURE_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "reached": ("sparsity", "{:.2%}".format),
    "params_left": ("parameters", "{:,.0f}".format),
    "macs_left": ("MACs", "{:,.0f}".format),
    "cost": ("cost, dense epochs", "{:.1f}".format),
    "seconds": ("seconds", "{:.0f}".format),
    "last": ("last weights", "{:.2f}".format),
    "fresh": ("fresh statistics", "{:.2f}".format),
    "best": ("best epoch", "{:.2f}".format),
    "settled_epoch": ("epoch after which ≤ 5 % of the mask changes", "{:.0f}".format),
    "delta": ("δ at the end", "{:.4f}".format),
    "iou": ("IoU at the end", "{:.4f}".format),
    "empty_layers": ("empty layers", "{:.1f}".format),
}
LEGEND = "ours with the number of runs, below it the paper's and the difference; * did not converge there"
DETAILS_LEGEND = "fresh: with batch-norm statistics re-estimated after the last mask update; best: of the best epoch"
UNLIMITED = 10_000  # width of a console in which every table fits

Rows = tuple[list[str], list[list[str]]]  # headings of the columns, and the texts of each row


def layout_table(result: Mapping[str, Any]) -> Rows:
    """Return the headings and rows of a table: by rows and columns as in the paper, or with one line per cell."""
    cells = result["cells"]
    if not cells:
        return [], []
    if result.get("show") or not all("column" in cell for cell in cells):
        return layout_lines(cells, result.get("show", ()))
    across = bool(result["across"])
    grid = {(c["label"], *((c["row"], c["column"])[:: -1 if across else 1])): c for c in cells}
    rows = list(dict.fromkeys((label, row) for label, row, _ in grid))
    columns = list(dict.fromkeys(column for _, _, column in grid))
    if not across:
        columns.sort(key=result["columns"].index)
    texts = [[*row, *(format_comparison(grid.get((*row, column))) for column in columns)] for row in rows]
    for above, text in reversed(list(itertools.pairwise(texts))):
        text[0] = "" if text[0] == above[0] else text[0]  # print each label once
    return ["", "", *columns], texts


def layout_lines(cells: Sequence[Mapping[str, Any]], measures: Sequence[str]) -> Rows:
    """Return the headings and rows of a table with one line per cell, and columns for further measures."""
    shown: dict[str, Callable[[Mapping[str, Any]], str]] = {"ours": format_ours}
    if any(map(format_paper, cells)):
        shown |= {"paper": format_paper, "difference": format_difference}
    measures = [*(name for name in DETAILS if any(name in cell for cell in cells)), *measures]
    shown |= {MEASURE_COLUMNS[key][0]: functools.partial(format_measure, key) for key in measures}
    texts = [[*describe_cell(cell).values(), *(text(cell) for text in shown.values())] for cell in cells]
    return [*describe_cell(cells[0]), *shown], texts


def describe_cell(cell: Mapping[str, Any]) -> dict[str, str]:
    """Return what a cell is about, by the headings of the columns."""
    if "column" in cell:
        return {"model": cell["label"], "": cell["own"], "method": cell["column"]}
    rest = ", ".join(f"{key} = {value}" for key, value in cell["setting"].items())
    return {"model": cell["model"], "method": cell["method"], "sparsity": f"{cell['sparsity']:.4g}", "setting": rest}


def format_measure(measure: str, cell: Mapping[str, Any]) -> str:
    """Return the text of a further measure of a cell; a detail that does not apply is left empty."""
    if cell.get(measure) is None:
        return "" if measure in DETAILS else "–"
    return MEASURE_COLUMNS[measure][1](cell[measure])


def format_comparison(cell: Mapping[str, Any] | None) -> str:
    """Return our result above its details and the paper's with the difference; nothing where there is no cell."""
    if cell is None:
        return ""
    details = ", ".join(f"{name} {cell[name]:.2f}" for name in DETAILS if name in cell)
    paper = format_paper(cell)
    lines = [format_ours(cell), details, f"{paper} {format_difference(cell)}".strip() if paper else ""]
    return "\n".join(line for line in lines if line)


def format_ours(cell: Mapping[str, Any]) -> str:
    """Return our result with the number of runs."""
    if cell["mean"] is None:
        return "–"
    std = cell["std"]
    if "column" in cell:
        return f"{format_mean(cell)} ×{cell['runs']}"
    return f"{cell['mean']:.4g}" + (f" ± {std:.2g}" if std is not None else "") + f" ×{cell['runs']}"


def format_paper(cell: Mapping[str, Any]) -> str:
    """Return the paper's result as it is printed there; nothing where the paper has none."""
    if cell.get("paper_text") is not None:
        return str(cell["paper_text"])
    return "" if cell["paper"] is None else f"{cell['paper']:.4g}"


def format_difference(cell: Mapping[str, Any]) -> str:
    """Return the difference between our result and the paper's; nothing where one is missing."""
    if cell["mean"] is None or cell["paper"] is None:
        return ""
    return f"{cell['mean'] - cell['paper']:{'+.2f' if 'column' in cell else '+.2g'}}".replace("-", "−")


def completion_status(result: Mapping[str, Any]) -> str:
    """Return how many cells are complete and how many runs are missing."""
    if not result["cells"]:
        return "nothing was measured yet"
    if "missing" not in result:
        return "computed"
    complete = f"{result['complete']} of {len(result['cells'])} cells complete"
    return complete + (f", {result['missing']} of {result['runs']} runs missing" if result["missing"] else "")


def table_heading(result: Mapping[str, Any]) -> str:
    """Return the title of a table and its paper."""
    return result["title"] + (f" ({result['paper']})" if result["paper"] else "")


def text_column_count(headings: Sequence[str]) -> int:
    """Return how many of the first columns hold words, not numbers."""
    return headings.index("ours") if "ours" in headings else 2


def render_table(result: Mapping[str, Any]) -> Group:
    """Return a table for a terminal: as in the paper, or with one line per cell where that is too wide."""
    headings, rows = layout_table(result)
    notes = [escape(result["notes"])] if result.get("notes") else []
    grid: list[Table | FirstThatFits] = [bordered_table(headings, rows)] if rows else []
    if rows and "ours" not in headings:
        has_details = any(name in cell for name in DETAILS for cell in result["cells"])
        legend = [LEGEND, *[DETAILS_LEGEND] * has_details]
        grid = [FirstThatFits(Group(*grid, *legend), bordered_table(*layout_lines(result["cells"], ())))]
    return Group(escape(table_heading(result)), *grid, *notes, completion_status(result))


class FirstThatFits:
    """A renderable that shows the first of its choices that is not too wide, or else the last."""

    def __init__(self, *choices: Group | Table) -> None:
        self.choices = choices

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the choice that rich prints."""
        unlimited = options.update(max_width=UNLIMITED)
        widths = [Measurement.get(console, unlimited, choice).maximum for choice in self.choices]
        fitting = (c for c, width in zip(self.choices, widths, strict=True) if width <= options.max_width)
        yield next(fitting, self.choices[-1])


def bordered_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return rows in a border, with a line between labels; words are folded where there is no room."""
    grid = Table()
    for k, heading in enumerate(headings):
        is_text = k < text_column_count(headings)
        justify = "left" if is_text else "right"
        grid.add_column(escape(heading), justify=justify, no_wrap=not is_text, overflow="fold")  # type: ignore[arg-type]
    label = ""
    for row in rows:
        if label and row[0] not in ("", label):
            grid.add_section()
        label = row[0] or label
        grid.add_row(*map(escape, row))
    return grid


def render_markdown(result: Mapping[str, Any]) -> str:
    """Return the rows of a table and its notes as Markdown."""
    headings, rows = layout_table(result)
    rule = ["---" if k < text_column_count(headings) else "---:" for k in range(len(headings))]
    table = [headings, rule, *rows] if rows else []
    lines = ["| " + " | ".join(text.replace("|", "\\|").replace("\n", "<br>") for text in row) + " |" for row in table]
    notes = ["", result["notes"]] if result.get("notes") else []
    return "\n".join([*lines, *notes]) + "\n"
