"""The folder of a run: the names of its files, its lock, its metrics, and whether a run may use it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pomona.errors import PomonaError, require

from ..recipes.recipe import Recipe
from .durable_files import write_errors

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

RECIPE_FILE = "recipe.toml"
ENVIRONMENT_FILE = "env.json"
METRICS_FILE = "metrics.jsonl"
MODEL_FILE = "model.safetensors"
MASKS_FILE = "masks.safetensors"
SUMMARY_FILE = "summary.json"
TRACKING_FOLDER = "tracking"  # with a folder for each tracker
LOCK_ATTEMPTS, LOCK_SECONDS = 3, 0.02  # how often, and how far apart, a process tries to lock a folder


class FolderInUse(PomonaError):
    """Raised where another process trains in a folder."""


class FolderNotEmpty(PomonaError):
    """Raised where a run should begin in a folder that has files."""


def refuse_used_folder(folder: Path) -> None:
    """Raise FolderNotEmpty if a run was started in the folder.

    A partial recipe.toml does not count: a process killed while it wrote its first file leaves nothing else.
    """
    used = folder.is_dir() and any(path.name != f"{RECIPE_FILE}.part" for path in folder.iterdir())
    if used:
        raise FolderNotEmpty(f"'{folder}' is not empty: go on with --resume, or give another folder.")


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary of the run in a folder; None if the run is not complete or the file is damaged."""
    with suppress(OSError, ValueError):
        summary = json.loads((folder / SUMMARY_FILE).read_bytes())
        if isinstance(summary, dict) and "fingerprint" in summary:
            return summary
    return None


def read_finished_run(folder: Path, recipe: Recipe) -> dict[str, Any] | None:
    """Return the summary of a recipe's run in a folder; None unless it is complete, and its model can be read.

    A summary of another run, and a model that was cut off, count as if they were not there.
    """
    summary = read_summary(folder)
    if summary is None or names_another_run(summary, recipe):
        return None
    try:
        with safe_open(folder / MODEL_FILE, "pt"):
            return summary
    except (OSError, SafetensorError):
        return None


def names_another_run(summary: Mapping[str, Any], recipe: Recipe) -> bool:
    """Return whether a summary names another seed, model or data set than a recipe."""
    names = {"seed": recipe.seed, "model": recipe.model["name"], "data": recipe.data.name}
    return any(summary.get(key, value) != value for key, value in names.items())


def require_same_recipe(recipe: Recipe, started: Recipe, folder: Path) -> None:
    """Raise PomonaError, with the first differences, unless the run in a folder was started with the same settings."""
    differences = recipe.differences(started)
    require(
        not differences,
        f"the run in '{folder}' was started with other settings ({'; '.join(differences[:3])}): "
        "resume it with the recipe it was started with, or give another folder.",
    )


def require_same_tensors(saved: dict[str, Tensor], model: dict[str, Tensor], folder: Path) -> None:
    """Raise PomonaError, with the first tensor that differs, unless saved tensors have the shapes of the model's."""
    for name in {**model, **saved}:
        there, here = (_format_shape(side.get(name)) for side in (saved, model))
        require(
            there == here,
            f"the checkpoint in '{folder}' is of another model: '{name}' is {there} there and {here} here. "
            "Resume with the recipe it was made by, or start again in another folder.",
        )


def _format_shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{'×'.join(map(str, tensor.shape)) or 'a number'}"


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Create a folder if needed and lock it for this process; raise PomonaError if another process has it.

    The lock is on the folder itself, so it leaves no file and ends with the process, however that ends.
    """
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not try_lock(handle):
            raise FolderInUse(f"another process trains in '{folder}': wait for it, or give another folder.")
        yield
    finally:
        os.close(handle)


def try_lock(handle: int) -> bool:
    """Lock an open folder for this process; return False where another process keeps it.

    `is_in_use` of another process has the lock for a moment, so one refusal is not enough.
    """
    for attempt in range(LOCK_ATTEMPTS):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt < LOCK_ATTEMPTS - 1:
                time.sleep(LOCK_SECONDS)
        except OSError:  # a file system without locks
            return True
        else:
            return True
    return False


def is_in_use(folder: Path) -> bool:
    """Return whether another process, or another run of this one, trains in a folder now."""
    try:
        with locked_folder(folder) if folder.is_dir() else nullcontext():
            return False
    except FolderInUse:
        return True


class MetricsWriter:
    """Appends lines to metrics.jsonl after the first `size` bytes, which the last checkpoint counted.

    Lines after them are dropped, and so is a line that was cut off. `lost` is the number of counted bytes that the file
    no longer has.
    """

    def __init__(self, folder: Path, size: int = 0) -> None:
        self.path = folder / METRICS_FILE
        with write_errors(self.path):
            self.file = self.path.open("a+b")
            whole = count_whole_lines(self.file, size)
            if self.path.stat().st_size > whole:
                self.file.truncate(whole)
        self.lost = size - whole

    def write(self, row: dict[str, Any]) -> None:
        """Append one line."""
        with write_errors(self.path):
            self.file.write(json.dumps(row).encode() + b"\n")
            self.file.flush()

    def sync(self) -> int:
        """Flush all lines to the disk and return their size in bytes."""
        with write_errors(self.path):
            os.fsync(self.file.fileno())
            return self.file.tell()

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # a full disk was reported by `write`, and closing tries to write again
            self.file.close()


def count_whole_lines(file: BinaryIO, size: int) -> int:
    """Return the bytes of the whole lines within the first `size` bytes of a file."""
    file.seek(0)
    return file.read(size).rfind(b"\n") + 1


def encode_json(value: Any) -> bytes:
    """Return a value as indented JSON, for files that people read too."""
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
