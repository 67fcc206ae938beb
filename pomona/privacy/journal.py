"""A journal: a file of JSON lines that is only appended to, durably, and in which changes are noticed.

Each line ends with a checksum of itself and of the checksum before it, so an edited, removed or inserted line breaks
the chain. A second file, `.head`, has the number of lines and the last checksum, so lines that are missing at the end
are noticed too. This guards against accidents and old copies. Whoever can write both files can make up new ones.

Several processes may append to one journal: each append locks the file and first reads what others have added. A line
that a kill cut off was never confirmed; the next append removes it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import PomonaError, require

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

Entry = dict[str, Any]
START = "0" * 32  # the checksum before the first line
CHECKSUM_KEY = "check"


class Journal:
    """The entries of a journal, read from its file; `receive` gets each entry once, in order, with its checksum."""

    def __init__(self, path: Path | str, receive: Callable[[Entry, str], None]) -> None:
        self.path, self.receive = Path(path), receive
        self.head_path = self.path.with_suffix(".head")
        self.size, self.lines, self.checksum = 0, 0, START  # of what was read

    def read(self) -> None:
        """Receive the entries that were added since the last call; raise PomonaError if the file was changed."""
        try:
            with self.locked_file("rb") as file:
                self.read_entries(file)
        except FileNotFoundError:
            count = self.read_head()
            require(count == 0, self.damage(f"it is missing and had {count} lines"))

    def append(self, make_entry: Callable[[], Entry | None]) -> None:
        """Receive what others have added, then append the entry that `make_entry` returns, unless that is None.

        The entry is on the disk when this returns. No other process can append in between.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.locked_file("a+b") as file:
                self.read_entries(file)
                entry = make_entry()
                if entry is None:
                    return
                is_new = self.size == 0
                line, checksum = format_line(entry, self.checksum)
                file.truncate(self.size)
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
                self.size, self.lines, self.checksum = self.size + len(line), self.lines + 1, checksum
                with open(self.head_path, "w", encoding="ascii", opener=open_for_owner) as head:
                    head.write(f"{self.lines} {checksum}\n")
            if is_new:
                sync_folder(self.path.parent)
        except OSError as error:
            raise PomonaError(
                f"the journal '{self.path}' cannot be written ({error.strerror or error}): nothing of this step was "
                "released; free some space or give another folder, and resume."
            ) from error
        self.receive(entry, checksum)

    @contextmanager
    def locked_file(self, mode: str) -> Iterator[BinaryIO]:
        """Open the file and hold its lock: shared for reading, exclusive for appending."""
        with open(self.path, mode, opener=open_for_owner) as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_SH if mode == "rb" else fcntl.LOCK_EX)
            yield file  # type: ignore[misc]  # closing it releases the lock

    def read_entries(self, file: BinaryIO) -> None:
        """Receive the whole lines after those that were read; raise PomonaError unless they continue the chain."""
        file.seek(0, os.SEEK_END)
        require(file.tell() >= self.size, self.damage(f"it has lost lines after line {self.lines}"))
        file.seek(self.size)
        *lines, _ = file.read().split(b"\n")  # the last part was cut off, or is empty
        for line in lines:
            entry = parse_line(line, self.checksum)
            require(entry is not None, self.damage(f"line {self.lines + 1} does not match its checksum"))
            assert entry is not None
            self.checksum = entry.pop(CHECKSUM_KEY)
            self.size, self.lines = self.size + len(line) + 1, self.lines + 1
            self.receive(entry, self.checksum)
        count = self.read_head()
        require(count <= self.lines, self.damage(f"it has {self.lines} of {count} lines"))

    def read_head(self) -> int:
        """Return the number of lines in the `.head` file; 0 where it cannot be read."""
        try:
            return int(self.head_path.read_text(encoding="ascii").split()[0])
        except (OSError, ValueError, IndexError):
            return 0

    def damage(self, what: str) -> str:
        """Return the message about a journal that was changed."""
        return f"the journal '{self.path}' was changed ({what}): restore it from a copy: nothing else knows the rest."


def format_line(entry: Entry, previous: str) -> tuple[bytes, str]:
    """Return the line of an entry, and the checksum in it."""
    checksum = chain_checksum(entry, previous)
    return json.dumps(entry | {CHECKSUM_KEY: checksum}, ensure_ascii=False).encode() + b"\n", checksum


def parse_line(line: bytes, previous: str) -> Entry | None:
    """Return the entry of a line with its checksum, or None if the line does not follow the checksum before it."""
    try:
        entry = json.loads(line)
        found = entry.pop(CHECKSUM_KEY)
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    return entry | {CHECKSUM_KEY: found} if found == chain_checksum(entry, previous) else None


def chain_checksum(entry: Entry, previous: str) -> str:
    """Return the checksum of an entry that follows a checksum."""
    text = json.dumps(entry, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(previous.encode() + text.encode()).hexdigest()[: len(START)]


def open_for_owner(path: str, flags: int) -> int:
    """Open a file that only its owner can read if it is new: who knows all other rows learns a row from its digests."""
    return os.open(path, flags, 0o600)


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to the disk, so that a new file survives a power cut."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
