"""The tables of the papers: the runs that they need, which of them are there, and how they compare.

How a table is written is told in `papers`. Its runs are shared: what one table has trained, or a longer run with
fine-tuning has passed through, no other trains again.
"""

from __future__ import annotations

import functools
import re
import statistics
import warnings
from collections.abc import Iterable, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pomona.errors import require, unknown_name_error

from ..recipes.recipe import Recipe
from ..runs import retrain
from ..runs.folder import summary
from ..runs.run import Interrupted
from ..sweeps import result_table as table
from ..sweeps import sweep
from ..sweeps.run_store import DAMAGED, RECORDS, RUNS, Run, Store, keep, without_finetune

OUT = RUNS / "tables"  # one place for all, as they share runs


@dataclass(frozen=True)
class Task:
    """One run of a table."""

    recipe: Recipe  # of a retraining: that of the run whose mask it takes
    parent: Task | None = None  # the run it begins with
    again: tuple[str, str] | None = None  # how that is retrained: from where, and with which budget

    @functools.cached_property
    def key(self) -> tuple[str, ...]:
        return self.recipe.fingerprint(), *(self.again or ())

    @property
    def name(self) -> str:
        return "-retrain-".join([self.recipe.name, *([self.how] if self.again else [])])

    @property
    def how(self) -> str:
        """How a retraining is called: "init", "init-flops"."""
        start, budget = self.again or ("", "")
        return start + "-flops" * (budget == "flops")

    def source(self, store: Store) -> Run | None:
        """The finished run that tells what is reached."""
        if self.again is not None:
            return store.retrained.get((store.fingerprint(self.recipe), self.how))
        return store.source(self.linked(store))

    def found(self, store: Store) -> Run | None:
        """The finished run; of one that goes on to fine-tune the part that is asked for."""
        run = self.source(store)
        return run if run is None or self.again is not None else store.find(self.linked(store))

    def folder(self, store: Store) -> Path | None:
        """Where it is, or was begun."""
        run = self.source(store)
        if run is not None:
            return run.folder
        return None if self.again is not None else store.folder(self.linked(store))

    def state(self, store: Store) -> str:
        """ "complete", "begun" or "missing"."""
        if self.source(store) is not None:
            return "complete"
        return "missing" if self.folder(store) is None else "begun"

    def linked(self, store: Store) -> Recipe:
        """The recipe, with where its parent is, as far as that is known."""
        if self.parent is None or self.again is not None:
            return self.recipe
        theirs = self.parent.linked(store)
        place = store.folder(theirs)
        known = {} if place is None else {"run": str(place.resolve())}
        return replace(self.recipe, origin=replace(self.recipe.origin, fingerprint=store.fingerprint(theirs), **known))

    def cell(self, store: Store, out: Path) -> sweep.Cell | None:
        """How to train it; None as long as its parent is not there with its weights."""
        recipe = self.linked(store)
        if self.parent is not None:
            run = store.folder(self.parent.linked(store), complete=True)
            if run is None:
                return None
            if self.again is not None:
                recipe, _ = retrain.plan(run, *self.again)
        return sweep.Cell(recipe, store.folder(recipe) or out / f"{recipe.name}-{recipe.fingerprint()}", {})


@dataclass(frozen=True)
class Entry:
    """One cell of a table: a setting under several seeds, beside what the paper prints."""

    label: str
    row: str  # where it stands
    own: str  # what of that concerns it
    column: str
    setting: dict[str, Any]  # besides method and sparsity
    tasks: tuple[Task, ...]
    paper: str | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """By what it can be picked."""
        recipe = self.tasks[0].recipe
        return {
            "model": recipe.model["name"],
            "label": self.label,
            "column": self.column,
            "method": "finetune" if self.tasks[0].again else recipe.method["name"],
            "sparsity": recipe.method.get("sparsity", 0.0),
            **self.setting,
        }

    def compare(self, store: Store, measure: str = "accuracy", costs: bool = False) -> dict[str, Any]:
        """Ours beside the paper's, by what the last epoch reached."""
        runs = [(task.recipe, task.found(store)) for task in self.tasks]
        done = [(recipe, run) for recipe, run in runs if run is not None]
        facts, (mean, std) = self.facts, numbers(self.paper)
        cell = {key: facts[key] for key in ("model", "method", "sparsity")}
        cell |= {"setting": {"data": runs[0][0].data.name, **self.setting}, "mean": None, "std": None, "runs": 0}
        if done:
            cell |= table.cell([(recipe, self.setting, run.summary or {}) for recipe, run in done], measure)
        if costs:
            known = [cost for _, run in done if (cost := run.cost()) is not None]
            cell["cost"] = statistics.mean(known) if known else None
        return cell | {
            "paper": mean,
            "paper_std": std,
            "paper_text": self.paper,
            "difference": None if cell["mean"] is None or mean is None else cell["mean"] - mean,
            "missing": [recipe.seed for recipe, run in runs if run is None],
            "label": self.label,
            "row": self.row,
            "own": self.own,
            "column": self.column,
        }


@dataclass(frozen=True)
class Table:
    """A table of runs."""

    name: str
    title: str
    paper: str
    entries: tuple[Entry, ...]  # as the paper prints them, row by row
    columns: tuple[str, ...]
    notes: str = ""
    queue: tuple[str, ...] = ()  # labels and columns that are run first
    measure: str = "accuracy"  # what runs are compared by
    show: tuple[str, ...] = ()  # what stands beside it
    across: bool = False  # columns are printed as rows

    def only(self, picks: Sequence[str]) -> Table:
        """Of its cells those that are picked by "key=value,value"; by "seed" some runs of each."""
        entries, known = list(self.entries), self.picks()
        for pick in picks:
            key, values = sweep.axis(pick)
            if key not in known:
                raise unknown_name_error("pick of a table", key, known)
            whole = pick.partition("=")[2].strip()
            values = [whole] if whole in known[key] else values  # a column's name may have commas
            for value in values:
                if value not in known[key]:
                    raise unknown_name_error(f"{key} of {self.name}", value, map(str, known[key]))
            if key == "seed":
                entries = [replace(e, tasks=tuple(t for t in e.tasks if t.recipe.seed in values)) for e in entries]
            entries = [e for e in entries if e.tasks and (key == "seed" or e.facts.get(key) in values)]
        require(bool(entries), f"no cell of {self.name} is left by {' and '.join(picks)}.")
        return replace(self, entries=tuple(entries))

    def picks(self) -> dict[str, list[Any]]:
        """By what its cells can be picked, and the values there are."""
        found: dict[str, list[Any]] = {}
        for entry in self.entries:
            for key, value in [*entry.facts.items(), *(("seed", task.recipe.seed) for task in entry.tasks)]:
                if value not in found.setdefault(key, []):
                    found[key].append(value)
        return found

    def tasks(self) -> list[Task]:
        """Every run, each once, in the order of the queue: all of the first seed, then all of the second."""
        labels = rank(self.queue, (entry.label for entry in self.entries))
        columns = rank(self.queue, self.columns)
        order = sorted(
            (turn, labels[entry.label], columns[entry.column], place)
            for place, entry in enumerate(self.entries)
            for turn in range(len(entry.tasks))
        )
        once: dict[tuple[str, ...], Task] = {}
        for turn, _, _, place in order:
            task = self.entries[place].tasks[turn]
            once.setdefault(task.key, task)
        return list(once.values())

    @property
    def cells(self) -> list[Entry]:
        """Its cells, of which one that stands in several rows is there once."""
        once: dict[tuple[Any, ...], Entry] = {}
        for entry in self.entries:
            once.setdefault((entry.label, entry.column, *(task.key for task in entry.tasks)), entry)
        return list(once.values())

    def counts(self, store: Store) -> dict[str, int]:
        """How much of it is there."""
        tasks = self.tasks()
        there = {task.key for task in tasks if task.source(store) is not None}
        complete = sum(all(task.key in there for task in entry.tasks) for entry in self.cells)
        return {"complete": complete, "runs": len(tasks), "missing": len(tasks) - len(there)}

    def compare(self, store: Store) -> dict[str, Any]:
        """The table for a program."""
        return {
            "name": self.name,
            "title": self.title,
            "paper": self.paper,
            "notes": self.notes,
            **self.counts(store),
            "columns": list(self.columns),
            "show": list(self.show),
            "across": self.across,
            "cells": [entry.compare(store, self.measure, "cost" in self.show) for entry in self.cells],
        }


def rank(first: Sequence[str], names: Iterable[str]) -> dict[str, int]:
    """The places of names in a queue: those that are to be first, then the others as they come."""
    found = dict.fromkeys(names)
    ordered = dict.fromkeys([*(name for name in first if name in found), *found])
    return {name: place for place, name in enumerate(ordered)}


NUMBER = re.compile(r"(\d+(?:\.\d+)?)(?:\s*±\s*(\d+(?:\.\d+)?))?\s*%?")


def numbers(text: str | None) -> tuple[float | None, float | None]:
    """Mean and standard deviation as a paper prints them, as far as it does."""
    match = NUMBER.fullmatch(text or "")
    if match is None:
        require(text in (None, "*", "-"), f"'{text}' is not of the form '92.42 ± 0.14', '*' or '-'.")
        return None, None
    return float(match[1]), None if match[2] is None else float(match[2])


# ---- training what is missing


def fill(
    asked: Table,
    out: str | Path = OUT,
    *,
    only_missing: bool = False,
    records: Path | None = None,
    report: sweep.Report | None = None,
    **how: Any,
) -> dict[str, Any]:
    """Train the runs of a table that are missing, and compare.

    A run that begins with another's weights or mask waits for it. With `records` the record of each finished run
    is kept there. The rest is as in `sweep.run`.
    """
    out = Path(out)
    store, tasks = Store((RUNS, out)), asked.tasks()
    tried: set[tuple[str, ...]] = set()  # so that each is trained once, whatever comes of it
    failed: list[dict[str, str]] = []
    begun = sum(task.state(store) != "missing" for task in tasks)
    require(out.is_dir() or not out.exists(), f"'{out}' is a file: give a folder for the runs with --out.")
    require(
        only_missing or not begun,
        f"{begun} of the {len(tasks)} runs of {asked.name} are there already: go on with --only-missing.",
    )
    kept(asked, store, records)
    try:
        while wave := ready(tasks, store, out, tried):
            tried |= {task.key for task, _ in wave}
            with closing(sweep.run([cell for _, cell in wave], **how)) as coming:
                for index, outcome in coming:
                    cell = wave[index][1]
                    if "error" in outcome:
                        failed.append({"name": cell.recipe.name, "folder": str(cell.folder), **outcome})
                    else:
                        store.enter(run := Run(cell.recipe, cell.folder, outcome))
                        keep(run, records)
                    if report is not None:
                        report(complete(tasks, store) + len(failed), len(tasks), cell, outcome)
    except (Interrupted, KeyboardInterrupt) as stopped:
        raise sweep.Stopped(out, complete(tasks, store), len(tasks)) from stopped
    for one in failed:
        store.add(Path(one["folder"]))  # another sitting may have been at it, and is done
    return asked.compare(store) | {"failed": [one for one in failed if summary(Path(one["folder"])) is None]}


def complete(tasks: Sequence[Task], store: Store) -> int:
    return sum(task.source(store) is not None for task in tasks)


def ready(
    tasks: Sequence[Task], store: Store, out: Path, tried: Set[tuple[str, ...]] = frozenset()
) -> list[tuple[Task, sweep.Cell]]:
    """What can be trained now, in the order of the queue.

    A run that begins with another needs it with its weights, whatever records there are. One that another only
    passes through, on its way to fine-tuning, is not trained by itself.
    """
    found = []
    missing = [task for task in tasks if task.source(store) is None]
    needed = {parent.key for task in missing for parent in needs(task, store)}
    tuned = [task.recipe for task in missing if task.recipe.finetune.epochs and task.again is None]
    passed = {(without_finetune(recipe).fingerprint(),) for recipe in tuned} - needed
    wanted = {one.key: one for task in missing for one in [*needs(task, store), task]}
    for task in [task for key, task in wanted.items() if key not in passed | tried]:
        try:
            cell = task.cell(store, out)
        except DAMAGED as error:
            warnings.warn(f"{task.name} cannot begin with the run before it: {error}", stacklevel=2)
            continue
        if cell is not None:
            found.append((task, cell))
    return found


def needs(task: Task, store: Store) -> list[Task]:
    """The runs before this one that are not there with their weights."""
    if task.parent is None or store.folder(task.parent.linked(store), complete=True) is not None:
        return []
    return [*needs(task.parent, store), task.parent]


def kept(asked: Table, store: Store, records: Path | None = RECORDS) -> list[Path]:
    """Write the records of a table's finished runs."""
    files = [keep(task.source(store), records) for task in asked.tasks()]
    return [file for file in dict.fromkeys(files) if file is not None]
