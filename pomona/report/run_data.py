"""What a report shows of one run: its settings, its result, its epochs and its mask updates."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import PomonaError
from ..lab.recipes.options import DENSE
from ..lab.recipes.private_recipe import PrivateRecipe
from ..lab.recipes.recipe import Recipe
from ..lab.runs.folder import METRICS_FILE, RECIPE_FILE, read_summary
from ..lab.sweeps.run_store import StoredRun, is_finite_number, read_folder
from ..untrusted import MAX_TOML_BYTES, parse_json, parse_toml, read_bytes, read_object, reading

LATENCY_FILE = "latency.json"  # of `pomona report --latency`
CERTIFICATE_FILE = "certificate.json"  # of `pomona bound certify RUN --json`
MASK_BIT = 1 / 8  # bytes for each parameter that say whether it is stored
VALUE_BYTES = 4  # of a stored parameter

# Of each kind of line in a metrics file, the numbers that it has, and those that it may have.
ROW_NUMBERS = {
    "epoch": (("step", "epoch"), ("loss", "accuracy", "perplexity", "valid_accuracy", "sparsity", "seconds", "rate")),
    "update": (("step", "flips", "iou", "delta"), ("sparsity",)),
}

Row = dict[str, Any]


@dataclass(frozen=True)
class RunData:
    """One run of a report. `network` and `series` say in which chart and under which name it appears."""

    name: str
    seed: int
    network: str
    method: str
    settings: Mapping[str, Any]  # dotted key → value of every setting that decides the result
    summary: Mapping[str, Any] | None = None  # None while the run is not complete
    series: str | None = None  # a name that the source gives, such as a column of a table
    sparsity: float | None = None  # the sparsity that the recipe asks for
    total_epochs: int = 0
    epochs: Sequence[Row] = ()  # lines of metrics.jsonl, over all stages
    updates: Sequence[Row] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)  # weights of each pruned tensor
    latency: Mapping[str, Any] = field(default_factory=dict)
    certificate: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None  # None: only a record is left

    @property
    def label(self) -> str:
        """The name and the seed, for tooltips."""
        return self.name if f"seed{self.seed}" in self.name else f"{self.name} · seed {self.seed}"

    @property
    def measure(self) -> str:
        """The key of the result: "perplexity" for language models, else "accuracy"."""
        rows: Sequence[Mapping[str, Any]] = self.epochs if self.summary is None else [self.summary]
        return "perplexity" if any("perplexity" in row for row in rows) else "accuracy"

    @property
    def result(self) -> float | None:
        """The accuracy in per cent, or the perplexity, of a finished run."""
        return None if self.summary is None else self.summary.get(self.measure)

    @property
    def reached_sparsity(self) -> float:
        """The pruned fraction of the targets at the end, or so far."""
        last: Mapping[str, Any] = self.summary or (self.epochs[-1] if self.epochs else {})
        return float(last.get("sparsity", 0.0))

    @property
    def stored_bytes(self) -> float | None:
        """The bytes of the nonzero parameters in float32 and, where the run pruned, one mask bit per parameter."""
        if self.summary is None:
            return None
        params, nonzeros = self.summary["params"], self.summary["nonzeros"]
        return VALUE_BYTES * (params if self.method == DENSE else nonzeros) + MASK_BIT * params * (self.method != DENSE)

    @property
    def layers(self) -> Mapping[str, float]:
        """The sparsity of each pruned tensor at the end, from the input to the output."""
        return {} if self.summary is None else self.summary["stages"][-1].get("layers", {})

    @property
    def layer_names(self) -> list[str]:
        """The names of the pruned tensors, in the order of the `layers` of an update."""
        count = len(self.updates[0]["layers"]) if self.updates else 0
        known = [list(self.sizes), list((self.summary or {}).get("stages", [{}])[0].get("layers", {}))]
        numbered = [f"layer {k}" for k in range(1, count + 1)]
        return next((names for names in known if len(names) == count), numbered)

    @property
    def steps_per_epoch(self) -> float:
        """The steps of an epoch; 1 before the end of the first."""
        return self.epochs[-1]["step"] / self.epochs[-1]["epoch"] if self.epochs else 1.0

    def settled(self) -> tuple[list[float], list[float], bool]:
        """Return epochs, the percentage of weights whose mask entry never changes after them, and whether it is exact.

        Runs with `train.track` record the share. Of others a lower bound is known: each flip after an epoch is of at
        most one weight that was not settled.
        """
        recorded = (self.summary or {}).get("settled")
        if recorded:
            return [float(epoch) for epoch in range(len(recorded))], [100 * share for share in recorded], True
        total = sum(self.sizes.values())
        if not total or self.summary is None:
            return [], [], False
        later = list(itertools.accumulate(reversed([row["flips"] for row in self.updates]), initial=0))
        left = later[-2::-1] if len(later) > 1 else []
        shares = [100 * max(0.0, 1 - flips / total) for flips in left]
        return [row["step"] / self.steps_per_epoch for row in self.updates], shares, False


def read_run(folder: Path) -> RunData | None:
    """Return the run in a folder; None where its recipe cannot be read."""
    with reading(f"the run in '{folder}'"):
        return _read_run(folder)


def _read_run(folder: Path) -> RunData | None:
    stored = read_folder(folder)
    if stored is not None:
        return describe_run(stored)
    try:
        private = PrivateRecipe.load(folder / RECIPE_FILE)
    except PomonaError:
        return None
    settings = {f"private.{key}": value for key, value in private.private.settings().items()}
    found = StoredRun(private.recipe, folder, read_summary(folder))
    return describe_run(found, method=private.private.method, settings=private.recipe.settings() | settings)


def explain_refusal(folder: Path) -> str:
    """Return why `read_run` returns None for a folder: what its recipe is refused for."""
    file = folder / RECIPE_FILE
    try:
        with reading(f"'{file}'"):
            is_private = "private" in parse_toml(read_bytes(file, MAX_TOML_BYTES).decode())
        _ = PrivateRecipe.load(file) if is_private else Recipe.load_stored(file)
    except PomonaError as error:
        return str(error)
    return f"'{folder}' cannot be read"


def describe_run(stored: StoredRun, **known: Any) -> RunData:
    """Return what a report shows of a stored run; `known` replaces fields that its source knows better."""
    recipe, folder = stored.recipe, stored.folder
    rows = [] if folder is None else read_rows(folder / METRICS_FILE)
    sizes: dict[str, int] = next((row["sizes"] for row in rows if row.get("kind") == "targets"), {})
    fields: dict[str, Any] = {
        "name": recipe.name,
        "seed": recipe.seed,
        "network": f"{recipe.model['name']} on {recipe.data.name}",
        "method": recipe.method["name"],
        "settings": recipe.settings(),
        "summary": stored.summary,
        "sparsity": recipe.method.get("sparsity"),
        "total_epochs": count_epochs(recipe, stored.summary),
        "epochs": [row for row in rows if row.get("kind") == "epoch"],
        "updates": [row for row in rows if row.get("kind") == "update" and "layers" in row],
        "sizes": sizes,
        "latency": {} if folder is None else read_mapping(folder / LATENCY_FILE),
        "certificate": {} if folder is None else read_mapping(folder / CERTIFICATE_FILE),
        "folder": folder,
    }
    return RunData(**fields | known)


def count_epochs(recipe: Recipe, summary: Mapping[str, Any] | None) -> int:
    """Return the epochs of a run: those of its summary, or those that its recipe has."""
    return recipe.train.epochs + recipe.finetune.epochs if summary is None else int(summary["epoch"])


def read_rows(file: Path) -> list[Row]:
    """Return the lines of a metrics file; a last line that is still being written is left out."""
    rows = []
    with suppress(OSError, PomonaError):
        for line in read_bytes(file).splitlines():
            with suppress(ValueError, RecursionError):
                rows.append(parse_json(line))
    return [row for row in rows if isinstance(row, dict) and is_valid_row(row)]


def is_valid_row(row: Row) -> bool:
    """Return whether a line of a metrics file has numbers, none of them NaN, where a report needs them."""
    if row.get("kind") == "targets":
        sizes = row.get("sizes")
        return isinstance(sizes, dict) and all(type(size) is int and size >= 0 for size in sizes.values())
    needed, optional = ROW_NUMBERS.get(str(row.get("kind")), ((), ()))
    numbers = [row.get(key) for key in needed] + [row[key] for key in optional if row.get(key) is not None]
    layers = row.get("layers", [])
    numbers += layers if isinstance(layers, list) else [None]
    return all(map(is_finite_number, numbers)) and (row.get("kind") != "epoch" or row["epoch"] > 0)


def read_mapping(file: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; an empty one where there is none."""
    with suppress(PomonaError):
        return read_object(file)
    return {}


def thin_updates(updates: Sequence[Row], limit: int) -> list[Row]:
    """Return at most `limit` mask updates.

    Of more updates, each of `limit` groups of consecutive ones becomes one: its last masks, and its means of flips and
    IoU.
    """
    if len(updates) <= limit:
        return list(updates)
    edges = [k * len(updates) // limit for k in range(limit + 1)]
    groups = [updates[start:end] for start, end in itertools.pairwise(edges)]
    means = ("flips", "iou", "delta")
    return [group[-1] | {key: statistics.fmean(row[key] for row in group) for key in means} for group in groups]
