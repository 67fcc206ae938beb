"""Download data sets: fetch to a temporary folder, verify, unpack, and then move to the data folder.

A download that breaks off leaves what has arrived in a folder `.NAME-FOLDER.part`, from which the next one continues.
The next download into the same data folder removes such a folder if nobody has continued it for a week.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pomona.errors import PomonaError, require, unknown_name_error
from pomona.untrusted import describe

from .sources import SOURCES, DataRoot, Download, data_folders

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, total bytes if known

MAX_MEMBERS = 1_000_000  # of an archive; the largest published one has 100 000
MAX_UNPACKED = 10 << 30  # bytes of its files
TIMEOUT = 60  # seconds without an answer from the server
COPY_BLOCK = 1 << 20  # bytes read at a time
MAX_ATTEMPTS = 20  # connections for one file; one that brings nothing is the last
STALE_SECONDS = 7 * 24 * 3600  # after which a download that broke off is removed

NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError)


class BrokenOff(ConnectionError):
    """Raised where a server closes the connection before it has sent the whole file."""


def download(name: str, root: DataRoot = None, *, folder: str | None = None, progress: Progress | None = None) -> Path:
    """Download a data set into the first data folder and return its folder.

    `folder` selects one of several published layouts (`cifar-10-batches-py`). An existing folder is returned
    unchanged. Where the network fails, what has arrived is kept for the next attempt; any other failure leaves no
    files. Raises PomonaError if the data set cannot be downloaded or written.
    """
    source = SOURCES[name]
    if not source.downloads:
        raise PomonaError(f"data set '{name}' has no download: {source.how_to_get()}.")
    folder = folder or next(iter(source.downloads))
    if folder not in source.downloads:
        raise unknown_name_error(f"layout of '{name}'", folder, source.downloads)
    base = data_folders(root)[0]
    target = base / folder
    if target.exists():
        return target
    part = base / f".{name}-{folder}.part"
    try:
        base.mkdir(parents=True, exist_ok=True)
        with _locked(base), _removed_unless_resumable(part):
            _remove_stale_parts(base)
            if target.exists():  # another process has finished first
                return target
            for item in source.downloads[folder]:
                _fetch(item, part / folder, progress)
            os.replace(part / folder, target)
    except OSError as error:
        raise PomonaError(
            f"'{name}' cannot be written to {base}: {error}; free disk space or give another folder."
        ) from error
    return target


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process downloads into a folder, and keep others waiting."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class _Resumable(PomonaError):
    """A failure of the network after which the next download can continue."""


@contextmanager
def _removed_unless_resumable(part: Path) -> Iterator[None]:
    """Remove the folder of a download at its end, unless it was broken off and can be continued."""
    keep = False
    try:
        yield
    except (_Resumable, KeyboardInterrupt):
        keep = any(path.stat().st_size for path in part.rglob("*") if path.is_file())
        raise
    finally:
        if not keep:
            shutil.rmtree(part, ignore_errors=True)


def _remove_stale_parts(base: Path) -> None:
    """Remove downloads that broke off long ago, of this and of earlier versions."""
    for part in [path for name in SOURCES for path in base.glob(f".{name}-*.part")]:
        changed = max(path.stat().st_mtime for path in (part, *part.rglob("*")))
        if time.time() - changed > STALE_SECONDS:
            shutil.rmtree(part, ignore_errors=True)


def _fetch(item: Download, folder: Path, progress: Progress | None) -> None:
    """Download one file into `folder` and verify its checksum; an archive is unpacked and replaces `folder`.

    What an earlier download has left is continued. If the whole then has another checksum, it is fetched once more.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / item.name
    algorithm, _, expected = item.checksum.partition(":")
    resumed = path.is_file()
    if not resumed or _checksum(path, algorithm) != expected:
        _fetch_whole(item, path, progress)
        if resumed and _checksum(path, algorithm) != expected:
            path.unlink()
            _fetch_whole(item, path, progress)
    found = _checksum(path, algorithm)
    if found != expected:
        raise PomonaError(
            f"{item.url} has {algorithm} {found}, expected {expected}: the file was discarded; try again, "
            f"or put '{folder.name}' into a data folder yourself."
        )
    if ".tar" in item.name:
        _unpack(path, folder)


def _fetch_whole(item: Download, path: Path, progress: Progress | None) -> None:
    """Download one file, with a new connection for the rest where one breaks off after it has brought something."""
    for attempt in range(1, MAX_ATTEMPTS + 1):
        before = path.stat().st_size if path.exists() else 0
        try:
            _append(item, path, before, progress)
            return
        except NETWORK_ERRORS as error:
            has_status = isinstance(error, urllib.error.HTTPError)
            arrived = path.stat().st_size if path.exists() else 0
            if not has_status and arrived > before and attempt < MAX_ATTEMPTS:
                continue
            reason = error if has_status else getattr(error, "reason", error)
            kept = f"; the {arrived:,} bytes that have arrived are kept" if arrived else ""
            raise _Resumable(
                f"{item.url} cannot be fetched ({reason}): check the network and try again{kept}, or put "
                f"'{path.parent.name}' into a data folder yourself."
            ) from error


def _append(item: Download, path: Path, start: int, progress: Progress | None) -> None:
    """Ask for a file from byte `start` on, and write it from there, or from byte 0 where the server sends the whole."""
    request = urllib.request.Request(item.url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        reply = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not start:
            raise
        error.close()
        path.unlink()  # it is not the beginning of this file
        _append(item, path, 0, progress)
        return
    with reply:
        done = start if reply.status == http.HTTPStatus.PARTIAL_CONTENT else 0
        length = reply.headers.get("Content-Length", "")
        total = done + int(length) if length.isdecimal() else None
        _require_size(item, total or 0)
        with open(path, "r+b" if done else "wb") as file:
            file.seek(done)
            while block := reply.read(COPY_BLOCK):
                done += len(block)
                _require_size(item, done)
                file.write(block)
                if progress is not None:
                    progress(item.name, done, total)
    if total is not None and done < total:
        raise BrokenOff(f"the connection ended after {done:,} of {total:,} bytes")


def _require_size(item: Download, size: int) -> None:
    """Raise PomonaError where a file is larger than any that is published under its address."""
    require(
        size <= item.max_bytes,
        f"{item.url} has more than {item.max_bytes:,} bytes, which '{item.name}' cannot have: the file was discarded; "
        "check the network, or put the data set into a data folder yourself.",
    )


def _checksum(path: Path, algorithm: str) -> str:
    """Return the checksum of a file in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def require_plausible_members(archive: Path, tar: tarfile.TarFile) -> None:
    """Raise PomonaError for an archive with more files, or more bytes in them, than a published data set has."""
    count = size = 0
    for member in tar:
        count, size = count + 1, size + member.size
        fits = count <= MAX_MEMBERS and size <= MAX_UNPACKED
        require(fits, f"{archive.name} holds more than {MAX_MEMBERS:,} files or {MAX_UNPACKED:,} bytes: it is refused.")


def _unpack(archive: Path, folder: Path) -> None:
    """Replace `folder` by the folder of the same name in the archive; raise PomonaError if there is none."""
    scratch = folder.with_name("unpacked")
    shutil.rmtree(scratch, ignore_errors=True)  # what an unpacking that was killed has left
    try:
        with tarfile.open(archive) as tar:
            require_plausible_members(archive, tar)
            tar.extractall(scratch, filter="data")  # refuses links and names outside the target folder
    except PomonaError:
        raise
    except Exception as error:  # a hostile file can make anything fail, and must do no more than that
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk
        raise PomonaError(f"{archive.name} cannot be unpacked ({describe(error)}): try again.") from error
    if not (scratch / folder.name).is_dir():
        raise PomonaError(
            f"{archive.name} holds no folder '{folder.name}': the publisher changed the archive; put the files into a "
            "data folder yourself."
        )
    shutil.rmtree(folder)
    os.replace(scratch / folder.name, folder)
