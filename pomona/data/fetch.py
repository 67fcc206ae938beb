"""Download data sets: fetch to a temporary folder, verify, unpack, and then move to the data folder."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from pomona.errors import PomonaError, require, unknown_name_error
from pomona.untrusted import describe

from .sources import SOURCES, DataRoot, Download, data_folders

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, total bytes if known

MAX_MEMBERS = 1_000_000  # of an archive; the largest published one has 100 000
MAX_UNPACKED = 10 << 30  # bytes of its files
TIMEOUT = 60  # seconds without an answer from the server
COPY_BLOCK = 1 << 20  # bytes read at a time


def download(name: str, root: DataRoot = None, *, folder: str | None = None, progress: Progress | None = None) -> Path:
    """Download a data set into the first data folder and return its folder.

    `folder` selects one of several published layouts (`cifar-10-batches-py`). An existing folder is returned
    unchanged, and a failed download leaves no files. Raises PomonaError if the data set cannot be downloaded or
    written.
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
    try:
        base.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=base, prefix=f".{name}-", suffix=".part") as scratch:
            part = Path(scratch)
            for item in source.downloads[folder]:
                _fetch(item, part / folder, progress)
            if not target.exists():  # another process may have finished first
                os.replace(part / folder, target)
    except OSError as error:
        raise PomonaError(
            f"'{name}' cannot be written to {base}: {error}; free disk space or give another folder."
        ) from error
    return target


def _fetch(item: Download, folder: Path, progress: Progress | None) -> None:
    """Download one file into `folder` and verify its checksum; an archive is unpacked and replaces `folder`."""
    folder.mkdir(exist_ok=True)
    path = folder / item.name
    algorithm, _, expected = item.checksum.partition(":")
    digest = hashlib.new(algorithm, usedforsecurity=False)
    try:
        with urllib.request.urlopen(item.url, timeout=TIMEOUT) as reply:
            _copy(reply, path, digest, lambda done: progress and progress(item.name, done, _content_length(reply)))
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        has_status = isinstance(error, urllib.error.HTTPError)
        reason = error if has_status else getattr(error, "reason", error)
        raise PomonaError(
            f"{item.url} cannot be fetched ({reason}): check the network and try again, or put "
            f"'{folder.name}' into a data folder yourself."
        ) from error
    if digest.hexdigest() != expected:
        raise PomonaError(
            f"{item.url} has {algorithm} {digest.hexdigest()}, expected {expected}: the file was discarded; try again, "
            f"or put '{folder.name}' into a data folder yourself."
        )
    if ".tar" in item.name:
        _unpack(path, folder)


def _copy(reply: http.client.HTTPResponse, path: Path, digest: hashlib._Hash, report: Callable[[int], object]) -> None:
    """Write the reply to a file, update the digest, and report the number of bytes after each block."""
    done = 0
    with open(path, "wb") as file:
        while block := reply.read(COPY_BLOCK):
            file.write(block)
            digest.update(block)
            done += len(block)
            report(done)


def _content_length(reply: http.client.HTTPResponse) -> int | None:
    """Return the number of bytes that the server announced, or None."""
    length = reply.headers.get("Content-Length")
    return int(length) if length else None


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
    try:
        with tarfile.open(archive) as tar:
            require_plausible_members(archive, tar)
            tar.extractall(scratch, filter="data")  # refuses links and names outside the target folder
    except PomonaError:
        raise
    except Exception as error:  # a hostile file can make anything fail, and must do no more than that
        raise PomonaError(f"{archive.name} cannot be unpacked ({describe(error)}): try again.") from error
    if not (scratch / folder.name).is_dir():
        raise PomonaError(
            f"{archive.name} holds no folder '{folder.name}': the publisher changed the archive; put the files into a "
            "data folder yourself."
        )
    shutil.rmtree(folder)
    os.replace(scratch / folder.name, folder)
