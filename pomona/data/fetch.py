"""Downloads: to a temporary place, checked, unpacked, and only then moved to where they are looked for."""

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

from pomona.errors import PomonaError, unknown_name_error

from .sources import SOURCES, Download, Root, roots

Progress = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all where known


def download(name: str, root: Root = None, *, folder: str | None = None, progress: Progress | None = None) -> Path:
    """Fetch a data set into the first data folder and return where it lies.

    `folder` picks one of several published layouts (`cifar-10-batches-py`). What is there already
    is left alone; a download that fails leaves nothing behind.
    """
    source = SOURCES[name]
    if not source.downloads:
        raise PomonaError(f"data set '{name}' has no download: {source.get()}.")
    folder = folder or next(iter(source.downloads))
    if folder not in source.downloads:
        raise unknown_name_error(f"layout of '{name}'", folder, source.downloads)
    base = roots(root)[0]
    target = base / folder
    if target.exists():
        return target
    try:
        base.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=base, prefix=f".{name}-", suffix=".part") as scratch:
            part = Path(scratch)
            for item in source.downloads[folder]:
                _fetch(item, part / folder, progress)
            if not target.exists():  # another process may have been quicker
                os.replace(part / folder, target)
    except OSError as error:
        raise PomonaError(
            f"'{name}' cannot be written to {base}: {error}; free some room or give another folder."
        ) from error
    return target


def _fetch(item: Download, folder: Path, progress: Progress | None) -> None:
    """Fetch one file into `folder`, or unpack it so that `folder` appears."""
    folder.mkdir(exist_ok=True)
    path = folder / item.name
    kind, _, wanted = item.checksum.partition(":")
    digest = hashlib.new(kind, usedforsecurity=False)
    try:
        with urllib.request.urlopen(item.url, timeout=60) as reply:
            _copy(reply, path, digest, lambda done: progress and progress(item.name, done, _length(reply)))
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        status = isinstance(error, urllib.error.HTTPError)
        reason = error if status else getattr(error, "reason", error)
        raise PomonaError(
            f"{item.url} cannot be fetched ({reason}): try again with a network, or put "
            f"'{folder.name}' into a data folder by hand."
        ) from error
    if digest.hexdigest() != wanted:
        raise PomonaError(
            f"{item.url} has {kind} {digest.hexdigest()}, expected {wanted}: nothing was kept; try again, "
            f"or put '{folder.name}' into a data folder by hand."
        )
    if ".tar" in item.name:
        _unpack(path, folder)


def _copy(reply: http.client.HTTPResponse, path: Path, digest: hashlib._Hash, tell: Callable[[int], object]) -> None:
    done = 0
    with open(path, "wb") as file:
        while block := reply.read(1 << 20):
            file.write(block)
            digest.update(block)
            done += len(block)
            tell(done)


def _length(reply: http.client.HTTPResponse) -> int | None:
    length = reply.headers.get("Content-Length")
    return int(length) if length else None


def _unpack(archive: Path, folder: Path) -> None:
    """Replace the archive by what it holds, which must be one folder of this folder's name."""
    scratch = folder.with_name("unpacked")
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(scratch, filter="data")  # refuses links and names that lead elsewhere
    except (tarfile.TarError, EOFError) as error:
        raise PomonaError(f"{archive.name} cannot be unpacked ({error}): try again.") from error
    if not (scratch / folder.name).is_dir():
        raise PomonaError(f"{archive.name} holds no folder '{folder.name}': its publisher changed it.")
    shutil.rmtree(folder)
    os.replace(scratch / folder.name, folder)
