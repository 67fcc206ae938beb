"""Files that appear complete or not at all, and are still there after a power cut."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from .errors import PomonaError


def replace_file(path: Path | str, data: bytes) -> None:
    """Write a file completely or not at all; raise PomonaError if it cannot be written.

    Of several processes that write the same file at the same time, the last one to come is kept whole.
    """
    path = Path(path)
    part = path.with_name(f".pomona-{secrets.token_hex(8)}.part")  # one of its own for each writer
    try:
        write_file(part, data)
        part.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        advice = "give a path in a folder that is there, can be written and has space"
        raise PomonaError(f"'{path}' cannot be written: {error.strerror or error}; {advice}.") from error
    finally:
        with suppress(OSError):  # it was renamed, or is in a folder that cannot be written
            part.unlink(missing_ok=True)


def write_file(path: Path, data: bytes, *, secret: bool = False) -> None:
    """Write a new file in place of what has its name and flush it to the disk; only its owner can read a secret one.

    A link or a pipe of that name is removed, and not written to.
    """
    if os.path.lexists(path):
        path.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags, 0o600 if secret else 0o666), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def rename_files(targets: Mapping[Path, Path]) -> None:
    """Give files their names, in order; they are flushed to the disk before, and their folders after."""
    for part in targets:
        sync_file(part)
    for part, path in targets.items():
        part.replace(path)
    for folder in dict.fromkeys(path.parent for path in targets.values()):
        sync_folder(folder)


def sync_file(path: Path) -> None:
    """Flush a file that was written and closed to the disk."""
    handle = os.open(path, os.O_RDWR)  # Windows flushes only what may be written
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to the disk, so that a rename survives a power cut."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
