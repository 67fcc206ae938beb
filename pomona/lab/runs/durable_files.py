"""Files that survive a kill, a power cut and a full disk, and errors that say what went wrong."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pomona.errors import PomonaError


def write_file(path: Path, data: bytes) -> None:
    """Write a file and flush it to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file completely or not at all; raise PomonaError if the disk refuses."""
    _replace(path, data, path.with_name(f"{path.name}.part"))


def replace_shared_file(path: Path, data: bytes) -> None:
    """Write a file like `replace_file` where several processes may write it at once: the last one's file stays."""
    _replace(path, data, path.with_name(f"{path.name}.{os.getpid()}.part"))


def _replace(path: Path, data: bytes, part: Path) -> None:
    try:
        write_file(part, data)
        part.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # a folder that cannot be written
            part.unlink(missing_ok=True)
        raise describe_write_error(error, path) from error


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to the disk, so that a rename survives a power cut."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Raise an OSError of the block as a PomonaError that names the path."""
    try:
        yield
    except OSError as error:
        raise describe_write_error(error, path) from error


def describe_write_error(error: OSError, path: Path) -> PomonaError:
    """Return the PomonaError that says why a path could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PomonaError(
            f"the disk is full: '{path}' could not be written. The last good checkpoint is untouched: "
            "free some space and continue with --resume."
        )
    return PomonaError(
        f"'{path}' cannot be written: {error.strerror or error}. The last good checkpoint is untouched: "
        "make the folder writable and continue with --resume."
    )
