"""The folder of a run: the names of its files, its lock, its metrics, and whether a run may use it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError
from torch import Tensor

from pomona.errors import PomonaError, require
from pomona.untrusted import open_regular, parse_json, read_bytes, read_object, read_tensor_metadata
from pomona.version import __version__

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
LONGEST_LINE = 1 << 16  # more bytes than the line of an epoch has
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
    with suppress(PomonaError):
        summary = read_object(folder / SUMMARY_FILE)
        if isinstance(summary.get("fingerprint"), str):
            return summary
    return None


def read_finished_run(folder: Path, recipe: Recipe, fingerprint: str) -> dict[str, Any] | None:
    """Return the summary of a recipe's run in a folder; None unless it is complete, and its model is there.

    A summary of another run, and one beside a file that was cut off, count as if they were not there.
    """
    summary = read_summary(folder)
    if summary is None or names_another_run(summary, recipe, fingerprint) or find_cut_file(folder, summary):
        return None
    return summary if (folder / MODEL_FILE).is_file() else None


def names_another_run(summary: Mapping[str, Any], recipe: Recipe, fingerprint: str) -> bool:
    """Return whether a summary names another seed, model or data set than a recipe, or has another fingerprint.

    Other versions of pomona may compute another fingerprint of the same settings.
    """
    names = {"seed": recipe.seed, "model": recipe.model["name"], "data": recipe.data.name}
    same_version = (summary.get("versions") or {}).get("pomona") == __version__
    return any(summary.get(key, value) != value for key, value in names.items()) or (
        same_version and summary["fingerprint"] != fingerprint
    )


def find_cut_file(folder: Path, summary: Mapping[str, Any]) -> str | None:
    """Return the name of a file of a finished run that has lost its end; None if none has. A missing file has not."""
    for name in (MODEL_FILE, MASKS_FILE):
        try:
            read_tensor_metadata(folder / name)
        except FileNotFoundError:
            continue
        except (OSError, PomonaError, SafetensorError):
            return name
    return None if ends_at_step(folder / METRICS_FILE, summary.get("step")) else METRICS_FILE


def ends_at_step(metrics: Path, step: int | None) -> bool:
    """Return whether the last line of the metrics, if there are any, is whole and of a step; None is any step."""
    try:
        with open_regular(metrics) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LONGEST_LINE))
            tail = file.read(LONGEST_LINE)
        row = parse_json(tail.removesuffix(b"\n").rpartition(b"\n")[2])
        return tail.endswith(b"\n") and step in (None, row["step"])
    except FileNotFoundError:
        return True
    except (PomonaError, OSError, ValueError, KeyError, TypeError):
        return False


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
    with write_errors(folder):
        handle = os.open(folder, os.O_RDONLY)
    LOCK_HANDLES.add(handle)
    try:
        if not try_lock(handle):
            raise FolderInUse(f"another process trains in '{folder}': wait for it, or give another folder.")
        yield
    finally:
        if handle in LOCK_HANDLES:  # not in a fork of this process
            LOCK_HANDLES.remove(handle)
            os.close(handle)


def close_inherited_locks() -> None:
    """Close the locks that a fork has from its parent: a worker that outlives a killed run must not keep its folder."""
    for handle in LOCK_HANDLES:
        os.close(handle)
    LOCK_HANDLES.clear()


LOCK_HANDLES: set[int] = set()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=close_inherited_locks)


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
            self.file = open_regular(self.path, "a+b")
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

    def read_rows(self) -> Iterator[dict[str, Any]]:
        """Yield all lines; those that a disk has damaged are left out."""
        with write_errors(self.path):
            lines = read_bytes(self.path).splitlines()
        for line in lines:
            with suppress(ValueError):
                if isinstance(row := parse_json(line), dict):
                    yield row

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # a full disk was reported by `write`, and closing tries to write again
            self.file.close()


def count_whole_lines(file: BinaryIO, size: int) -> int:
    """Return the bytes of the whole lines within the first `size` bytes of a file, which may have fewer."""
    end = min(size, os.fstat(file.fileno()).st_size)
    while end > 0:  # from the end: a line is short, and a file may be long
        start = max(0, end - LONGEST_LINE)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def encode_json(value: Any) -> bytes:
    """Return a value as indented JSON, for files that people read too."""
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
