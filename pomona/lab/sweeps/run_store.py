"""The store of runs: folders in which runs were trained, and records that remain when the folders are gone.

A record is a small JSON file about a finished run: its summary, its whole recipe and its cost. Runs are found by
their recipe as this version reads it, so that an option added later has its default value in an older run.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from pomona.errors import PomonaError, require
from pomona.untrusted import parse_json, read_bytes

from ..recipes.bundled import BUNDLED, list_json_files
from ..recipes.options import DENSE, FinetuneOptions
from ..recipes.recipe import Recipe
from ..recipes.stored_text import mark_end
from ..runs import durable_files, retrain
from ..runs.distributed import distributed_context
from ..runs.folder import RECIPE_FILE, find_cut_file, read_summary
from ..runs.run_view import RunView

RUNS, RECORDS = Path("runs"), Path("results/runs")
BUNDLED_RECORDS = BUNDLED / RECORDS  # the records that ship with the code
READ_ERRORS = (OSError, KeyError, ValueError, SafetensorError)  # what reading damaged files of a run may raise
NUMBER_KEYS = ("epoch", "sparsity", "seconds", "params", "nonzeros", "macs", "macs_left")
REQUIRED_KEYS = ("fingerprint", "stages", *NUMBER_KEYS)
MAX_RECORD_BYTES = 16 << 20
Key = TypeVar("Key", str, tuple[str, str])


@dataclass(frozen=True, repr=False)
class StoredRun(RunView):
    """A run that was found in a folder or as a record."""

    recipe: Recipe
    folder: Path | None  # None: only its record is left
    summary: dict[str, Any] | None  # None: the run is not complete
    longer_run: StoredRun | None = None  # the run with fine-tuning of which this is the first part

    @property
    def status(self) -> str:
        """Whether the run is complete, in words, and where it is."""
        place = "a record" if self.folder is None else str(self.folder)
        return f"{'not complete' if self.summary is None else 'complete'}, in {place}"

    @property
    def figures(self) -> Mapping[str, Any]:
        """The figures of the summary, none where the run is not complete."""
        return self.summary or {}

    def to_record(self) -> dict[str, Any]:
        """Return the record of a finished run; of paths, which are specific to a machine, only the last name."""
        assert self.summary is not None
        recipe = self.recipe.to_dict()
        for section, key in (("origin", "run"), ("teacher", "run"), ("teacher", "file")):
            if recipe[section][key] is not None:
                recipe[section][key] = Path(recipe[section][key]).name
        return {**self.summary, "cost": self.cost(), "recipe": recipe}

    def cost(self) -> float | None:
        """Return the cost of the training in epochs of dense training; None where it can no longer be computed."""
        if self.longer_run is not None:
            whole, tuned = self.longer_run.cost(), self.longer_run.recipe.finetune.epochs
            return None if whole is None else whole - tuned * retrain.final_epoch_cost(self.summary or {})
        if self.summary is None or "cost" in self.summary:
            return (self.summary or {}).get("cost")
        if self.recipe.method["name"] == DENSE:
            return float(self.summary["epoch"])
        try:
            return None if self.folder is None else retrain.training_cost(self.folder)
        except PomonaError:
            return None

    def before_finetune(self) -> StoredRun:
        """Return the run up to its fine-tuning, which changes neither the masks nor the remaining model."""
        assert self.summary is not None
        stages = [stage for stage in self.summary["stages"] if stage["stage"] != "finetune"]
        measured = self.summary["stages"][-1].keys() - {"stage", "layers"}
        common = {key: value for key, value in self.summary.items() if key not in measured}
        last = {key: value for key, value in stages[-1].items() if key not in ("stage", "layers")}
        recipe = without_finetune(self.recipe)
        changed = {"fingerprint": recipe.fingerprint(), "stages": stages}
        return StoredRun(recipe, None, {**common, **last, **changed}, self)


class RunStore:
    """The runs below some folders, and the records in some folders.

    A folder in `expected` whose recipe has exactly the expected text is not parsed, which takes most of the time.
    """

    def __init__(
        self,
        folders: Sequence[Path] = (RUNS,),
        records: Sequence[Path] = (RECORDS, BUNDLED_RECORDS),
        expected: Mapping[Path, Recipe] | None = None,
    ) -> None:
        self.runs: dict[str, StoredRun] = {}  # by fingerprint
        self.finetuned: dict[str, StoredRun] = {}  # complete runs with fine-tuning, by the fingerprint without it
        self.retrained: dict[tuple[str, str], StoredRun] = {}  # by the parent's fingerprint, and how: "init-flops"
        self.add_records(records)
        for folder in [folder for place in folders for folder in find_run_folders(place)]:
            self.add_folder(folder, (expected or {}).get(folder))

    def add_records(self, records: Sequence[Path] = (RECORDS, BUNDLED_RECORDS)) -> None:
        """Add the runs with a record in some folders; a record that cannot be read is ignored with a warning."""
        places = dict.fromkeys(place.resolve() for place in records)
        for file in [file for place in places for file in list_json_files(place)]:
            try:
                self.add_run(read_record(file))
            except PomonaError as error:
                warnings.warn(f"the record '{file.name}' is ignored: {error}", stacklevel=3)

    def add_folder(self, folder: Path, expected: Recipe | None = None) -> None:
        """Add the run in a folder, if it can be read."""
        self.add_run(read_folder(folder, expected))

    def add_run(self, run: StoredRun | None) -> None:
        """Add a run; of two with one fingerprint a complete run is preferred, and then one that has its folder."""
        if run is None:
            return
        fingerprint = run.recipe.fingerprint()
        if fingerprint in self.runs and preference(self.runs[fingerprint]) >= preference(run):
            return
        self.runs[fingerprint] = run
        if run.summary is None:
            return
        if run.recipe.finetune.epochs:
            keep_better(self.finetuned, without_finetune(run.recipe).fingerprint(), run)
        if run.recipe.origin.run is not None and run.recipe.origin.fingerprint is not None:
            kind = run.recipe.name.rpartition("-retrain-")[2]
            keep_better(self.retrained, (run.recipe.origin.fingerprint, kind), run)

    def find_covering_run(self, recipe: Recipe) -> StoredRun | None:
        """Return the finished run that contains a recipe's training: its own, or one that continues to fine-tune."""
        fingerprint = recipe.fingerprint()
        run = self.runs.get(fingerprint)
        return run if run is not None and run.summary is not None else self.finetuned.get(fingerprint)

    def find_result(self, recipe: Recipe) -> StoredRun | None:
        """Return the finished run of a recipe, which may be the first part of a run with fine-tuning."""
        run = self.find_covering_run(recipe)
        is_longer = run is not None and run.recipe.finetune.epochs and not recipe.finetune.epochs
        return run.before_finetune() if run is not None and is_longer else run

    def recorded_fingerprint(self, recipe: Recipe) -> str:
        """Return the fingerprint of a recipe by the version that trained it, which its child runs refer to."""
        run = self.runs.get(recipe.fingerprint())
        return run.summary["fingerprint"] if run is not None and run.summary is not None else recipe.fingerprint()

    def find_folder(self, recipe: Recipe, complete: bool = False) -> Path | None:
        """Return the folder in which exactly this recipe was begun, or with `complete` finished."""
        run = self.runs.get(recipe.fingerprint())
        return None if run is None or (complete and run.summary is None) else run.folder


def preference(run: StoredRun) -> tuple[bool, bool]:
    """Return a key by which the better of two runs with one fingerprint is larger."""
    return run.summary is not None, run.folder is not None


def keep_better(runs: dict[Key, StoredRun], key: Key, run: StoredRun) -> None:
    """Set the run of a key, unless the present one is better."""
    if key not in runs or preference(runs[key]) <= preference(run):
        runs[key] = run


def without_finetune(recipe: Recipe) -> Recipe:
    """Return a recipe without its fine-tuning."""
    return dataclasses.replace(recipe, finetune=FinetuneOptions())


def find_run_folders(place: Path) -> Iterator[Path]:
    """Yield the folders of runs below a folder, at any depth."""
    for folder, inner, files in os.walk(place):
        if RECIPE_FILE in files:
            inner.clear()
            yield Path(folder)
        else:
            inner.sort()


def read_folder(folder: Path, expected: Recipe | None = None) -> StoredRun | None:
    """Return the run in a folder; None where its recipe cannot be read."""
    try:
        is_expected = expected is not None and has_contents(folder / RECIPE_FILE, mark_end(expected.to_toml()))
        recipe = expected if expected and is_expected else Recipe.load_stored(folder / RECIPE_FILE)
    except PomonaError:
        return None
    found = read_summary(folder)
    if found is None or find_mismatch(found, recipe) or find_cut_file(folder, found):
        found = None
    return StoredRun(recipe, folder, found)


def has_contents(file: Path, wanted: bytes) -> bool:
    """Return whether a file has exactly these contents."""
    try:
        return read_bytes(file, len(wanted)) == wanted
    except (OSError, PomonaError):
        return False


def read_record(file: Traversable) -> StoredRun | None:
    """Return the run that a record describes; None where the record has no recipe.

    Raises:
        PomonaError: where the file cannot be read or does not match its recipe.
    """
    try:
        record = parse_json(file.read_bytes(), MAX_RECORD_BYTES)
        if "recipe" not in record:
            return None
        recipe = Recipe.load_stored(dict(record.pop("recipe")))
        mismatch = find_mismatch(record, recipe)
    except PomonaError:
        raise
    except Exception as error:  # a hostile file can make anything fail, and must do no more than that
        raise PomonaError("it cannot be read.") from error
    require(mismatch is None, f"it {mismatch}.")
    return StoredRun(recipe, None, record)


def find_mismatch(found: Mapping[str, Any], recipe: Recipe) -> str | None:
    """Return why a summary cannot belong to a finished run of a recipe; None if it can."""
    expected = {"model": recipe.model["name"], "method": recipe.method["name"], "data": recipe.data.name}
    for key, value in ({"seed": recipe.seed} | expected).items():
        if found.get(key) != value:
            return f"has the {key} {found.get(key)}, and its recipe has {value}"
    measure = "perplexity" if "perplexity" in found else "accuracy"
    lost = [key for key in (measure, *REQUIRED_KEYS) if found.get(key) in (None, [])]
    if lost:
        return f"does not have {', '.join(lost)}"
    wrong = [key for key in NUMBER_KEYS if not is_finite_number(found[key])]
    wrong += [] if type(found[measure]) in (int, float) else [measure]
    stages: list[Any] = found["stages"] if isinstance(found["stages"], list) else [None]
    valid = all(map(is_stage, stages)) and any(stage["stage"] != "finetune" for stage in stages)
    wrong += [] if valid else ["stages"]
    return f"has no valid {', '.join(wrong)}" if wrong else None


def is_stage(value: Any) -> bool:
    """Return whether a value of a JSON file describes a stage: its name, and the sparsities of its layers."""
    if not isinstance(value, dict) or not isinstance(value.get("stage"), str):
        return False
    layers = value.get("layers", {})
    return isinstance(layers, dict) and all(map(is_finite_number, layers.values()))


def is_finite_number(value: Any) -> bool:
    """Return whether a value of a JSON file is a number, and neither infinite nor NaN."""
    return type(value) in (int, float) and math.isfinite(value)


def write_record(run: StoredRun | None, records: Path | None = RECORDS) -> Path | None:
    """Write the record of a run and return its file.

    Nothing is written, and None returned, for a run that is not complete or has no folder, without a folder for
    records, and in all processes of torchrun but the first.
    """
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
    text = json.dumps(run.to_record(), indent=1, ensure_ascii=False) + "\n"
    durable_files.replace_shared_file(file, text.encode())
    return file
