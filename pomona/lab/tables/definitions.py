"""The tables of the papers by name, and how they are written.

A table of runs is a TOML file:

    title = "CIFAR-10, unstructured pruning: top-1 accuracy in %"
    paper = "Lin et al., ICLR 2020, table 1"
    seeds = [0, 1, 2]
    queue = ["ResNet-20", "DPF"]                  what is run first; then in the order of the file

    [columns]                                     a name, and the settings that make it
    dense = { method = "dense" }
    DPF = { "method.settle" = 0 }
    "DPF + FT" = { "method.settle" = 0, "finetune.epochs" = 60 }
    "one-shot + FT" = { from = "dense", method = "oneshot" }            begins with that run's weights
    "its mask" = { from = "DPF", retrain = "init", budget = "flops" }   as `pomona retrain` does

    [[part]]
    label = "ResNet-20"
    recipe = "dpf-resnet20"                       one that comes with pomona, or settings
    set = { "train.clip" = 1.0 }                  what is other than in the recipe
    rows = { "method.sparsity" = [0.7, 0.8] }     the rows are the product of these
    paper = { dense = "92.48 ± 0.20", DPF = ["92.42 ± 0.14", "-"] }     one for all rows, or one for each

In the paper's numbers "*" is what did not converge, and "-" a cell that it leaves out, as do we; a column without
numbers is ours alone. `from` and a part's `columns` name columns. With `like = "dpf-table4"` columns and parts are
those of another table, of which this one picks by `columns = ["DPF"]` and by the labels and rows of its parts.
With `measure = "valid_accuracy"` runs are compared by held-out images of the training data, for choices that must not
be made on test images. `show` lists what stands beside it (see `table.SHOW`), one cell a line; `across = true` prints
columns as rows; `names` has short names for settings, `notes` what a reader should know.

A table that is computed comes from a function: a module of `MODULES` has TABLES, by name, each a function that gives
the `title`, `paper` and `cells`, and may take `progress(done, total)`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pomona.errors import PomonaError, require, unknown_name_error

from ..recipes import bundled as shelf
from ..recipes.recipe import PASSIVE, Recipe, literal, read
from ..runs.retrain import BUDGETS, FROM
from ..sweeps import sweep
from ..sweeps.result_table import SHOW
from ..sweeps.run_store import Store
from .paper_table import Entry, Table, Task, numbers

MODULES = ("pomona.theory.qian", "pomona.lab.runs.private")
KEYS = ("title", "paper", "notes", "seeds", "queue", "columns", "part", "measure", "show", "across", "names", "like")
MEASURES = ("accuracy", "valid_accuracy")
PART = ("label", "recipe", "set", "rows", "paper", "seeds", "columns")
LINK = ("from", "retrain", "budget")  # what a column says besides settings


Make = Callable[..., dict[str, Any]]


def computed() -> dict[str, Make]:
    """The tables that functions make."""
    found: dict[str, Make] = {}
    for module in MODULES:
        try:
            tables = importlib.import_module(module).TABLES
        except ModuleNotFoundError as error:
            require(module.startswith(str(error.name)), f"the tables of {module} need {error.name}: install it.")
            continue
        found |= tables
    return found


def find(name: str, overrides: Sequence[str] = ()) -> Table | Make:
    """A table by its name or the path of its file: of runs, or as the function that makes it."""
    shipped = shelf.files()
    file = Path(name) if Path(name).is_file() else shipped.get(name.removesuffix(".toml"))
    if file is not None:
        require(shelf.is_table(file), f"'{name}' is a recipe, no table: it has no [[part]].")
        return load(file, overrides)
    made = computed()
    if name not in made:
        raise unknown_name_error("table", name, [*shelf.tables(), *made])
    require(not overrides, f"{name} is computed, and has no settings to set: leave out '{(*overrides, '')[0]}'.")
    return made[name]


def compute(make: Make, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """A computed table; `progress(done, total)` is told where its function tells it."""
    return make(progress=progress) if "progress" in inspect.signature(make).parameters else make()


def overview() -> list[dict[str, Any]]:
    """Every table: how much of it is there."""
    store, found = Store(), []
    for name, path in shelf.tables().items():
        one = load(path)
        told = {"name": name, "title": one.title, "paper": one.paper, "cells": len(one.cells)}
        found.append(told | one.counts(store))
    for name, make in computed().items():
        about = (make.__doc__ or name).strip().splitlines()[0]
        found.append({"name": name, "title": about, "paper": "", "complete": 0, "cells": 0, "runs": 0, "missing": 0})
    return found


def load(source: str | Path, overrides: Sequence[str] = ()) -> Table:
    """A table of runs from its file; `overrides` are "dotted.key=value" for the recipes of all parts."""
    path = Path(source)
    given = written(path)
    try:
        entries = [entry for part in given["part"] for entry in part_entries(given, part, overrides)]
    except PomonaError as error:
        raise PomonaError(f"the table {path.stem}: {error}") from error
    return Table(
        path.stem,
        given.get("title", path.stem),
        given.get("paper", ""),
        tuple(entries),
        columns=tuple(given["columns"]),
        notes=given.get("notes", ""),
        queue=tuple(given.get("queue", ())),
        measure=given.get("measure", "accuracy"),
        show=tuple(given.get("show", ())),
        across=bool(given.get("across", False)),
    )


def written(path: Path) -> dict[str, Any]:
    """A table as it is written, with what it takes over from another."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PomonaError(f"the table '{path}' cannot be read: {error}.") from error
    known("key of a table", given, KEYS)
    known("measure", [given.get("measure", "accuracy")], MEASURES)
    known("measure to show", given.get("show", ()), SHOW)
    given = {"columns": {}, "part": [], **given}
    if "like" in given:
        given = like(written(shelf.find(given["like"])), given)
    require(bool(given["part"] and given["columns"]), f"the table '{path}' needs [columns] and a [[part]].")
    for part in given["part"]:
        known("key of a part", part, PART)
        require("label" in part and "recipe" in part, f"a part of the table '{path}' needs a label and a recipe.")
    return given


def like(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """A table that takes columns and parts from another."""
    names = mine["columns"] or theirs["columns"]
    columns = names if isinstance(names, Mapping) else {name: pick("column", name, theirs["columns"]) for name in names}
    known("part", [part.get("label") for part in mine["part"]], [part["label"] for part in theirs["part"]])
    pairs = [(one, part) for part in mine["part"] for one in theirs["part"] if one["label"] == part["label"]]
    chosen = [narrow(one, part, columns) for one, part in pairs]
    shared = {key: theirs[key] for key in ("seeds", "queue", "names") if key in theirs}
    return {**shared, **mine, "columns": columns, "part": chosen}


def narrow(theirs: Mapping[str, Any], mine: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """A part of another table with some of its rows, and their numbers in some of its columns."""
    rows = theirs.get("rows", {})
    for key, values in mine.get("rows", {}).items():
        known(f"value of {key}", values, pick("axis", key, rows))
    asked = {**rows, **mine.get("rows", {})}
    kept = [i for i, row in enumerate(product(rows)) if all(row[key] in asked[key] for key in row)]
    paper = {
        name: texts if isinstance(texts, str) else [texts[i] for i in kept]
        for name, texts in theirs.get("paper", {}).items()
        if name in columns
    }
    shown = [name for name in theirs.get("columns", columns) if name in columns]
    return {**theirs, "columns": shown, **mine, "rows": asked, "paper": paper | mine.get("paper", {})}


def part_entries(given: Mapping[str, Any], part: Mapping[str, Any], overrides: Sequence[str]) -> Iterator[Entry]:
    """The cells of one part, row by row."""
    columns, paper, rows = given["columns"], part.get("paper", {}), product(part.get("rows", {}))
    names, common, wins = given.get("names", {}), part.get("set", {}), dict(map(override, overrides))
    seeds = part.get("seeds", given.get("seeds", [0]))
    require(bool(seeds) and all(type(s) is int and s >= 0 for s in seeds), f"seeds takes whole numbers, got {seeds}.")
    known("column", [*paper, *part.get("columns", ())], columns)
    for key in wins.keys() & {"seed", *part.get("rows", {})}:
        raise PomonaError(f"{key} is what its runs differ in: pick some of them, with --only, instead of setting it.")
    for name, texts in paper.items():
        require(
            isinstance(texts, str) or len(texts) == len(rows),
            f"{part['label']} has {len(texts)} numbers of {name} for its {len(rows)} rows.",
        )
    recipe = part["recipe"]
    base = read(recipe if isinstance(recipe, Mapping) else shelf.find(str(recipe)))
    for i, row in enumerate(rows):
        cells = Row(base, columns, {**common, **row}, wins, seeds)
        for name in part.get("columns", columns):
            text = paper.get(name)
            text = text if text is None or isinstance(text, str) else text[i]
            numbers(text)  # refuses what is none
            if text != "-":
                tasks, values = cells.tasks(name), {**common, **row, **columns[name], **wins}
                mine = {key: value for key, value in values.items() if concerns(key, tasks[0].recipe)}
                setting = {names.get(key, key): value for key, value in mine.items() if key not in APART}
                own = {key: value for key, value in row.items() if key in mine}
                yield Entry(part["label"], row_name(row, names), row_name(own, names), name, setting, tasks, text)


APART = {"model.name", "method", "method.sparsity", *PASSIVE}  # what a cell tells by itself, or need not


def concerns(key: str, recipe: Recipe) -> bool:
    """Whether a setting is any of this recipe's; one of a method may be that of another."""
    section, _, option = key.partition(".")
    return section != "method" or option.partition(".")[0] in recipe.method


def override(text: str) -> tuple[str, Any]:
    """ "dotted.key=value" as key and value."""
    read({}, [text])  # refuses what is not of this form
    key, _, value = text.partition("=")
    return key.strip(), literal(value.strip())


@dataclass
class Row:
    """A row of a part."""

    base: Mapping[str, Any]
    columns: Mapping[str, Mapping[str, Any]]
    values: Mapping[str, Any]  # for all columns
    wins: Mapping[str, Any]  # over whatever else is said
    seeds: Sequence[int]
    made: dict[str, tuple[Task, ...]] = field(default_factory=dict)

    def tasks(self, name: str) -> tuple[Task, ...]:
        """The runs of a column, one a seed."""
        if name not in self.made:
            self.made[name] = ()  # as long as they are made
            self.made[name] = tuple(self.make(name))
        return self.made[name]

    def make(self, name: str) -> Iterator[Task]:
        column = pick("column", name, self.columns)
        parents: Sequence[Task | None] = [None] * len(self.seeds)
        if "from" in column:
            parents = self.tasks(column["from"])
            require(bool(parents), f"{name} begins with itself.")
            require("retrain" not in self.columns[column["from"]], f"{name} cannot begin with a retraining.")
        if "retrain" in column:
            require("from" in column, f"{name} retrains a mask: say which, with from.")
            again = column["retrain"], column.get("budget", "epochs")
            known("start of a retraining", again[:1], FROM)
            known("budget", again[1:], BUDGETS)
            yield from (Task(parent.recipe, parent, again) for parent in parents if parent is not None)
            return
        mine = {key: value for key, value in column.items() if key not in LINK}
        values = json.dumps({**self.values, **mine, **self.wins})
        for seed, parent in zip(self.seeds, parents, strict=True):
            recipe = seeded(json.dumps(self.base), values, seed)
            if parent is not None:
                theirs = {"run": parent.recipe.name, "fingerprint": parent.recipe.fingerprint()}
                recipe = replace(recipe, origin=replace(recipe.origin, **theirs))
            yield Task(recipe, parent)


# Tables have many runs in common: base and values, as JSON, are made to a recipe once.


@functools.cache
def seeded(base: str, values: str, seed: int) -> Recipe:
    """The recipe of a run."""
    recipe = resolved(base, values)
    return replace(recipe, seed=seed, name=f"{recipe.name}-seed{seed}")


@functools.cache
def resolved(base: str, values: str) -> Recipe:
    """A recipe with other values, named after its model and what sets it apart."""
    given = json.loads(values)
    ordered = {key: given[key] for key in sorted(given, key=lambda key: key.count("."))}  # a method before its options
    cell = sweep.cell(json.loads(base), ordered, Path())
    silent = {*PASSIVE, *cell.dropped, "model.name"}
    apart = {key: value for key, value in ordered.items() if key not in silent}
    label = sweep.label({**apart, "method": cell.recipe.method["name"]})
    return replace(cell.recipe, name=f"{cell.recipe.model['name']}-{label}")


def row_name(row: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """A row as papers print them: "90 %", "ρ = 0.5"."""
    return ", ".join(
        f"{100 * value:g} %" if key == "method.sparsity" else f"{names.get(key, key)} = {value}"
        for key, value in row.items()
    )


def product(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def pick(kind: str, name: Any, among: Mapping[str, Any]) -> Any:
    known(kind, [name], among)
    return among[name]


def known(kind: str, names: Any, among: Any) -> None:
    for name in names:
        if name not in among:
            raise unknown_name_error(kind, str(name), [str(one) for one in among])
