"""`pomona shrink`: a run's filters taken out for good."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from pomona import PomonaError, lab
from pomona.lab.runs import shrink

RECIPE = {
    "name": "filters",
    "data": "digits",
    "model": "digits_cnn",
    "method": {"name": "oneshot", "pattern": "filter", "sparsity": 0.5, "at": 0.5},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "train": {"epochs": 1, "batch_size": 64, "device": "cpu"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "filters"
    lab.train(lab.Recipe.load(RECIPE), folder)
    return folder


def test_the_exported_program_computes_the_same_as_the_run(run: Path) -> None:
    pytest.importorskip("torch_pruning")
    shrunk, file = shrink.shrink_run(run)
    assert shrunk.params.after < shrunk.params.before
    model, shape = shrink.load_finished_model(run)
    program = torch.export.load(file).module()
    for size in (1, 5):
        x = torch.randn(size, *shape)
        assert torch.allclose(program(x), model(x), atol=1e-5)
    assert [path.name for path in run.iterdir() if "partial" in path.name] == []


def test_the_file_is_on_the_disk_before_it_has_its_name_and_no_part_is_left(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch_pruning")
    events, sync, rename = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("sync"), sync(handle)))
    monkeypatch.setattr(Path, "replace", lambda self, target: (events.append("rename"), rename(self, target)))
    file = tmp_path / "small.pt2"
    shrink.shrink_run(run, file)
    assert events[-3:] == ["sync", "rename", "sync"]
    file.write_bytes(b"old")

    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(PomonaError, match="the disk is full"):
        shrink.shrink_run(run, file)
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_bytes() == b"old"


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PomonaError, match="is not a finished run: it has no model.safetensors"):
        shrink.shrink_run(tmp_path)


def test_a_run_without_whole_filters_is_refused_and_nothing_written(tmp_path: Path) -> None:
    pytest.importorskip("torch_pruning")
    method = {"name": "oneshot", "sparsity": 0.5, "at": 0.5}
    lab.train(lab.Recipe.load({**RECIPE, "method": method}), tmp_path / "run")
    with pytest.raises(PomonaError, match="no whole channel is zero"):
        shrink.shrink_run(tmp_path / "run")
    assert not (tmp_path / "run" / shrink.SHRUNK_FILE).exists()
