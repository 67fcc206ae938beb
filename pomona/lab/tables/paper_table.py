"""A paper's table of results: its cells, the runs that they need, and the comparison with the paper.

`definitions` describes the file format of a table. Tables share runs: a run that one table has trained, or that is the
first part of a run with fine-tuning, is not trained again for another table.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pomona.errors import require, unknown_name_error

from ..sweeps.axes import parse_axis
from ..sweeps.measures import describe_details, measured_key, measured_value
from ..sweeps.result_table import make_cell
from ..sweeps.run_store import RunStore
from .mask_figures import describe_masks
from .table_run import TableRun

PAPER_NUMBER = re.compile(r"(\d+(?:\.\d+)?)(?:\s*±\s*(\d+(?:\.\d+)?))?\s*%?")


@dataclass(frozen=True)
class TableCell:
    """One cell of a table: the runs of one setting under several seeds, beside the paper's number."""

    label: str  # of its part of the table
    row: str  # the row in which it is printed
    own_row: str  # the values of the row that apply to its recipe
    column: str
    setting: dict[str, Any]  # besides method and sparsity
    runs: tuple[TableRun, ...]
    paper: str | None = None  # as it is printed there

    @property
    def attributes(self) -> dict[str, Any]:
        """The values by which a cell can be selected."""
        recipe = self.runs[0].recipe
        return {
            "model": recipe.model["name"],
            "label": self.label,
            "column": self.column,
            "method": "finetune" if self.runs[0].retraining else recipe.method["name"],
            "sparsity": recipe.method.get("sparsity", 0.0),
            **self.setting,
        }

    def compare(self, store: RunStore, measure: str = "accuracy", show: Sequence[str] = ()) -> dict[str, Any]:
        """Return our result by a measure (a key of summaries) beside the paper's, with further measures to `show`.

        Runs in which the measure was not recorded are left out.
        """
        runs = [(run.recipe, run.find_result(store)) for run in self.runs]
        finished = [
            (recipe, run)
            for recipe, run in runs
            if run is not None and measured_value(run.summary or {}, measure) is not None
        ]
        attributes, (mean, std) = self.attributes, parse_paper_number(self.paper)
        cell = {key: attributes[key] for key in ("model", "method", "sparsity")}
        cell |= {"setting": {"data": runs[0][0].data.name, **self.setting}, "mean": None, "std": None, "runs": 0}
        if finished:
            cell |= make_cell([(recipe, self.setting, run.summary or {}) for recipe, run in finished], measure)
            cell |= describe_details(measure, [run.summary or {} for _, run in finished])
        masks = describe_masks([run.summary or {} for _, run in finished])
        cell |= {key: masks[key] for key in show if key in masks}
        if "cost" in show:
            known = [cost for _, run in finished if (cost := run.cost()) is not None]
            cell["cost"] = statistics.mean(known) if known else None
        return cell | {
            "paper": mean,
            "paper_std": std,
            "paper_text": self.paper,
            "difference": None if cell["mean"] is None or mean is None else cell["mean"] - mean,
            "missing": [recipe.seed for recipe, run in runs if run is None],
            "label": self.label,
            "row": self.row,
            "own": self.own_row,
            "column": self.column,
        }


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper whose cells are results of runs."""

    name: str
    title: str
    paper: str
    cells: tuple[TableCell, ...]  # row by row as the paper prints them; a cell may be in several rows
    columns: tuple[str, ...]
    notes: str = ""
    queue: tuple[str, ...] = ()  # labels and columns that are trained first
    measure: str = "accuracy"  # the key of summaries by which runs are compared
    show: tuple[str, ...] = ()  # further measures to print
    across: bool = False  # whether columns are printed as rows
    charts: tuple[str, ...] = ()  # kinds of charts to draw

    def select(self, filters: Sequence[str]) -> PaperTable:
        """Return the table with the cells that match filters "key=value,value"; the key "seed" selects runs of cells.

        Raises:
            PomonaError: for an unknown key or value, or where no cell is left.
        """
        cells, known = list(self.cells), self.selectable_values()
        for text in filters:
            key, values = parse_axis(text)
            if key not in known:
                raise unknown_name_error("key of --only", key, known)
            whole = text.partition("=")[2].strip()
            values = [whole] if whole in known[key] else values  # the name of a column may contain commas
            for value in values:
                if value not in known[key]:
                    raise unknown_name_error(f"{key} of {self.name}", value, map(str, known[key]))
            if key == "seed":
                cells = [replace(c, runs=tuple(run for run in c.runs if run.recipe.seed in values)) for c in cells]
            cells = [c for c in cells if c.runs and (key == "seed" or c.attributes.get(key) in values)]
        require(bool(cells), f"no cell of {self.name} matches {' and '.join(filters)}.")
        return replace(self, cells=tuple(cells))

    def selectable_values(self) -> dict[str, list[Any]]:
        """Return the keys by which cells can be selected, with all their values."""
        found: dict[str, list[Any]] = {}
        for cell in self.cells:
            for key, value in [*cell.attributes.items(), *(("seed", run.recipe.seed) for run in cell.runs)]:
                if value not in found.setdefault(key, []):
                    found[key].append(value)
        return found

    def runs(self) -> list[TableRun]:
        """Return every run once, in the order of the queue: all runs of the first seed, then all of the second."""
        labels = queue_positions(self.queue, (cell.label for cell in self.cells))
        columns = queue_positions(self.queue, self.columns)
        order = sorted(
            (turn, labels[cell.label], columns[cell.column], place)
            for place, cell in enumerate(self.cells)
            for turn in range(len(cell.runs))
        )
        unique: dict[tuple[str, ...], TableRun] = {}
        for turn, _, _, place in order:
            run = self.cells[place].runs[turn]
            unique.setdefault(run.key, run)
        return list(unique.values())

    @property
    def unique_cells(self) -> list[TableCell]:
        """The cells, each once; a cell that is printed in several rows is listed with its first row."""
        unique: dict[tuple[Any, ...], TableCell] = {}
        for cell in self.cells:
            unique.setdefault((cell.label, cell.column, *(run.key for run in cell.runs)), cell)
        return list(unique.values())

    def count_runs(self, store: RunStore) -> dict[str, int]:
        """Return how many cells are complete, how many runs there are, and how many of them are missing."""
        runs = self.runs()
        finished = {run.key for run in runs if run.find_covering_run(store) is not None}
        complete = sum(all(run.key in finished for run in cell.runs) for cell in self.unique_cells)
        return {"complete": complete, "runs": len(runs), "missing": len(runs) - len(finished)}

    def compare(self, store: RunStore, measure: str = "last") -> dict[str, Any]:
        """Return the table with our results and the paper's, in the form of `pomona table --json`.

        Runs are compared by the last epoch, or as `measure` says: see `pomona.lab.sweeps.measures`.
        """
        key = measured_key(self.measure, measure)
        return {
            "name": self.name,
            "title": self.title,
            "paper": self.paper,
            "notes": self.notes,
            **self.count_runs(store),
            "columns": list(self.columns),
            "show": list(self.show),
            "across": self.across,
            "cells": [cell.compare(store, key, self.show) for cell in self.unique_cells],
        }


def queue_positions(first: Sequence[str], names: Iterable[str]) -> dict[str, int]:
    """Return the position of each name in the queue: the names in `first`, then the others in their order."""
    found = dict.fromkeys(names)
    ordered = dict.fromkeys([*(name for name in first if name in found), *found])
    return {name: place for place, name in enumerate(ordered)}


def parse_paper_number(text: str | None) -> tuple[float | None, float | None]:
    """Return the mean and standard deviation in a text such as "92.42 ± 0.14", with None for what is not printed.

    "*" (did not converge) and "-" (left out) have neither. Any other text raises PomonaError.
    """
    match = PAPER_NUMBER.fullmatch(text or "")
    if match is None:
        require(text in (None, "*", "-"), f"'{text}' is not of the form '92.42 ± 0.14', '*' or '-'.")
        return None, None
    return float(match[1]), None if match[2] is None else float(match[2])
