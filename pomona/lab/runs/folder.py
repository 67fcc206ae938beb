"""The folder of a run: what was begun in it, the lines of its metrics, and that one process at a time is at it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from pomona.errors import PomonaError, require

from ..recipes.recipe import Recipe
from . import checkpoint

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

RECIPE_FILE, METRICS_FILE, MODEL_FILE, SUMMARY_FILE = (
    "recipe.toml",
    "metrics.jsonl",
    "model.safetensors",
    "summary.json",
)


def validate_folder(recipe: Recipe, folder: Path, resume: bool) -> dict[str, Any] | None:
    """Refuse a folder that is in use, or of another recipe; the summary if its run is complete."""
    if folder.exists() and not folder.is_dir():
        raise PomonaError(f"'{folder}' is a file: give a folder for the run.")
    if not resume:
        refuse_used_folder(folder)
        return None
    written = folder / RECIPE_FILE
    require(written.is_file(), f"there is no run to resume in '{folder}': start it without --resume.")
    require_same_recipe(recipe, Recipe.load(written), folder)
    return read_summary(folder)


def refuse_used_folder(folder: Path) -> None:
    """Refuse a folder in which something was begun; a kill may have left no more than a recipe that is not whole."""
    used = folder.is_dir() and any(path.name != f"{RECIPE_FILE}.part" for path in folder.iterdir())
    require(not used, f"'{folder}' is not empty: go on with --resume, or give another folder.")


def read_summary(folder: Path) -> dict[str, Any] | None:
    """What the run in a folder reached; None where it is not complete, or its summary is damaged."""
    with suppress(OSError, ValueError):
        found = json.loads((folder / SUMMARY_FILE).read_bytes())
        if isinstance(found, dict) and "fingerprint" in found:
            return found
    return None


def require_same_recipe(mine: Recipe, theirs: Recipe, folder: Path) -> None:
    """Refuse to go on with a run under other settings, naming the first few."""
    differences = mine.differences(theirs)
    require(
        not differences,
        f"the run in '{folder}' was begun with other settings ({'; '.join(differences[:3])}): "
        "resume it with the recipe it was begun with, or give another folder.",
    )


def require_same_tensors(theirs: dict[str, Tensor], mine: dict[str, Tensor], folder: Path) -> None:
    """Refuse a checkpoint of another model, naming the first tensor that differs."""
    for name in {**mine, **theirs}:
        there, here = (_format_shape(side.get(name)) for side in (theirs, mine))
        require(
            there == here,
            f"the checkpoint in '{folder}' is of another model: '{name}' is {there} there and {here} here. "
            "Resume with the recipe it was made by, or start anew in another folder.",
        )


def _format_shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{'×'.join(map(str, tensor.shape)) or 'a number'}"


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Have a folder, made where there is none, for this process alone.

    The lock is on the folder itself, so it leaves no file, and ends with the process however that ends.
    """
    with checkpoint.write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PomonaError(f"another process trains in '{folder}': wait for it, or give another folder.") from error
        except OSError:  # a file system that knows no locks
            pass
        yield
    finally:
        os.close(handle)


class MetricsWriter:
    """The lines of a run's metrics, of which those after its checkpoint, at `size`, are dropped."""

    def __init__(self, folder: Path, size: int = 0) -> None:
        self.path = folder / METRICS_FILE
        with checkpoint.write_errors(self.path):
            if self.path.exists() and self.path.stat().st_size > size:
                os.truncate(self.path, size)
            self.file = self.path.open("ab")

    def write(self, row: dict[str, Any]) -> None:
        """Append a line."""
        with checkpoint.write_errors(self.path):
            self.file.write(json.dumps(row).encode() + b"\n")
            self.file.flush()

    def sync(self) -> int:
        """Have all lines safely on the disk; how long they are together."""
        with checkpoint.write_errors(self.path):
            os.fsync(self.file.fileno())
            return self.file.tell()

    def close(self) -> None:
        with suppress(OSError):  # a full disk was told already, and closing would try again
            self.file.close()


def encode_json(value: Any) -> bytes:
    """A value as a file that people can read too."""
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
