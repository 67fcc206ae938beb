"""The runs of a row of a table: the recipes of its columns, and which run starts or learns from which."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pomona.errors import require, unknown_name_error

from ..recipes.recipe import OFF_VALUES, SETTINGS_WITHOUT_EFFECT, Recipe
from ..runs.retrain import BUDGETS, STARTS
from ..sweeps.axes import make_run, run_label
from .table_run import TableRun

LINK_KEYS = ("from", "retrain", "budget", "teacher")  # keys of a column that are not settings of a recipe


@dataclass
class RowRuns:
    """The runs of the columns in one row of a table, made when they are asked for."""

    base: Mapping[str, Any]  # settings of the recipe
    columns: Mapping[str, Mapping[str, Any]]
    values: Mapping[str, Any]  # settings of the row, for all columns
    overrides: Mapping[str, Any]  # settings that replace all others
    seeds: Sequence[int]
    made: dict[str, tuple[TableRun, ...]] = field(default_factory=dict)

    def of_column(self, name: str) -> tuple[TableRun, ...]:
        """Return the runs of a column, one per seed; none while the runs of this column are being made."""
        if name not in self.made:
            self.made[name] = ()
            self.made[name] = tuple(self.make_runs(name))
        return self.made[name]

    def make_runs(self, name: str) -> Iterator[TableRun]:
        """Yield the runs of a column; raise PomonaError where its links (`LINK_KEYS`) cannot be."""
        column = look_up("column", name, self.columns)
        parents, teachers = (self.linked_runs(name, column, link) for link in ("from", "teacher"))
        if "retrain" in column:
            require("from" in column, f"{name} retrains a mask: name the column that finds it with from.")
            require(
                "teacher" not in column, f"{name} retrains with the teacher of {column['from']}: leave teacher out."
            )
            start, budget = column["retrain"], column.get("budget", "epochs")
            require_known("start of a retraining", [start], STARTS)
            require_known("budget", [budget], BUDGETS)
            yield from (TableRun(parent.recipe, parent, (start, budget)) for parent in parents if parent is not None)
            return
        own = {key: value for key, value in column.items() if key not in LINK_KEYS}
        values = {**self.values, **own, **self.overrides}
        if not {"teacher", "teacher.run", "teacher.file"} & {*self.base, *self.values, *column, *self.overrides}:
            values = {key: value for key, value in values.items() if not key.startswith("teacher.")}  # other columns'
        for seed, parent, teacher in zip(self.seeds, parents, teachers, strict=True):
            recipe = seeded_recipe(json.dumps(self.base), json.dumps(values), seed)
            if parent is not None:
                link = {"run": parent.recipe.name, "fingerprint": parent.recipe.fingerprint()}
                recipe = replace(recipe, origin=replace(recipe.origin, **link))
            if teacher is not None:
                run, fingerprint = teacher.recipe.name, teacher.recipe.fingerprint()
                options = replace(recipe.teacher, run=run, fingerprint=fingerprint)
                recipe = replace(recipe, name=f"{recipe.name}-distilled", teacher=options)
            yield TableRun(recipe, parent, teacher=teacher)

    def linked_runs(self, name: str, column: Mapping[str, Any], link: str) -> Sequence[TableRun | None]:
        """Return the runs of the column that a link of this column names, one per seed; None for each without one."""
        if link not in column:
            return [None] * len(self.seeds)
        runs, verb = self.of_column(column[link]), "start" if link == "from" else "learn"
        require(bool(runs), f"{name} {verb}s from itself.")
        require("retrain" not in self.columns[column[link]], f"{name} cannot {verb} from a retraining.")
        return runs


# Tables have many runs in common, so recipes are cached by the JSON texts of their base and values.


@functools.cache
def seeded_recipe(base: str, values: str, seed: int) -> Recipe:
    """Return the recipe of a run: base settings and changed values as JSON texts, and a seed."""
    recipe = named_recipe(base, values)
    return replace(recipe, seed=seed, name=f"{recipe.name}-seed{seed}")


@functools.cache
def named_recipe(base: str, values: str) -> Recipe:
    """Return base settings with changed values, both JSON texts, as a recipe named after its model and the values."""
    given = json.loads(values)
    ordered = {key: given[key] for key in sorted(given, key=lambda key: key.count("."))}  # a method before its options
    run = make_run(json.loads(base), ordered, Path())
    off = {key for key, value in OFF_VALUES.items() if given.get(key) == value}
    unnamed = {*SETTINGS_WITHOUT_EFFECT, *off, "model.name"}
    named = {
        key: value
        for key, value in ordered.items()
        if key not in unnamed and (key.startswith("teacher.") or applies_to(key, run.recipe))
    }
    label = run_label({**named, "method": run.recipe.method["name"]})
    return replace(run.recipe, name=f"{run.recipe.model['name']}-{label}")


def applies_to(key: str, recipe: Recipe) -> bool:
    """Return whether a recipe has a setting; one of a method or a teacher may belong to those of another column."""
    section, _, option = key.partition(".")
    if section == "teacher":
        return recipe.teacher.is_named
    return section != "method" or not option or option.partition(".")[0] in recipe.method


def look_up(kind: str, name: Any, known: Mapping[str, Any]) -> Any:
    """Return the value of a name; raise PomonaError with the nearest name where it is unknown."""
    require_known(kind, [name], known)
    return known[name]


def require_known(kind: str, names: Iterable[Any], known: Iterable[Any]) -> None:
    """Raise PomonaError with the nearest known name unless all names are known."""
    for name in names:
        if name not in known:
            raise unknown_name_error(kind, str(name), [str(one) for one in known])
