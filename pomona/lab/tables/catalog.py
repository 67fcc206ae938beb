"""The catalog of tables by name: those of runs, defined in TOML files, and those that a function computes.

Each module in `COMPUTED_TABLE_MODULES` has a dictionary TABLES of functions by the name of their table. A function
returns a dictionary with `title`, `paper` and `cells`, and may take `progress(done, total)` and `weights`, a file. The
first line of its docstring is the title in the list of tables.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pomona.errors import require, unknown_name_error

from ..recipes import bundled
from ..sweeps.run_store import RunStore
from .definitions import load_table
from .paper_table import PaperTable

COMPUTED_TABLE_MODULES = ("pomona.theory.qian_tables", "pomona.lab.tables.private_table")

ComputedTable = Callable[..., dict[str, Any]]


def computed_tables() -> dict[str, ComputedTable]:
    """Return the functions of computed tables by name; modules that are not installed are left out."""
    found: dict[str, ComputedTable] = {}
    for module in COMPUTED_TABLE_MODULES:
        try:
            tables = importlib.import_module(module).TABLES
        except ModuleNotFoundError as error:
            require(module.startswith(str(error.name)), f"the tables of {module} need {error.name}: install it.")
            continue
        found |= tables
    return found


def find_table(name: str, overrides: Sequence[str] = ()) -> PaperTable | ComputedTable:
    """Return a table by its name or the path of its file: a table of runs, or the function of a computed table.

    `overrides` are settings "dotted.key=value" for the recipes of a table of runs.

    Raises:
        PomonaError: for an unknown name, a recipe, or overrides of a computed table.
    """
    shipped = bundled.bundled_files()
    file = Path(name) if Path(name).is_file() else shipped.get(name.removesuffix(".toml"))
    if file is not None:
        require(bundled.is_table_file(file), f"'{name}' is a recipe, not a table: it has no [[part]].")
        return load_table(file, overrides)
    computed = computed_tables()
    if name not in computed:
        raise unknown_name_error("table", name, [*bundled.bundled_tables(), *computed])
    require(not overrides, f"{name} is computed and has no settings: leave out '{(*overrides, '')[0]}'.")
    return computed[name]


def compute_table(
    function: ComputedTable, progress: Callable[[int, int], None] | None = None, weights: Path | None = None
) -> dict[str, Any]:
    """Return a computed table; `progress(done, total)` is passed on to a function that takes it.

    `weights` is a state dict whose weights take the place of those that the function would train.
    """
    parameters = inspect.signature(function).parameters
    options: dict[str, Any] = {"progress": progress} if "progress" in parameters else {}
    if weights is not None:
        require(
            "weights" in parameters, "--weights applies to qian-table1, qian-figure1 and qian-figure2: leave it out."
        )
        options["weights"] = weights
    return function(**options)


def list_tables() -> list[dict[str, Any]]:
    """Return every table with its title and how much of it is complete."""
    store, found = RunStore(), []
    for name, path in bundled.bundled_tables().items():
        table = load_table(path)
        about = {"name": name, "title": table.title, "paper": table.paper, "cells": len(table.unique_cells)}
        found.append(about | table.count_runs(store))
    for name, function in computed_tables().items():
        title = (function.__doc__ or name).strip().splitlines()[0]
        found.append({"name": name, "title": title, "paper": "", "complete": 0, "cells": 0, "runs": 0, "missing": 0})
    return found
