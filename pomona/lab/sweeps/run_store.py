"""Which runs are there: in the folders they were trained in, and as records that outlive them.

A record is a finished run in one small file: its summary, its whole recipe and what it cost. Runs are found by
what their recipes say, read anew by this version: an option that came later has its default in an old run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from pomona.errors import PomonaError, require

from ..recipes.options import DENSE, FinetuneOptions
from ..recipes.recipe import Recipe
from ..runs import durable_files, retrain
from ..runs.distributed import distributed_context
from ..runs.folder import RECIPE_FILE, read_summary

RUNS, RECORDS = Path("runs"), Path("results/runs")
DAMAGED = (OSError, KeyError, ValueError, SafetensorError)  # what reading a run's files may raise
CHECKOUT = Path(__file__).resolve().parents[3] / RECORDS  # the records that come with the code


@dataclass(frozen=True)
class Run:
    """A run that was found."""

    recipe: Recipe
    folder: Path | None  # None: only its record is left
    summary: dict[str, Any] | None  # None: it is not complete
    longer: Run | None = None  # of which this is the part before its fine-tuning

    def record(self) -> dict[str, Any]:
        """All that a table needs of a finished run; of places, which tell of a machine, the name alone."""
        assert self.summary is not None
        recipe = self.recipe.to_dict()
        if recipe["origin"]["run"] is not None:
            recipe["origin"]["run"] = Path(recipe["origin"]["run"]).name
        return {**self.summary, "cost": self.cost(), "recipe": recipe}

    def cost(self) -> float | None:
        """What its training took, in epochs of dense training; None where nobody can tell any more."""
        if self.longer is not None:
            whole, tuned = self.longer.cost(), self.longer.recipe.finetune.epochs
            return None if whole is None else whole - tuned * retrain.final_epoch_cost(self.summary or {})
        if self.summary is None or "cost" in self.summary:
            return (self.summary or {}).get("cost")
        if self.recipe.method["name"] == DENSE:
            return float(self.summary["epoch"])
        try:
            return None if self.folder is None else retrain.training_cost(self.folder)
        except DAMAGED:
            return None

    def before_finetune(self) -> Run:
        """The same run without its fine-tuning; the masks are the same, and so is what is left of the model."""
        assert self.summary is not None
        stages = [stage for stage in self.summary["stages"] if stage["stage"] != "finetune"]
        measured = self.summary["stages"][-1].keys() - {"stage", "layers"}
        common = {key: value for key, value in self.summary.items() if key not in measured}
        last = {key: value for key, value in stages[-1].items() if key not in ("stage", "layers")}
        recipe = without_finetune(self.recipe)
        found = {"fingerprint": recipe.fingerprint(), "stages": stages}
        return Run(recipe, None, {**common, **last, **found}, self)


class Store:
    """The runs under some folders, and the records."""

    def __init__(self, folders: Sequence[Path] = (RUNS,), records: Sequence[Path] = (RECORDS, CHECKOUT)) -> None:
        self.runs: dict[str, Run] = {}  # by fingerprint
        self.longer: dict[str, Run] = {}  # complete ones with fine-tuning, by the fingerprint without it
        self.retrained: dict[tuple[str, str], Run] = {}  # by the run that found the mask, and how: "init-flops"
        places = dict.fromkeys(place.resolve() for place in records)
        for file in [file for place in places for file in sorted(place.glob("*.json"))]:
            try:
                self.enter(read_record(file))
            except PomonaError as error:
                warnings.warn(f"the record '{file.name}' is left aside: {error}", stacklevel=2)
        for folder in [folder for place in folders for folder in run_folders(place)]:
            self.add(folder)

    def add(self, folder: Path) -> None:
        """Take in a run's folder."""
        self.enter(read_folder(folder))

    def enter(self, run: Run | None) -> None:
        """Remember a run; one that is complete comes before one that is not, and then one that has its folder."""
        if run is None:
            return
        mark = run.recipe.fingerprint()
        if mark in self.runs and rank(self.runs[mark]) >= rank(run):
            return
        self.runs[mark] = run
        if run.summary is None:
            return
        if run.recipe.finetune.epochs:
            self.longer[without_finetune(run.recipe).fingerprint()] = run
        if run.recipe.origin.run is not None and run.recipe.origin.fingerprint is not None:
            self.retrained[run.recipe.origin.fingerprint, run.recipe.name.rpartition("-retrain-")[2]] = run

    def source(self, recipe: Recipe) -> Run | None:
        """The finished run that tells what a recipe reaches: its own, or one that goes on to fine-tune."""
        mark = recipe.fingerprint()
        run = self.runs.get(mark)
        return run if run is not None and run.summary is not None else self.longer.get(mark)

    def find(self, recipe: Recipe) -> Run | None:
        """The finished run of a recipe, which may be the first part of a longer one."""
        run = self.source(recipe)
        longer = run is not None and run.recipe.finetune.epochs and not recipe.finetune.epochs
        return run.before_finetune() if run is not None and longer else run

    def fingerprint(self, recipe: Recipe) -> str:
        """The fingerprint by which those that begin with a run know it: that of the version it was trained by."""
        run = self.runs.get(recipe.fingerprint())
        return run.summary["fingerprint"] if run is not None and run.summary is not None else recipe.fingerprint()

    def folder(self, recipe: Recipe, complete: bool = False) -> Path | None:
        """Where this very recipe was trained or begun."""
        run = self.runs.get(recipe.fingerprint())
        return None if run is None or (complete and run.summary is None) else run.folder


def rank(run: Run) -> tuple[bool, bool]:
    return run.summary is not None, run.folder is not None


def without_finetune(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, finetune=FinetuneOptions())


def run_folders(place: Path) -> Iterator[Path]:
    """The folders of runs under a place, at any depth."""
    for folder, inner, files in os.walk(place):
        if RECIPE_FILE in files:
            inner.clear()
            yield Path(folder)
        else:
            inner.sort()


def read_folder(folder: Path) -> Run | None:
    """The run in a folder, or None where it cannot be read (any more)."""
    try:
        recipe = Recipe.load(folder / RECIPE_FILE)
    except PomonaError:
        return None
    found = read_summary(folder)
    return Run(recipe, folder, None if found is None or flaw(found, recipe) else found)


def read_record(file: Path) -> Run | None:
    """The run that a record tells of, or None where it does not say by which recipe."""
    try:
        record = json.loads(file.read_bytes())
        if "recipe" not in record:
            return None
        recipe = Recipe.load(dict(record.pop("recipe")))
    except PomonaError:
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise PomonaError("it cannot be read.") from error
    why = flaw(record, recipe)
    require(why is None, f"it {why}.")
    return Run(recipe, None, record)


TOLD = ("fingerprint", "stages", "epoch", "sparsity", "seconds", "params", "nonzeros", "macs", "macs_left")


def flaw(found: Mapping[str, Any], recipe: Recipe) -> str | None:
    """Why a summary cannot be that of a recipe's finished run, or None."""
    mine = {"model": recipe.model["name"], "method": recipe.method["name"], "data": recipe.data.name}
    for key, value in ({"seed": recipe.seed} | mine).items():
        if found.get(key) != value:
            return f"tells of {key} {found.get(key)}, and its recipe of {value}"
    measure = "perplexity" if "perplexity" in found else "accuracy"
    lost = [key for key in (measure, *TOLD) if found.get(key) in (None, [])]
    return f"does not tell {', '.join(lost)}" if lost else None


def keep(run: Run | None, records: Path | None = RECORDS) -> Path | None:
    """Write the record of a run, and say where; there is none of what is not complete, or itself from a record."""
    if (
        records is None
        or run is None
        or run.summary is None
        or run.folder is None
        or not distributed_context().is_first
    ):
        return None
    file = records / f"{run.recipe.name}-{run.summary['fingerprint']}.json"
    with durable_files.write_errors(records):
        records.mkdir(parents=True, exist_ok=True)
    durable_files.replace_file(file, (json.dumps(run.record(), indent=1, ensure_ascii=False) + "\n").encode())
    return file
