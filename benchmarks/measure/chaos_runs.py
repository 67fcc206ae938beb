"""The runs that chaos.py harms: small trainings, private trainings and sweeps, and how their ends are compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pomona.errors import PomonaError
from pomona.lab import Recipe, train
from pomona.lab.recipes.private_recipe import PrivateRecipe
from pomona.lab.runs.folder import MASKS_FILE, METRICS_FILE, MODEL_FILE, RECIPE_FILE, SUMMARY_FILE
from pomona.lab.runs.private import PrivateStrategy
from pomona.lab.runs.strategy import TrainingStrategy
from pomona.lab.runs.train import is_begun
from pomona.lab.sweeps.sweep import sweep
from pomona.privacy import Budget

Notes = Callable[[str], None]

TRAIN = {"epochs": 3, "batch_size": 256, "device": "cpu", "checkpoint_steps": 2}
BASE = {"data": "digits", "model": "mlp(hidden=[24])", "rate": "cosine", "train": TRAIN}
PLAIN: dict[str, dict[str, Any]] = {
    "dpf": {**BASE, "model": "digits_cnn(rho=0.5)", "method": "dpf(sparsity=0.9, every=4)"},
    "rigl": {**BASE, "method": "rigl(sparsity=0.8, every=4)", "optimizer": "adam(lr=0.01)"},
    "iterand": {**BASE, "model": "digits_cnn(rho=0.5, affine=False)", "method": "iterand"},
    "finetuned": {
        **BASE,
        "method": "incremental(sparsity=0.7, every=3)",
        "train": {**TRAIN, "epochs": 2, "average": 0.5},
        "finetune": {"epochs": 1},
    },
}
ROWS, BATCH, STEPS = 1347, 400, 12
PRIVATE = {
    **BASE,
    "rate": "constant",
    "optimizer": {"lr": 3.0, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
    "train": {**TRAIN, "batch_size": BATCH},
}
SWEEP = {**BASE, "name": "cell", "train": {**TRAIN, "epochs": 2}}
AXES = {"method": ["dense", "set(sparsity=0.8, every=3)"], "seed": [0, 1]}

# What depends on the clock, on the number of sessions or on the place.
TIMES = frozenset({"seconds", "images_per_second", "out", "folder", "commit", "command", "versions", "machine"})
BEST = frozenset({"accuracy_best", "epoch_best"})  # unknown where lines of the metrics are lost
LOST_LINES = "bytes since the checkpoint: its last lines are missing"
NO_CHECKPOINT = "Start the run again in another folder."


class FailedCells(PomonaError):
    """Cells of a sweep that failed, each with a sentence."""


@dataclass(frozen=True)
class Subject:
    """A run, or a sweep of runs, that is begun or continued by one call."""

    name: str
    kind: str  # training, private or sweep
    jobs: int = 1  # processes of a sweep

    def go_on(self, folder: Path, note: Notes) -> None:
        """Begin the run in a folder, or continue it to its end."""
        if self.kind == "sweep":
            self.sweep(folder, note)
        else:
            train(self.strategy(), folder, resume=is_begun(folder), note=note)

    def strategy(self) -> TrainingStrategy:
        """Return the strategy of a single run."""
        if self.kind == "training":
            return TrainingStrategy(Recipe.load({"name": self.name, **PLAIN[self.name]}))
        share = 0.01 if self.name == "gip" else 0.0
        budget = Budget(8.0, 1e-5, ROWS, BATCH, STEPS, share, 1.0, 0.0273 if share else 0.0, ((STEPS, 8.0),))
        section = {"method": self.name, "epsilon": 8.0, "keep": 0.5, "secure": False, "budget": budget.to_dict()}
        return PrivateStrategy(PrivateRecipe.load({"name": self.name, **PRIVATE, "private": section}))

    def sweep(self, folder: Path, note: Notes) -> None:
        """Begin or continue the sweep; raise where a cell has failed."""
        found = sweep(SWEEP, AXES, folder, only_missing=True, jobs=self.jobs, note=note)
        if found["failed"]:
            raise FailedCells(" ".join(cell["error"] for cell in found["failed"]))

    def folders(self, folder: Path) -> list[Path]:
        """Return the folders of the runs in the subject's folder."""
        return sorted(path for path in folder.iterdir() if path.is_dir()) if self.kind == "sweep" else [folder]


SUBJECTS = [
    *(Subject(name, "training") for name in PLAIN),
    Subject("gip", "private"),
    Subject("dpsgd", "private"),
    Subject("cells", "sweep"),
    Subject("cells in two processes", "sweep", jobs=2),
]


def without_times(value: Any, dropped: frozenset[str] = TIMES) -> Any:
    """Return plain values without what differs between two sessions of equal runs."""
    if isinstance(value, Mapping):
        return {key: without_times(inner, dropped) for key, inner in value.items() if key not in dropped}
    return [without_times(inner, dropped) for inner in value] if isinstance(value, list) else value


def compare(subject: Subject, folder: Path, reference: Path, lines_lost: bool = False) -> list[str]:
    """Return in what the end of a subject differs from the undisturbed one; with `lines_lost`, lines may be missing."""
    found, expected = subject.folders(folder), subject.folders(reference)
    if [path.name for path in found] != [path.name for path in expected] and subject.kind == "sweep":
        return [f"the folders are {[path.name for path in found]}"]
    different = [
        f"{run.name}: {problem}"
        for run, undisturbed in zip(found, expected, strict=True)
        for problem in compare_runs(run, undisturbed, lines_lost)
    ]
    if subject.kind == "sweep":
        tables = [read_json(path / "sweep.json") for path in (folder, reference)]
        different += ["sweep.json differs"] * (tables[0] is None or tables[0] != tables[1])
    return different


def compare_runs(run: Path, undisturbed: Path, lines_lost: bool) -> Iterator[str]:
    """Yield in what a run's folder differs from that of the undisturbed run."""
    for name in (MODEL_FILE, MASKS_FILE, RECIPE_FILE):
        data = [path.read_bytes() if (path := place / name).is_file() else None for place in (run, undisturbed)]
        if data[0] != data[1]:
            yield f"{name} differs"
    dropped = TIMES | BEST if lines_lost else TIMES
    summaries = [read_json(place / SUMMARY_FILE, dropped) for place in (run, undisturbed)]
    if summaries[0] != summaries[1]:
        yield f"{SUMMARY_FILE} differs"
    rows, expected = (read_rows(place / METRICS_FILE) for place in (run, undisturbed))
    if rows != expected and not (lines_lost and is_subsequence(rows, expected)):
        yield f"{METRICS_FILE} differs"


def read_json(file: Path, dropped: frozenset[str] = TIMES) -> Any:
    """Return the contents of a JSON file without times; None where it cannot be read."""
    try:
        return without_times(json.loads(file.read_bytes()), dropped)
    except (OSError, ValueError):
        return None


def read_rows(metrics: Path) -> list[Any]:
    """Return the lines of the metrics without times; a line that cannot be read is returned as it is."""
    rows: list[Any] = []
    for line in metrics.read_bytes().splitlines() if metrics.is_file() else []:
        try:
            rows.append(without_times(json.loads(line)))
        except ValueError:
            rows.append(line)
    return rows


def is_subsequence(rows: list[Any], expected: list[Any]) -> bool:
    """Return whether rows are some of the expected ones in their order."""
    left = iter(expected)
    return all(row in left for row in rows)
