"""Folders whose files were cut off, swapped or locked: a run goes on from what is good, and says what is missing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from run_helpers import StopAfter, digits_recipe, have_same_weights, untimed_metrics

from pomona.errors import PomonaError
from pomona.lab import Interrupted, train
from pomona.lab.recipes.private_recipe import PrivateRecipe
from pomona.lab.runs import checkpoint, durable_files
from pomona.lab.runs.folder import (
    MetricsWriter,
    count_whole_lines,
    find_cut_file,
    is_in_use,
    locked_folder,
    read_summary,
)
from pomona.lab.runs.private import PrivateStrategy
from pomona.lab.sweeps.job import Job
from pomona.lab.sweeps.run_store import read_folder
from pomona.privacy import Budget
from pomona.report.run_data import read_run


def cut(file: Path, share: float = 0.6) -> None:
    """Cut off the end of a file."""
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])


@pytest.fixture
def stopped_run(tmp_path, complete_run):
    """Return the folder of a run that was stopped after seven steps, with two checkpoints."""
    with pytest.raises(Interrupted):
        train(complete_run[1], tmp_path / "run", stop=StopAfter(7))
    return tmp_path / "run"


@pytest.fixture
def finished_run(tmp_path, complete_run):
    """Return a copy of the folder of a complete run."""
    shutil.copytree(complete_run[0], tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def finished_run_elsewhere(tmp_path, complete_run):
    """Return a copy of the folder of a complete run, beside that of a stopped one."""
    shutil.copytree(complete_run[0], tmp_path / "finished")
    return tmp_path / "finished"


@pytest.mark.parametrize("share", [None, 0.0, 0.6])
def test_a_recipe_that_was_cut_off_is_written_again(stopped_run, complete_run, share):
    recipe = stopped_run / "recipe.toml"
    recipe.unlink() if share is None else cut(recipe, share)
    with pytest.raises(PomonaError, match=r"started with other settings \(train.epochs: 4, not 3\)"):
        train(digits_recipe(epochs=4), stopped_run, resume=True)  # the checkpoint has the settings too
    assert "error" not in Job(complete_run[1], stopped_run).run()
    assert recipe.read_bytes() == (complete_run[0] / "recipe.toml").read_bytes()
    assert have_same_weights(stopped_run, complete_run[0])
    assert untimed_metrics(stopped_run) == untimed_metrics(complete_run[0])


@pytest.mark.parametrize("name", ["model.safetensors", "masks.safetensors", "metrics.jsonl", "recipe.toml"])
def test_a_cut_file_of_a_finished_run_is_written_again(finished_run, complete_run, name):
    assert find_cut_file(finished_run, complete_run[2]) is None
    cut(finished_run / name, 0.98)
    found = read_folder(finished_run)
    assert found is None or found.summary is None  # a sweep trains it too
    notes: list[str] = []
    train(complete_run[1], finished_run, resume=True, note=notes.append)
    assert have_same_weights(finished_run, complete_run[0])
    assert (finished_run / name).stat().st_size > 0.99 * (complete_run[0] / name).stat().st_size
    assert untimed_metrics(finished_run) == untimed_metrics(complete_run[0])
    assert find_cut_file(finished_run, complete_run[2]) is None
    assert notes == []


def test_the_best_epoch_is_unknown_where_lines_are_lost(stopped_run, complete_run):
    (stopped_run / "metrics.jsonl").write_bytes(b"")
    notes: list[str] = []
    summary = train(complete_run[1], stopped_run, resume=True, note=notes.append)
    assert "has lost" in notes[0]
    assert complete_run[2].keys() - summary.keys() == {"accuracy_best", "epoch_best"}
    assert summary["accuracy"] == complete_run[2]["accuracy"]


def test_a_line_of_zeros_in_the_metrics_does_not_stop_the_run(stopped_run, complete_run):
    metrics = stopped_run / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    lines[0] = b"\0" * (len(lines[0]) - 1) + b"\n"
    metrics.write_bytes(b"".join(lines))
    train(complete_run[1], stopped_run, resume=True)
    assert have_same_weights(stopped_run, complete_run[0])


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_metrics_that_are_no_regular_file_are_refused_without_waiting(
    stopped_run, finished_run_elsewhere, complete_run, kind
):
    for folder in (stopped_run, finished_run_elsewhere):
        metrics = folder / "metrics.jsonl"
        metrics.unlink()
        os.mkfifo(metrics) if kind == "pipe" else metrics.symlink_to("/dev/zero")
        with pytest.raises(PomonaError, match=f"is no regular file, but a {kind}: replace it with a copy"):
            train(complete_run[1], folder, resume=True)
    assert find_cut_file(finished_run_elsewhere, complete_run[2]) == "metrics.jsonl"
    assert read_run(finished_run_elsewhere).summary is None


def test_metrics_nested_deeply_are_dropped(stopped_run, finished_run_elsewhere, complete_run):
    deep = b"[" * 50_000 + b"\n"
    with (finished_run_elsewhere / "metrics.jsonl").open("ab") as file:
        file.write(deep)
    assert find_cut_file(finished_run_elsewhere, complete_run[2]) == "metrics.jsonl"
    metrics = stopped_run / "metrics.jsonl"
    metrics.write_bytes(deep + metrics.read_bytes())
    writer = MetricsWriter(stopped_run, metrics.stat().st_size)
    assert len(list(writer.read_rows())) == metrics.read_bytes().count(b"\n") - 1
    writer.close()
    notes: list[str] = []
    train(complete_run[1], stopped_run, resume=True, note=notes.append)
    assert "has lost" in notes[0]  # its first bytes are of a line that no run writes
    assert have_same_weights(stopped_run, complete_run[0])


@pytest.mark.parametrize("size", [2**40, 2**63 - 1, 2**70])
def test_a_checkpoint_that_counts_more_metrics_than_there_are_takes_no_memory(stopped_run, complete_run, size):
    checkpoint.save(stopped_run, checkpoint.load(stopped_run) | {"metrics": size})
    if size > 2**63:
        with pytest.raises(PomonaError, match="is damaged: it has metrics = 1180591620717411303424"):
            train(complete_run[1], stopped_run, resume=True)
        return
    notes: list[str] = []
    train(complete_run[1], stopped_run, resume=True, note=notes.append)
    assert "has lost" in notes[0]
    assert untimed_metrics(stopped_run)


def test_whole_lines_are_counted_from_the_end(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"a\n" + b"b" * 200_000 + b"\nc")
    with file.open("rb") as opened:
        counts = [count_whole_lines(opened, size) for size in (0, 1, 2, 3, 200_002, 200_003, 200_004, 2**70)]
    assert counts == [0, 0, 2, 2, 2, 200_003, 200_003, 200_003]


def test_a_summary_of_another_cell_is_not_believed(finished_run, complete_run):
    other = json.loads((finished_run / "summary.json").read_text()) | {"fingerprint": "0" * 12, "accuracy": 100.0}
    (finished_run / "summary.json").write_text(json.dumps(other))
    assert train(complete_run[1], finished_run, resume=True)["accuracy"] == complete_run[2]["accuracy"]
    assert read_summary(finished_run)["fingerprint"] == complete_run[1].fingerprint()
    older = json.loads((finished_run / "summary.json").read_text()) | {"fingerprint": "0" * 12, "versions": {}}
    (finished_run / "summary.json").write_text(json.dumps(older))  # another version may compute another fingerprint
    assert train(complete_run[1], finished_run, resume=True) == older


def private_recipe(**options) -> PrivateRecipe:
    """Return a private recipe of four steps with its budget."""
    budget = Budget(8.0, 1e-5, 1347, 400, 4, 0.0, 1.0, 0.0, ((4, 8.0),)).to_dict()
    training = {"epochs": 1, "batch_size": 400, "device": "cpu"}
    section = {"method": "dpsgd", "epsilon": 8.0, "budget": budget, "secure": False, **options}
    return PrivateRecipe.load({"data": "digits", "model": "mlp(hidden=[8])", "train": training, "private": section})


def test_a_private_checkpoint_is_not_continued_without_privacy(tmp_path):
    recipe, folder = private_recipe(), tmp_path / "run"
    train(PrivateStrategy(recipe), tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(PrivateStrategy(recipe), folder, stop=StopAfter(2))
    cut(folder / "recipe.toml")
    with pytest.raises(PomonaError, match="is of a private run.*resume it with `pomona private RECIPE --resume`"):
        train(recipe.recipe, folder, resume=True)
    with pytest.raises(PomonaError, match=r"another budget or method \(clip: 2.0, not 1.0\)"):
        train(PrivateStrategy(private_recipe(clip=2.0)), folder, resume=True)
    train(PrivateStrategy(recipe), folder, resume=True)
    assert have_same_weights(folder, tmp_path / "whole")
    assert PrivateRecipe.load(folder / "recipe.toml").private == recipe.private


def test_a_private_run_writes_its_recipe_once_and_first(tmp_path, monkeypatch):
    write, written = durable_files.write_file, []

    def record(path, data, **options):
        written.append((path.name, data))
        write(path, data, **options)

    monkeypatch.setattr(durable_files, "write_file", record)
    with pytest.raises(Interrupted):
        train(PrivateStrategy(private_recipe()), tmp_path / "run", stop=StopAfter(1))
    with pytest.raises(Interrupted):
        train(PrivateStrategy(private_recipe()), tmp_path / "run", resume=True, stop=StopAfter(1))
    assert [name.startswith("recipe.toml") for name, _ in written] == [True] + [False] * (len(written) - 1)
    (tmp_path / "copy.toml").write_bytes(written[0][1])
    assert PrivateRecipe.load(tmp_path / "copy.toml").private.budget is not None


def test_a_fork_does_not_keep_the_folder_of_a_killed_run(tmp_path):
    reader, writer = os.pipe()
    holder = os.fork()
    if not holder:
        with locked_folder(tmp_path):
            if worker := os.fork():  # which has closed the lock when it goes on
                signal.pause()
            os.write(writer, str(os.getpid()).encode())
            signal.pause()
    worker = int(os.read(reader, 20))
    assert is_in_use(tmp_path)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    try:
        assert not is_in_use(tmp_path)
    finally:
        os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("failing", ["mkdir", "rename", "fsync"])
def test_an_error_of_the_disk_is_one_sentence_and_loses_nothing(tmp_path, monkeypatch, failing):
    checkpoint.save(tmp_path, {"step": 1})
    original = getattr(os, failing)

    def fail(path, *args, **options):
        if failing == "fsync" or checkpoint.PART_FOLDER in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, fail)
        with pytest.raises(PomonaError, match="Input/output error. The last good checkpoint is untouched: .*--resume"):
            checkpoint.save(tmp_path, {"step": 2})
    assert checkpoint.load(tmp_path)["step"] == (2 if failing == "rename" else 1)  # a complete part is kept
    checkpoint.save(tmp_path, {"step": 3})
    assert checkpoint.load(tmp_path)["step"] == 3


def test_a_part_that_cannot_be_made_current_is_one_sentence(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, {"step": 1})
    (tmp_path / "checkpoint").rename(tmp_path / "checkpoint.part")  # as a kill leaves it
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_make_current", lambda folder: os.rename(folder / "no", folder / "where"))
        with pytest.raises(PomonaError, match="cannot be written: No such file or directory"):
            checkpoint.save(tmp_path, {"step": 2})
    assert checkpoint.load(tmp_path)["step"] == 1


def test_a_file_on_a_folder_that_became_read_only_is_refused_with_one_sentence(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(durable_files, "write_file", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)  # a file system that is read-only refuses this too
    with pytest.raises(PomonaError, match="cannot be written: Read-only file system"):
        durable_files.replace_file(tmp_path / "file", b"")


def test_a_file_of_several_processes_is_always_whole(tmp_path):
    workers = []
    for k in range(4):
        worker = os.fork()
        if not worker:
            for _ in range(50):
                durable_files.replace_shared_file(tmp_path / "file", b"%d" % k * 100_000)
            os._exit(0)
        workers.append(worker)
    for worker in workers:
        assert os.waitpid(worker, 0)[1] == 0
        assert len((tmp_path / "file").read_bytes()) == 100_000
    assert os.listdir(tmp_path) == ["file"]
