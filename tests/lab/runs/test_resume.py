"""Stopping, killing and resuming a run: a resumed run is the uninterrupted one bit for bit."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import threading
from pathlib import Path

import pytest
from run_helpers import (
    DPF,
    RecordingListener,
    StopAfter,
    digits_recipe,
    have_same_weights,
    read_metrics,
    train_until_killed,
    untimed_metrics,
    without_timings,
)
from slow_cases import slow_unless

from pomona.errors import PomonaError
from pomona.lab import Interrupted, Recipe, train
from pomona.lab.runs import checkpoint, durable_files
from pomona.methods import METHODS


def text_recipe(tmp_path: Path, **train) -> Recipe:
    folder = tmp_path / "data" / "text"
    folder.mkdir(parents=True)
    (folder / "input.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return Recipe.load(
        {
            "data": {"name": "text", "length": 16},
            "model": {"name": "lstm_lm", "hidden": 12, "layers": 2, "dropout": 0.3},
            "method": "incremental(sparsity=0.5, every=2)",
            "optimizer": {"name": "adam", "lr": 0.01},
            "rate": "cosine",
            "train": {"epochs": 2, "batch_size": 32, "device": "cpu", **train},
        }
    )


def test_a_language_model_reports_perplexity_and_its_dropout_resumes(tmp_path):
    made = text_recipe(tmp_path)
    options = {"data_dir": tmp_path / "data"}
    summary = train(made, tmp_path / "whole", **options)
    assert "accuracy" not in summary
    assert 1 < summary["perplexity"] < 40
    with pytest.raises(Interrupted):
        train(made, tmp_path / "stopped", stop=StopAfter(3), **options)
    train(made, tmp_path / "stopped", resume=True, **options)
    assert have_same_weights(tmp_path / "whole", tmp_path / "stopped")


# A lottery ticket trains several times and is no single run.
@pytest.mark.parametrize(
    "method",
    slow_unless(
        [DPF, "dense", "iterand", "rigl", "sfp", "snip"],
        [DPF, "oneshot(at=0.5)", "dense", *(name for name in METHODS if name != "lottery")],
    ),
)
def test_a_resumed_run_is_bit_identical(tmp_path, method):
    affine = method not in METHODS or METHODS[method].weights != "score"  # scores leave no norm to train
    made = digits_recipe(method, epochs=2, model=f"digits_cnn(rho=0.5, affine={affine})")
    options = {"note": lambda text: None}  # that runs so short end with a cut
    train(made, tmp_path / "whole", **options)
    for steps in (1, 5, 3):  # within an epoch, at the end of one …
        resume = (tmp_path / "run").exists()
        with pytest.raises(Interrupted, match=r"stopped after step \d+ of 12, .*--resume"):
            train(made, tmp_path / "run", resume=resume, stop=StopAfter(steps), **options)
    train(made, tmp_path / "run", resume=True, **options)
    assert have_same_weights(tmp_path / "whole", tmp_path / "run")
    assert untimed_metrics(tmp_path / "run") == untimed_metrics(tmp_path / "whole")


@pytest.mark.slow
def test_killed_at_a_random_step_and_resumed_is_bit_identical(tmp_path, complete_run):
    # Checkpoints do not change what is trained: the uninterrupted run had others.
    made = digits_recipe(checkpoint_steps=2)
    folder = tmp_path / "run"
    step = random.randint(3, 18)
    train_until_killed(made, folder, step)
    assert not (folder / "summary.json").exists()
    at = checkpoint.load(folder)["step"]
    assert 0 < at < step, "the kill came after a checkpoint, and lost some steps"
    summary = train(made, folder, resume=True)
    assert have_same_weights(complete_run[0], folder), f"killed at step {step}, resumed from {at}"
    assert untimed_metrics(folder) == untimed_metrics(complete_run[0])
    assert summary["accuracy"] == complete_run[2]["accuracy"]


def test_a_kill_before_the_first_checkpoint_starts_over(tmp_path, complete_run):
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(complete_run[0] / "recipe.toml", folder)
    (folder / "metrics.jsonl").write_text('{"kind": "epoch", "half a li')
    (folder / "checkpoint.part").mkdir()
    train(complete_run[1], folder, resume=True)
    assert have_same_weights(complete_run[0], folder)
    assert len(read_metrics(folder)) == len(read_metrics(complete_run[0]))


def test_a_kill_after_the_last_step_only_finishes(tmp_path, complete_run):
    folder = tmp_path / "run"
    shutil.copytree(complete_run[0], folder)
    (folder / "summary.json").unlink()
    (folder / "model.safetensors").unlink()
    summary = train(complete_run[1], folder, resume=True)
    assert have_same_weights(complete_run[0], folder)
    assert without_timings(read_metrics(folder)[-1]) == without_timings(read_metrics(complete_run[0])[-1])
    assert summary["accuracy"] == complete_run[2]["accuracy"]


def test_resuming_a_complete_run_returns_its_summary(complete_run):
    before = {p: p.stat().st_mtime_ns for p in complete_run[0].rglob("*")}
    assert train(complete_run[1], complete_run[0], resume=True) == complete_run[2]
    assert {p: p.stat().st_mtime_ns for p in complete_run[0].rglob("*")} == before


def test_a_truncated_checkpoint_falls_back_with_a_note(tmp_path, complete_run):
    folder = tmp_path / "run"
    made = digits_recipe(checkpoint_steps=2)
    with pytest.raises(Interrupted):
        train(made, folder, stop=StopAfter(8))
    tensors = folder / "checkpoint" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    notes: list[str] = []
    train(made, folder, resume=True, note=notes.append)
    assert len(notes) == 1
    assert "continuing from 'checkpoint.previous'" in notes[0]
    assert have_same_weights(complete_run[0], folder)
    assert untimed_metrics(folder) == untimed_metrics(complete_run[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_run_after_the_current_step(tmp_path, number):
    class Presser(RecordingListener):
        def step(self, loss=None):
            super().step(loss)
            if len(self.calls) == 4:
                os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as stopped:
        train(digits_recipe("dense"), tmp_path / "run", progress=Presser())
    assert (stopped.value.step, stopped.value.total) == (3, 18)
    assert checkpoint.load(tmp_path / "run")["step"] == 3
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_interrupts_at_once(tmp_path):
    class Presser(RecordingListener):
        def step(self, loss=None):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(digits_recipe("dense"), tmp_path / "run", progress=Presser())


def test_a_run_in_another_thread_sets_no_handlers(tmp_path):
    found: list[dict] = []
    thread = threading.Thread(target=lambda: found.append(train(digits_recipe("dense", epochs=1), tmp_path / "run")))
    thread.start()
    thread.join()
    assert found[0]["step"] == 6


def test_a_full_disk_leaves_the_last_checkpoint_to_resume_from(tmp_path, monkeypatch, complete_run):
    folder, write = tmp_path / "run", durable_files.write_file
    calls = 0

    def full(path, data, **options):
        nonlocal calls
        calls += path.name == "tensors.safetensors"
        if calls == 2:
            path.write_bytes(data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, data, **options)

    with monkeypatch.context() as patch:
        patch.setattr(durable_files, "write_file", full)
        with pytest.raises(PomonaError, match="the disk is full.*--resume"):
            train(complete_run[1], folder)
    assert not list(folder.glob("*.part"))
    assert checkpoint.load(folder)["step"] == 6
    train(complete_run[1], folder, resume=True)
    assert have_same_weights(complete_run[0], folder)


def test_a_full_disk_while_writing_metrics_is_reported(tmp_path, complete_run):
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(complete_run[0] / "recipe.toml", folder)
    metrics = folder / "metrics.jsonl"

    def fill_disk() -> bool:
        """Let writes to the open file find no space from now on."""
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{number}") == str(metrics):
                    full = os.open("/dev/full", os.O_WRONLY)
                    os.dup2(full, int(number))
                    os.close(full)
        return False

    with pytest.raises(PomonaError, match="the disk is full: .*metrics.jsonl"):
        train(complete_run[1], folder, resume=True, stop=fill_disk)
