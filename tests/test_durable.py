"""Files that appear complete or not at all: what is flushed before a rename, and what several writers leave."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import pomona as pm
from pomona.durable import rename_files, replace_file, write_file
from pomona.errors import PomonaError
from pomona.export.files import partial_file
from pomona.methods._round_store import RoundStore
from pomona.sparse import ticket


def save_ticket(folder: Path) -> None:
    """Write the ticket of a small network."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    pruner = pm.EdgePopup(0.5)
    pruner.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=2)
    ticket.save(folder / "file", pruner)


def export_bytes(folder: Path) -> None:
    """Write a file as the writers of exported formats do."""
    with partial_file(folder / "file") as part:
        part.write_bytes(b"x")


WRITERS: dict[str, Callable[[Path], object]] = {
    "file": lambda folder: replace_file(folder / "file", b"x"),
    "pm.save": lambda folder: pm.save(nn.Linear(2, 2), folder / "file"),
    "ticket": save_ticket,
    "tensors of a round": lambda folder: RoundStore(folder, {}).write_tensors("file", {"a": torch.ones(2)}),
    "exported file": export_bytes,
    "results of rounds": lambda folder: RoundStore(folder, {}).write_results([{"round": 0}]),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    events, sync, rename = [], os.fsync, Path.replace

    def record_sync(handle: int) -> None:
        events.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        sync(handle)

    def record_rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "replace", record_rename)
    WRITERS[writer](tmp_path)
    assert events == ["file", "rename", "folder"]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("writer", WRITERS)
def test_a_disk_that_fails_is_one_sentence_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    WRITERS[writer](tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"old")

    def fail(handle: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(PomonaError, match=r"cannot be written: No space left on device; give a path in a folder"):
        WRITERS[writer](tmp_path)
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_bytes() == b"old"


def test_files_that_belong_together_are_all_on_the_disk_before_the_first_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {tmp_path / name: tmp_path / "out" / name for name in ("weights", "network")}
    (tmp_path / "out").mkdir()
    for part in parts:
        part.write_text(part.name)
    events, sync, rename = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("sync"), sync(handle)))
    monkeypatch.setattr(Path, "replace", lambda self, target: (events.append(self.name), rename(self, target)))
    rename_files(parts)
    assert events == ["sync", "sync", "weights", "network", "sync"]  # the last is the folder
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {
        "weights": "weights",
        "network": "network",
    }


def test_several_writers_of_one_file_leave_it_whole(tmp_path: Path) -> None:
    workers = []
    for number in range(4):
        worker = os.fork()
        if not worker:
            for _ in range(50):
                replace_file(tmp_path / "file", b"%d" % number * 100_000)
            os._exit(0)
        workers.append(worker)
    for worker in workers:
        assert os.waitpid(worker, 0)[1] == 0
    data = (tmp_path / "file").read_bytes()
    assert data == data[:1] * 100_000
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_a_pipe_in_the_place_of_a_new_file_is_not_written_to(tmp_path: Path, kind: str) -> None:
    other, file = tmp_path / "other", tmp_path / "file.part"
    other.write_bytes(b"kept")
    os.mkfifo(file) if kind == "pipe" else file.symlink_to(other)
    write_file(file, b"new", secret=True)
    assert not file.is_symlink()
    assert file.read_bytes() == b"new"
    assert file.stat().st_mode & 0o777 == 0o600
    assert other.read_bytes() == b"kept"
