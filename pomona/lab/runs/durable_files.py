"""Files of a run, which survive a kill, a power cut and a full disk, and errors that say how to go on with the run."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pomona.durable import sync_folder, write_file
from pomona.errors import PomonaError

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

__all__ = ["describe_write_error", "replace_file", "replace_shared_file", "sync_folder", "write_errors", "write_file"]


def replace_file(path: Path, data: bytes) -> None:
    """Write a file completely or not at all; raise PomonaError if the disk refuses."""
    part = path.with_name(f"{path.name}.part")
    try:
        write_file(part, data)
        part.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # a folder that cannot be written
            part.unlink(missing_ok=True)
        raise describe_write_error(error, path) from error


def replace_shared_file(path: Path, data: bytes) -> None:
    """Write a file that other processes may write at the same time; the last one to come is kept whole."""
    with write_errors(path):
        handle = os.open(path.parent, os.O_RDONLY)
    try:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX)
        replace_file(path, data)
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
