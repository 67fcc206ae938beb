"""Sweeps: a recipe times the values of some settings, every cell an ordinary run in a folder of its own.

    [sweep]
    method = ["dense", "oneshot(at=0.5)", "dpf"]
    "method.sparsity" = [0.8, 0.9, 0.95]
    seed = [0, 1]

in a recipe, or `axes` in Python. An axis `method` takes over what the recipe says of its own method, as far
as another has that option.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import re
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pomona.errors import PomonaError, require
from pomona.methods import METHODS
from pomona.registry import parse_spec

from ..recipes.recipe import DENSE, Recipe, literal, put, read
from ..runs import checkpoint
from ..runs import environment as env
from ..runs.distributed import here, pick
from ..runs.folder import as_json, summary
from ..runs.run import Interrupted, Note, Progress
from . import process_pool as pool
from . import result_table as table
from . import run_store as store
from .concurrent import run as pack
from .concurrent import tidy

Axes = Mapping[str, Sequence[Any]]


class Stopped(Exception):
    """A sweep was asked to stop; what is begun can be taken up again."""

    def __init__(self, out: Path, done: int, total: int) -> None:
        super().__init__(
            f"stopped with {done} of {total} cells complete in '{out}': the same command with --only-missing goes on."
        )
        self.out, self.done, self.total = out, done, total


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    recipe: Recipe
    folder: Path
    setting: dict[str, Any]  # what sets it apart, besides method, sparsity and seed
    dropped: tuple[str, ...] = ()  # what its method does not have

    def state(self) -> str:
        """ "complete", "begun" or "missing"."""
        if self.summary() is not None:
            return "complete"
        return "begun" if self.folder.is_dir() and any(self.folder.iterdir()) else "missing"

    def summary(self) -> dict[str, Any] | None:
        """Of the run, where it is complete and of these settings."""
        found = summary(self.folder)
        return found if found is not None and found["fingerprint"] == self.recipe.fingerprint() else None


Report = Callable[[int, int, Cell, Mapping[str, Any]], None]


def sweep(
    source: str | Path | Mapping[str, Any],
    axes: Axes | None = None,
    out: str | Path = "runs/sweep",
    *,
    overrides: Sequence[str] = (),
    only_missing: bool = False,
    records: Path | None = None,
    report: Report | None = None,
    **how: Any,
) -> dict[str, Any]:
    """Run every cell into `out/NAME-FINGERPRINT`; what was reached, also in `out/sweep.json`.

    With `only_missing` begun cells are resumed, and those left alone of which there is a finished run in `out` or a
    record; with `records` a record of each run is kept there. A cell that fails is told under `failed`, and the
    others go on. `report(done, total, cell, summary)` is told of every cell; the rest is as `run` has it. Ctrl-C
    raises `Stopped`.
    """
    out, started = Path(out), time.perf_counter()
    found = cells(source, axes or {}, out, overrides)
    refuse_used(out, found, only_missing)
    known = store.Store((out,)) if only_missing else store.Store((), ())
    complete = {i: known.find(cell.recipe) for i, cell in enumerate(found)}
    outcomes: dict[int, dict[str, Any]] = {i: one.summary for i, one in complete.items() if one and one.summary}
    todo = [i for i in range(len(found)) if i not in outcomes]
    for one in complete.values():
        store.keep(one, records)
    try:
        with closing(run([found[i] for i in todo], **how)) as coming:
            for k, outcome in coming:
                outcomes[todo[k]] = outcome
                if "error" not in outcome:
                    store.keep(store.Run(found[todo[k]].recipe, found[todo[k]].folder, outcome), records)
                if report is not None:
                    report(len(outcomes), len(found), found[todo[k]], outcome)
    except (Interrupted, KeyboardInterrupt) as stopped:
        raise Stopped(out, sum("error" not in o for o in outcomes.values()), len(found)) from stopped
    result = result_of(found, [outcomes[i] for i in range(len(found))])
    result |= {"seconds": time.perf_counter() - started, "out": str(out), **env.facts()}
    if here().first:
        checkpoint.replace(out / "sweep.json", as_json(result))
    return result


def run(
    found: Sequence[Cell],
    *,
    jobs: int | None = None,
    packed: int | None = None,
    data_dir: str | Path | None = None,
    progress: Callable[[], Progress] | None = None,
    note: Note = warnings.warn,
) -> Generator[tuple[int, dict[str, Any]], None, None]:
    """Index and outcome of each cell, as they come.

    `jobs` processes of one thread work side by side; None is one for each core, or one in all where there is a
    GPU, on which `packed` trains that many runs at once. `progress()` makes one to follow each run where there is
    one job.
    """
    require(jobs is None or jobs >= 1, f"jobs must be 1 or more, got {jobs}.")
    require(jobs is None or packed is None, "runs are packed on a GPU or spread over processes: give packed or jobs.")
    require(
        here().world == 1 or (packed is None and jobs in (None, 1)),
        f"the {here().world} processes of torchrun train each run together: leave out jobs and packed.",
    )
    work = [pool.Job(cell.recipe, cell.folder, data_dir) for cell in found]
    if packed is not None and work:
        yield from pack(work, packed, note)
    elif (count := min(jobs or processes(found), len(work))) > 1:
        yield from pool.run(work, count, note)
    else:
        for index, job in enumerate(work):
            yield index, job.run(note=note, progress=None if progress is None else progress())
            if torch.cuda.is_initialized():
                tidy()


def result_of(found: Sequence[Cell], outcomes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table's cells, and what failed."""
    runs = [(cell.recipe, cell.setting, o) for cell, o in zip(found, outcomes, strict=True) if "error" not in o]
    failed = [
        {"name": cell.recipe.name, "folder": str(cell.folder), "error": o["error"]}
        for cell, o in zip(found, outcomes, strict=True)
        if "error" in o
    ]
    return {"cells": table.cells(runs), "failed": failed}


def refuse_used(out: Path, found: Sequence[Cell], only_missing: bool) -> None:
    """Refuse a place that is no folder, and cells that are there already unless the sweep is to go on."""
    require(out.is_dir() or not out.exists(), f"'{out}' is a file: give a folder for the sweep with --out.")
    begun = [cell for cell in found if cell.state() != "missing"]
    require(
        only_missing or not begun,
        f"{len(begun)} of the {len(found)} cells are in '{out}' already: go on with --only-missing, "
        "or give another folder with --out.",
    )


def processes(found: Sequence[Cell]) -> int:
    """How many processes are worth while: one a core, or a single one that has the GPU; a team is one."""
    if here().world > 1 or any(pick(cell.recipe.train.device).type != "cpu" for cell in found):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- the cells


def cells(
    source: str | Path | Mapping[str, Any], axes: Axes, out: str | Path, overrides: Sequence[str] = ()
) -> list[Cell]:
    """Every run of a sweep, each once; all of them are known to be well-formed."""
    given = read(source, overrides)
    written = given.pop("sweep", {})
    require(isinstance(written, Mapping), f"sweep is a table of settings and lists of their values, got {written!r}.")
    axes = {**written, **axes}
    for key, values in axes.items():
        listed = isinstance(values, Sequence) and not isinstance(values, str)
        require(listed and len(values) > 0, f"the axis '{key}' takes a list of values, got {values!r}.")
    order = sorted(axes, key=lambda key: key.count("."))  # a method before its options
    made = [cell(given, dict(zip(order, v, strict=True)), Path(out)) for v in itertools.product(*map(axes.get, order))]  # type: ignore[arg-type]
    for key in order:
        require(
            not all(key in one.dropped for one in made),
            f"none of the methods of this sweep has the option '{key.removeprefix('method.')}'.",
        )
    return list({one.folder: one for one in made}.values())


def axis(text: str) -> tuple[str, list[Any]]:
    """An axis as it is written on the command line: "method.sparsity=0.8,0.9" or "method=dpf,oneshot(at=0.5)"."""
    key, equals, values = text.partition("=")
    parts = split(values)
    require(
        bool(equals and key.strip()) and all(part.strip() for part in parts),
        f"'{text}' is not of the form key=value,value,… (seed=0,1,2).",
    )
    return key.strip(), [literal(part.strip()) for part in parts]


def split(text: str) -> list[str]:
    """The parts between commas, but for those within brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'" and not parts[-1][-1:].isalnum():  # no apostrophe
            quote = letter
        else:
            depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def cell(given: Mapping[str, Any], values: Mapping[str, Any], out: Path) -> Cell:
    """The run with these values on the axes."""
    recipe = copy.deepcopy(dict(given))
    dropped: list[str] = []
    setting: dict[str, Any] = {}
    for key, value in values.items():
        if key == "method":
            recipe["method"], lost = replace_method(recipe.get("method", DENSE), value)
            dropped += lost
            options = {k: v for k, v in spelled(value).items() if k != "name"}
            setting |= {"options": options} if options else {}
        elif "method" in values and key.startswith("method.") and not has(recipe["method"], key.split(".")[1]):
            dropped.append(key)
        else:
            put(recipe, key, value)
            if key not in ("seed", "method.sparsity"):
                setting[key] = value
    made = Recipe.load(recipe)
    named = dataclasses.replace(made, name=label({k: v for k, v in values.items() if k not in dropped}) or made.name)
    return Cell(named, out / f"{named.name}-{named.fingerprint()}", setting, tuple(dropped))


def replace_method(old: Any, new: Any) -> tuple[dict[str, Any], list[str]]:
    """Another method with what was written for the old one, and what of that it does not have."""
    kept, new = spelled(old), spelled(new)
    kept.pop("name", None)
    lost = [key for key in kept if not has(new, key)]
    return {**{key: value for key, value in kept.items() if key not in lost}, **new}, [f"method.{k}" for k in lost]


def spelled(method: Any) -> dict[str, Any]:
    """A method as a table."""
    if isinstance(method, Mapping):
        return dict(method)
    if not isinstance(method, str):
        raise PomonaError(f"an axis of methods takes names, such as 'dpf' or 'dpf(every=4)', got {method!r}.")
    name, options = parse_spec(method)
    return {"name": name, **options}


def has(method: Mapping[str, Any], option: str) -> bool:
    """Whether a method has an option; a name that is not known is refused later, with the nearest one."""
    name = str(method.get("name"))
    if name == DENSE:
        return False
    return name not in METHODS or option in {f.name for f in dataclasses.fields(METHODS[name]) if f.init}


def label(values: Mapping[str, Any]) -> str:
    """A name for the values on the axes: "dpf-95-seed0", and "dpf-95-every4-seed0" for "dpf(every=4)"."""
    parts = []
    if "method" in values:
        method = spelled(values["method"])
        parts.append(str(method.pop("name", None)))
        values = {f"method.{key}": value for key, value in method.items()} | dict(values)
        del values["method"]
    for key, value in sorted(values.items(), key=lambda item: item[0] != "method.sparsity"):
        if key == "method.sparsity":
            parts.append(f"{100 * value:g}" if isinstance(value, (int, float)) else str(value))
        else:
            parts.append(f"{key.split('.')[-1]}{value}")
    return "-".join(re.sub(r"[^\w.]+", "_", part) for part in parts)
