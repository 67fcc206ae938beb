"""Downloads, from a server on this machine."""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pomona.data import download, load
from pomona.data.sources import SOURCES, Download
from pomona.errors import PomonaError

TEXT = b"to be or not to be " * 200


class SilentHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """Yield a folder and the URL at which it is served."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    handler = functools.partial(SilentHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield folder, f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


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

    monkeypatch.setattr("pomona.data.fetch._copy", raise_disk_full)
    with pytest.raises(PomonaError, match="'shakespeare' cannot be written to .*No space left on device"):
        download("shakespeare", tmp_path / "data")
    assert os.listdir(tmp_path / "data") == []


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
