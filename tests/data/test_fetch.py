"""Downloads, from a server on this machine."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import http.server
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

import pytest

from pomona.data import download, load
from pomona.data.sources import SOURCES, Download
from pomona.errors import PomonaError

TEXT = b"to be or not to be " * 200


class SilentHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class BreakingHandler(SilentHandler):
    """A handler that sends ranges, and breaks off after `sent_bytes` bytes as long as `breaks` is not 0."""

    sent_bytes = 1000
    breaks = 0
    knows_ranges = True
    announced: int | None = None  # the length in the header, if it is not the true one
    asked: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        kind = type(self)
        raw, asked = Path(self.translate_path(self.path)).read_bytes(), self.headers["Range"]
        kind.asked.append(asked)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.knows_ranges else 0
        if start and start >= len(raw):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        length = len(raw) - start if self.announced is None else self.announced
        if length >= 0:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if kind.breaks:
            kind.breaks -= 1
            raw = raw[: start + self.sent_bytes]
        with suppress(ConnectionError):  # the client has left
            self.wfile.write(raw[start:])


@contextmanager
def serve(folder: Path, handler: type[SilentHandler]) -> Iterator[str]:
    """Serve a folder, and yield its URL."""
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(folder))
    ) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """Yield a folder and the URL at which it is served."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serve(folder, SilentHandler) as url:
        yield folder, url


@pytest.fixture
def breaking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[BreakingHandler]]:
    """Publish the text on a server that breaks off, and yield a copy of the handler whose fields decide when."""

    class Handler(BreakingHandler):
        asked: ClassVar[list[str | None]] = []

    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "input.txt").write_bytes(TEXT)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serve(folder, Handler) as url:
        publish(monkeypatch, f"{url}/input.txt", TEXT)
        yield Handler


def publish(monkeypatch: pytest.MonkeyPatch, url: str, raw: bytes, checksum: str = "") -> None:
    """Make `shakespeare` download from this URL."""
    item = Download(url, checksum or f"sha256:{hashlib.sha256(raw).hexdigest()}")
    monkeypatch.setattr(SOURCES["shakespeare"], "downloads", {"tinyshakespeare": (item,)})


def write_archive(path: Path, members: dict[str, bytes]) -> bytes:
    with tarfile.open(path, "w:gz") as tar:
        for name, raw in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return path.read_bytes()


def test_a_plain_file_is_downloaded_verified_and_read(server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, url = server
    (folder / "input.txt").write_bytes(TEXT)
    publish(monkeypatch, f"{url}/input.txt", TEXT)
    reported: list[tuple] = []
    got = download("shakespeare", tmp_path / "data", progress=lambda *args: reported.append(args))
    assert got == tmp_path / "data" / "tinyshakespeare"
    assert os.listdir(tmp_path / "data") == ["tinyshakespeare"]
    assert reported[-1] == ("input.txt", len(TEXT), len(TEXT))
    assert load("shakespeare", root=tmp_path / "data", length=8).vocab == len(set(TEXT))
    (folder / "input.txt").unlink()
    assert download("shakespeare", tmp_path / "data") == got  # there already


def test_an_archive_is_unpacked(server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, url = server
    raw = write_archive(folder / "plays.tar.gz", {"tinyshakespeare/input.txt": TEXT})
    publish(monkeypatch, f"{url}/plays.tar.gz", raw, f"md5:{hashlib.md5(raw).hexdigest()}")
    monkeypatch.setenv("POMONA_DATA", str(tmp_path / "env"))
    assert download("shakespeare") == tmp_path / "env" / "tinyshakespeare"
    assert os.listdir(tmp_path / "env" / "tinyshakespeare") == ["input.txt"]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"../escaped.txt": TEXT}, "cannot be unpacked"),
        ({"elsewhere/input.txt": TEXT}, "holds no folder 'tinyshakespeare'"),
    ],
)
def test_a_bad_archive_leaves_no_files(server, tmp_path: Path, monkeypatch, members: dict, message: str):
    folder, url = server
    publish(monkeypatch, f"{url}/plays.tar.gz", write_archive(folder / "plays.tar.gz", members))
    with pytest.raises(PomonaError, match=message):
        download("shakespeare", tmp_path / "data")
    assert os.listdir(tmp_path / "data") == []
    assert not list(tmp_path.rglob("escaped.txt"))


def test_a_wrong_checksum_leaves_no_files(server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, url = server
    (folder / "input.txt").write_bytes(TEXT[:-1])
    publish(monkeypatch, f"{url}/input.txt", TEXT)
    with pytest.raises(PomonaError) as error:
        download("shakespeare", tmp_path / "data")
    assert hashlib.sha256(TEXT).hexdigest() in str(error.value)
    assert hashlib.sha256(TEXT[:-1]).hexdigest() in str(error.value)
    assert os.listdir(tmp_path / "data") == []


def test_a_network_failure_raises_one_error(server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _, url = server
    publish(monkeypatch, f"{url}/missing.txt", TEXT)
    with pytest.raises(
        PomonaError, match=r"missing.txt cannot be fetched \(HTTP Error 404.*\): check the network and try again"
    ):
        download("shakespeare", tmp_path / "data")
    publish(monkeypatch, "http://127.0.0.1:1/input.txt", TEXT)  # nobody listens there
    with pytest.raises(PomonaError, match=r"cannot be fetched .*refused"):
        download("shakespeare", tmp_path / "data")
    assert os.listdir(tmp_path / "data") == []


def test_a_full_disk_raises_one_error(server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, url = server
    (folder / "input.txt").write_bytes(TEXT)
    publish(monkeypatch, f"{url}/input.txt", TEXT)

    def raise_disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pomona.data.fetch._append", raise_disk_full)
    with pytest.raises(PomonaError, match="'shakespeare' cannot be written to .*No space left on device"):
        download("shakespeare", tmp_path / "data")
    assert os.listdir(tmp_path / "data") == []


def test_a_connection_that_breaks_off_is_continued(breaking, tmp_path: Path):
    breaking.breaks = 2
    reported: list[tuple] = []
    got = download("shakespeare", tmp_path / "data", progress=lambda *args: reported.append(args))
    assert (got / "input.txt").read_bytes() == TEXT
    assert breaking.asked == [None, "bytes=1000-", "bytes=2000-"]
    assert reported[-1] == ("input.txt", len(TEXT), len(TEXT))
    assert os.listdir(tmp_path / "data") == ["tinyshakespeare"]


def test_a_server_without_ranges_sends_the_whole_file_again(breaking, tmp_path: Path):
    breaking.breaks, breaking.knows_ranges = 1, False
    assert (download("shakespeare", tmp_path / "data") / "input.txt").read_bytes() == TEXT
    assert breaking.asked == [None, "bytes=1000-"]


def broken_part(handler: type[BreakingHandler], data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Break a download off for good after 1,000 bytes and return the folder that it leaves."""
    handler.breaks = 1
    with monkeypatch.context() as patched:
        patched.setattr("pomona.data.fetch.MAX_ATTEMPTS", 1)
        message = r"connection ended after 1,000 of 3,800 bytes.*the 1,000 bytes that have arrived are kept"
        with pytest.raises(PomonaError, match=message):
            download("shakespeare", data)
    (part,) = data.iterdir()
    assert part.name == ".shakespeare-tinyshakespeare.part"
    return part


def test_the_next_download_continues_one_that_broke_off(breaking, tmp_path: Path, monkeypatch):
    broken_part(breaking, tmp_path / "data", monkeypatch)
    assert (download("shakespeare", tmp_path / "data") / "input.txt").read_bytes() == TEXT
    assert breaking.asked == [None, "bytes=1000-"]
    assert os.listdir(tmp_path / "data") == ["tinyshakespeare"]


@pytest.mark.parametrize("found", [b"x" * 1000, TEXT + b"more"])
def test_what_is_no_part_of_the_file_is_fetched_again(breaking, tmp_path: Path, monkeypatch, found: bytes):
    part = broken_part(breaking, tmp_path / "data", monkeypatch)
    (part / "tinyshakespeare" / "input.txt").write_bytes(found)
    assert (download("shakespeare", tmp_path / "data") / "input.txt").read_bytes() == TEXT
    assert breaking.asked == [None, f"bytes={len(found)}-", None]


def test_a_part_that_nobody_continues_is_removed_by_a_later_download(breaking, tmp_path: Path, monkeypatch):
    part = broken_part(breaking, tmp_path / "data", monkeypatch)
    fresh = tmp_path / "data" / ".cifar10-fresh.part"  # as a download of another data set leaves it
    fresh.mkdir()
    part = part.rename(part.with_name(".mnist-old.part"))
    for path in (*part.rglob("*"), part):
        os.utime(path, (0, 0))
    download("shakespeare", tmp_path / "data")
    assert sorted(os.listdir(tmp_path / "data")) == [".cifar10-fresh.part", "tinyshakespeare"]


@pytest.mark.parametrize("announced", [None, 10**15, -1])
def test_a_file_that_is_too_large_is_refused(breaking, tmp_path: Path, monkeypatch, announced: int | None):
    breaking.announced = announced
    (item,) = SOURCES["shakespeare"].downloads["tinyshakespeare"]
    limited = dataclasses.replace(item, max_bytes=2000)
    monkeypatch.setattr(SOURCES["shakespeare"], "downloads", {"tinyshakespeare": (limited,)})
    monkeypatch.setattr("pomona.data.fetch.COPY_BLOCK", 100)
    with pytest.raises(PomonaError, match="input.txt has more than 2,000 bytes, which 'input.txt' cannot have"):
        download("shakespeare", tmp_path / "data")
    assert os.listdir(tmp_path / "data") == []


def test_two_downloads_at_once_fetch_the_files_once(breaking, tmp_path: Path):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        got = list(pool.map(lambda _: download("shakespeare", tmp_path / "data"), range(4)))
    assert set(got) == {tmp_path / "data" / "tinyshakespeare"}
    assert breaking.asked == [None]


def test_data_sets_without_a_download_give_instructions(tmp_path: Path):
    with pytest.raises(PomonaError, match="'imagefolder' has no download: put images into"):
        download("imagefolder", tmp_path)
    with pytest.raises(PomonaError, match="unknown layout of 'cifar10' 'cifar-10-batches'"):
        download("cifar10", tmp_path, folder="cifar-10-batches")


def test_published_checksums_have_the_right_length():
    lengths = {"md5": 32, "sha256": 64}
    for name in SOURCES:
        source = SOURCES[name]
        assert set(source.downloads) <= set(source.folders)
        for item in (i for items in source.downloads.values() for i in items):
            kind, _, digest = item.checksum.partition(":")
            assert len(digest) == lengths[kind]
            int(digest, 16)
