"""Runs: what they write, how they stop, and that a resumed one is the uninterrupted one bit for bit."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from laboratory import After, lasting, rows, together
from safetensors import safe_open
from safetensors.torch import load_file

from pomona import models
from pomona.errors import PomonaError
from pomona.lab import Interrupted, Recipe, plan, train
from pomona.lab.runs import checkpoint
from pomona.lab.runs import run as runs
from pomona.lab.runs.distributed import Team, pick
from pomona.lab.runs.evaluate import accuracy
from pomona.lab.runs.folder import claimed
from pomona.lab.runs.run import Run
from pomona.methods import METHODS

DPF = "dpf(sparsity=0.9, every=4, schedule='cubic(until=0.5)')"


def recipe(method=DPF, epochs=3, model="digits_cnn(rho=0.5)", **train) -> Recipe:
    options = {"epochs": epochs, "batch_size": 256, "device": "cpu", **train}
    return Recipe.load({"name": "test", "data": "digits", "model": model, "method": method, "train": options})


class Progress:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple] = []

    def start(self, total_epochs, steps_per_epoch, title):
        self.told.append(("start", total_epochs, steps_per_epoch, title))

    def step(self, loss=None):
        self.told.append(("step", loss))

    def epoch(self, row):
        self.told.append(("epoch", row))

    def close(self):
        self.told.append(("close",))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run, its recipe and its summary."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, recipe(), train(recipe(), folder)


# ---- what a run writes


def test_a_run_leaves_its_folder(whole):
    folder, made, summary = whole
    assert {p.name for p in folder.iterdir()} == {
        "recipe.toml",
        "env.json",
        "metrics.jsonl",
        "checkpoint",
        "checkpoint.previous",
        "model.safetensors",
        "masks.safetensors",
        "summary.json",
    }
    assert Recipe.load(folder / "recipe.toml") == made
    assert json.loads((folder / "summary.json").read_text()) == summary
    facts = json.loads((folder / "env.json").read_text())
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["data"]["train"] == 1347


def test_the_summary_is_the_last_epoch(whole):
    folder, made, summary = whole
    last = rows(folder, "epoch")[-1]
    assert summary["accuracy"] == last["accuracy"]
    assert (summary["epoch"], summary["step"]) == (3, 18)
    assert summary["fingerprint"] == made.fingerprint()
    assert summary["seed"] == 0
    assert summary["macs_left"] < summary["macs"]
    assert summary["nonzeros"] < summary["params"]


def test_the_model_is_plain_and_gives_the_accuracy_written(whole):
    folder, made, summary = whole
    with safe_open(folder / "model.safetensors", "pt") as file:
        options = json.loads(file.metadata()["pomona"])
    model = models.build(**options)
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    test = runs.load_data(made, None, torch.device("cpu")).batches(1000, part="test").evaluate()
    assert accuracy(model, test) == pytest.approx(summary["accuracy"])
    cost = models.summary(model, (1, 8, 8))
    assert (cost.nonzeros, cost.macs_left) == (summary["nonzeros"], summary["macs_left"])
    assert cost.sparsity == pytest.approx(summary["model_sparsity"])
    assert summary["sparsity"] == pytest.approx(0.9, abs=1e-3)


def test_metrics_have_a_line_an_epoch_and_a_line_an_update(whole):
    folder, _, _ = whole
    epochs, updates = rows(folder, "epoch"), rows(folder, "update")
    assert [(row["epoch"], row["step"]) for row in epochs] == [(1, 6), (2, 12), (3, 18)]
    assert [row["step"] for row in updates] == [0, 4, 8, 12, 16]
    assert all(0 <= row["delta"] <= 1 for row in updates)
    assert epochs[0]["lr"] == 0.1
    assert epochs[-1]["lr"] == pytest.approx(0.001)
    assert epochs[-1]["loss"] < epochs[0]["loss"]
    assert all(row["images_per_second"] > 0 for row in epochs)
    assert [row["seconds"] for row in epochs] == sorted(row["seconds"] for row in epochs)


def test_accuracy_is_given_twice_where_statistics_are_stale(whole):
    folder, _, _ = whole
    # Updates every 4 steps until step 16.2: all three evaluations come within 4 steps of one.
    assert all("accuracy_reestimated" in row for row in rows(folder, "epoch"))


def test_settled_masks_and_models_without_batch_norm_need_no_second_accuracy(tmp_path):
    train(recipe("dpf(every=2, settle=0.5, schedule='constant()')", epochs=2), tmp_path / "a")
    first, last = rows(tmp_path / "a", "epoch")
    assert "accuracy_reestimated" in first
    assert "accuracy_reestimated" not in last
    train(recipe("dpf(every=1, settle=0.0)", epochs=1, model="mlp(hidden=[16])"), tmp_path / "b")
    assert "accuracy_reestimated" not in rows(tmp_path / "b", "epoch")[0]


def test_progress_is_told(tmp_path):
    progress = Progress()
    train(recipe("dense", epochs=2), tmp_path / "run", progress=progress)
    assert progress.told[0] == ("start", 2, 6, "test")
    steps = [told for told in progress.told if told[0] == "step"]
    assert len(steps) == 12
    assert all(isinstance(loss, float) for _, loss in steps)
    assert [told[1]["epoch"] for told in progress.told if told[0] == "epoch"] == [1, 2]
    assert progress.told[-1] == ("close",)


def test_a_dense_run_and_a_cut_at_the_end(tmp_path):
    dense = train(recipe("dense", epochs=1), tmp_path / "dense")
    assert (dense["method"], dense["sparsity"]) == ("dense", 0.0)
    cut = train(recipe("oneshot(sparsity=0.75, at=1.0)", epochs=1), tmp_path / "cut")
    assert cut["sparsity"] == pytest.approx(0.75, abs=1e-3)
    assert cut["accuracy"] != dense["accuracy"]
    assert "accuracy_reestimated" in cut


def test_seeds_differ_and_a_seed_repeats(tmp_path):
    def weights(seed, name):
        made = Recipe.load(recipe("random(sparsity=0.5)", epochs=1).to_dict(), [f"seed={seed}"])
        train(made, tmp_path / name)
        return (tmp_path / name / "model.safetensors").read_bytes(), load_file(tmp_path / name / "model.safetensors")

    (first, one), (again, _), (_, other) = weights(1, "a"), weights(1, "b"), weights(2, "c")
    assert first == again
    masks = [[(w == 0) for k, w in sorted(side.items()) if w.dim() == 4] for side in (one, other)]
    assert not all(torch.equal(a, b) for a, b in zip(*masks, strict=True))


def test_the_callers_random_state_is_left_alone(tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train(recipe("dense", epochs=1), tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_validation_part_is_measured_too(tmp_path):
    made = Recipe.load(recipe("dense", epochs=1).to_dict(), ["data.validation=200", "data.augment=standard(pad=1)"])
    row = train(made, tmp_path / "run")
    assert 0 <= row["valid_accuracy"] <= 100
    assert row["step"] == 5  # 1147 rows are left


@pytest.mark.parametrize("optimizer", ["adam", "adamw(weight_decay=0.1)", "sgd(nesterov=False)"])
def test_options_reach_the_loop(tmp_path, optimizer):
    made = Recipe.load(
        recipe("dense", epochs=1).to_dict(),
        [f"optimizer={optimizer}", "train.clip=0.5", "train.label_smoothing=0.1", "train.precision=bf16"],
    )
    assert train(made, tmp_path / "run")["loss"] > 0


def test_evaluations_come_every_so_often_and_at_the_end(tmp_path):
    train(recipe("dense", epochs=3, eval_every=2), tmp_path / "run")
    assert ["accuracy" in row for row in rows(tmp_path / "run", "epoch")] == [False, True, True]


def test_what_a_person_should_know_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "pomona.methods.oneshot.OneShot.is_update_due", lambda self, time: False
    )  # it leaves all to finish()
    notes: list[str] = []
    train(recipe("oneshot", epochs=1), tmp_path / "run", note=notes.append)
    assert len(notes) == 1
    assert "was cut at once" in notes[0]


# ---- text


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
        train(made, tmp_path / "stopped", stop=After(3), **options)
    train(made, tmp_path / "stopped", resume=True, **options)
    assert same_weights(tmp_path / "whole", tmp_path / "stopped")


# ---- stop, kill, resume


def same_weights(a: Path, b: Path) -> bool:
    return (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()


# A lottery ticket trains several times and is no single run.
@pytest.mark.parametrize("method", [DPF, "oneshot(at=0.5)", "dense", *(name for name in METHODS if name != "lottery")])
def test_stopped_and_resumed_is_never_stopped(tmp_path, method):
    affine = method not in METHODS or METHODS[method].weights != "score"  # scores leave no norm to train
    made = recipe(method, epochs=2, model=f"digits_cnn(rho=0.5, affine={affine})")
    options = {"note": lambda text: None}  # that runs so short end with a cut
    train(made, tmp_path / "whole", **options)
    for steps in (1, 5, 3):  # within an epoch, at the end of one …
        resume = (tmp_path / "run").exists()
        with pytest.raises(Interrupted, match=r"stopped after step \d+ of 12, .*--resume"):
            train(made, tmp_path / "run", resume=resume, stop=After(steps), **options)
    train(made, tmp_path / "run", resume=True, **options)
    assert same_weights(tmp_path / "whole", tmp_path / "run")
    assert [*map(lasting, rows(tmp_path / "run"))] == [*map(lasting, rows(tmp_path / "whole"))]


KILLED = """
import os, signal, sys, torch
from pomona.lab import Recipe, train

torch.set_num_threads(1)

class Killer:
    left = int(sys.argv[2])
    def start(self, *told): pass
    def epoch(self, row): pass
    def close(self): pass
    def step(self, loss=None):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

train(Recipe.load(sys.argv[3]), sys.argv[1], progress=Killer())
"""


def test_killed_at_a_random_step_and_resumed_is_never_killed(tmp_path, whole):
    # Checkpoints do not change what is trained: the uninterrupted run had others.
    made = recipe(checkpoint_steps=2)
    folder = tmp_path / "run"
    (tmp_path / "recipe.toml").write_text(made.to_toml())
    step = random.randint(3, 18)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), str(step), str(tmp_path / "recipe.toml")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (folder / "summary.json").exists()
    at = checkpoint.load(folder)["step"]
    assert 0 < at < step, "the kill came after a checkpoint, and lost some steps"
    summary = train(made, folder, resume=True)
    assert same_weights(whole[0], folder), f"killed at step {step}, resumed from {at}"
    assert [*map(lasting, rows(folder))] == [*map(lasting, rows(whole[0]))]
    assert summary["accuracy"] == whole[2]["accuracy"]


def test_a_kill_before_the_first_checkpoint_starts_over(tmp_path, whole):
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(whole[0] / "recipe.toml", folder)
    (folder / "metrics.jsonl").write_text('{"kind": "epoch", "half a li')
    (folder / "checkpoint.part").mkdir()
    train(whole[1], folder, resume=True)
    assert same_weights(whole[0], folder)
    assert len(rows(folder)) == len(rows(whole[0]))


def test_a_kill_after_the_last_step_only_finishes(tmp_path, whole):
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    (folder / "summary.json").unlink()
    (folder / "model.safetensors").unlink()
    summary = train(whole[1], folder, resume=True)
    assert same_weights(whole[0], folder)
    assert lasting(rows(folder)[-1]) == lasting(rows(whole[0])[-1])
    assert summary["accuracy"] == whole[2]["accuracy"]


def test_resuming_a_complete_run_gives_its_summary(whole):
    before = {p: p.stat().st_mtime_ns for p in whole[0].rglob("*")}
    assert train(whole[1], whole[0], resume=True) == whole[2]
    assert {p: p.stat().st_mtime_ns for p in whole[0].rglob("*")} == before


def test_a_truncated_checkpoint_falls_back_and_says_so(tmp_path, whole):
    folder = tmp_path / "run"
    made = recipe(checkpoint_steps=2)
    with pytest.raises(Interrupted):
        train(made, folder, stop=After(8))
    tensors = folder / "checkpoint" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    notes: list[str] = []
    train(made, folder, resume=True, note=notes.append)
    assert len(notes) == 1
    assert "going on from 'checkpoint.previous'" in notes[0]
    assert same_weights(whole[0], folder)
    assert [*map(lasting, rows(folder))] == [*map(lasting, rows(whole[0]))]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_first(tmp_path, number):
    class Presser(Progress):
        def step(self, loss=None):
            super().step(loss)
            if len(self.told) == 4:
                os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as stopped:
        train(recipe("dense"), tmp_path / "run", progress=Presser())
    assert (stopped.value.step, stopped.value.total) == (3, 18)
    assert checkpoint.load(tmp_path / "run")["step"] == 3
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_is_not_waited_for(tmp_path):
    class Presser(Progress):
        def step(self, loss=None):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(recipe("dense"), tmp_path / "run", progress=Presser())


def test_a_run_in_another_thread_sets_no_handlers(tmp_path):
    found: list[dict] = []
    thread = threading.Thread(target=lambda: found.append(train(recipe("dense", epochs=1), tmp_path / "run")))
    thread.start()
    thread.join()
    assert found[0]["step"] == 6


# ---- what is refused, and that nothing is written or lost


def test_a_folder_in_use_is_refused(whole):
    with pytest.raises(PomonaError, match="is not empty: go on with --resume, or give another folder"):
        train(whole[1], whole[0])


def test_nothing_to_resume_is_refused(tmp_path):
    with pytest.raises(PomonaError, match="no run to resume"):
        train(recipe(), tmp_path / "run", resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(PomonaError, match="is a file"):
        train(recipe(), tmp_path / "file")
    assert not (tmp_path / "run").exists()


def test_another_recipe_is_refused(whole):
    with pytest.raises(PomonaError, match=r"other settings \(train.epochs: 4, not 3\)"):
        train(recipe(epochs=4), whole[0], resume=True)


def stopped(folder: Path, made: Recipe) -> None:
    with pytest.raises(Interrupted):
        train(made, folder, stop=After(2))


def test_a_checkpoint_of_another_model_is_refused_by_its_tensor(tmp_path):
    mine, theirs = (recipe("dense", model=f"mlp(hidden=[{width}])") for width in (8, 12))
    stopped(tmp_path / "mine", mine)
    stopped(tmp_path / "theirs", theirs)
    shutil.rmtree(tmp_path / "mine" / "checkpoint")
    shutil.copytree(tmp_path / "theirs" / "checkpoint", tmp_path / "mine" / "checkpoint")
    before = {p: p.read_bytes() for p in (tmp_path / "mine").rglob("*") if p.is_file()}
    with pytest.raises(PomonaError, match=r"of another model: '.*weight' is 12×64 there and 8×64 here"):
        train(mine, tmp_path / "mine", resume=True)
    assert {p: p.read_bytes() for p in (tmp_path / "mine").rglob("*") if p.is_file()} == before


def test_a_checkpoint_with_other_tensors_is_refused():
    with pytest.raises(PomonaError, match="'b' is missing there and 2×3 here"):
        runs.compare_models({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(2, 3)}, Path("run"))
    with pytest.raises(PomonaError, match="'b' is a number there and missing here"):
        runs.compare_models({"b": torch.tensor(1)}, {}, Path("run"))


def test_two_processes_do_not_train_in_one_folder(tmp_path, whole):
    made, folder = whole[1], tmp_path / "run"
    stopped(folder, made)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with claimed(folder), pytest.raises(PomonaError, match="another process trains in '.*run': wait for it"):
        train(made, folder, resume=True)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    train(made, folder, resume=True)
    assert same_weights(whole[0], folder)


def test_of_two_that_begin_one_is_quicker(tmp_path, monkeypatch):
    made, folder = recipe("dense", epochs=1), tmp_path / "run"
    begin = Run.begin

    def slow(self, *args, **options):
        begin(self, *args, **options)
        if not folder.exists():
            monkeypatch.setattr(Run, "begin", begin)
            train(made, folder)

    monkeypatch.setattr(Run, "begin", slow)
    with pytest.raises(PomonaError, match="is not empty: go on with --resume"):
        train(made, folder)
    assert checkpoint.load(folder)["step"] == 6


def test_a_kill_within_the_first_file_leaves_nothing_begun(tmp_path, whole):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.toml.part").write_text('name = "sma')
    train(whole[1], folder)
    assert same_weights(whole[0], folder)
    assert not (folder / "recipe.toml.part").exists()


def test_a_damaged_summary_is_made_anew(tmp_path, whole):
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    (folder / "summary.json").write_bytes((whole[0] / "summary.json").read_bytes()[:50])
    assert train(whole[1], folder, resume=True)["accuracy"] == whole[2]["accuracy"]
    assert json.loads((folder / "summary.json").read_text())["fingerprint"] == whole[1].fingerprint()


def test_a_recipe_edited_under_its_checkpoint_is_refused(tmp_path):
    folder = tmp_path / "run"
    stopped(folder, recipe("dense", epochs=2))
    edited = recipe("dense", epochs=5)
    (folder / "recipe.toml").write_text(edited.to_toml())
    with pytest.raises(PomonaError, match="begun with other settings"):
        train(edited, folder, resume=True)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: recipe(model="lstm"), "model 'lstm' does not fit data set 'digits', which holds images: .*mlp"),
        (lambda: recipe(model="mlp(hidden=[])"), "nothing to prune"),
        (lambda: recipe(model="mlp(in_features=5)"), "does not run on samples of shape"),
        (
            lambda: recipe({"name": "dpf", "pattern": {"name": "balanced", "block": 7}, "sparsity": 0.5}),
            "blocks of 7 do not divide the rows of",
        ),
        (lambda: recipe(batch_size=2000, drop_last=True), "batch_size 2000"),
        (
            lambda: Recipe.load({"data": "cifar10", "model": "resnet20"}),
            "data set 'cifar10' was not found in",
        ),
        (
            lambda: Recipe.load({"data": "digits(validation=5000)", "model": "mlp"}),
            "validation must be",
        ),
    ],
)
def test_a_bad_recipe_writes_nothing(tmp_path, monkeypatch, made, says):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("POMONA_DATA", raising=False)
    with pytest.raises(PomonaError, match=says):
        train(made(), tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_a_plan_tells_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = plan(recipe("dpf", epochs=2, model="mlp(hidden=[32])"))
    assert (told["steps_per_epoch"], told["steps"], told["device"]) == (6, 12, "cpu")
    assert told["params"] == 64 * 32 + 32 + 32 * 10 + 10
    assert [*told["pruned"].values()] == [64 * 32]
    assert told["model"]["in_features"] == 64
    with pytest.raises(PomonaError, match="nothing to prune"):
        plan(recipe(model="mlp(hidden=[])"))
    assert not list(tmp_path.iterdir())


def test_a_missing_gpu_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(PomonaError, match="torch sees no GPU"):
        train(recipe(device="cuda"), tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_devices_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick("auto", local=1) == torch.device("cuda", 1)
    assert pick("cpu") == torch.device("cpu")
    with pytest.raises(PomonaError, match="there are 2 GPUs"):
        pick("cuda:2")


def test_a_loss_that_is_not_finite_names_its_step(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(PomonaError, match=r"the loss is (nan|inf) at step \d+ of 18: lower optimizer.lr"):
        train(Recipe.load(recipe("dense").to_dict(), ["optimizer.lr=1e30"]), folder)
    # What was saved before is still finite.
    if checkpoint.found(folder):
        assert all(torch.isfinite(t).all() for t in checkpoint.load(folder)["model"].values())


def test_late_readings_still_name_the_step(tmp_path):
    run = Run(recipe("dense"), tmp_path / "run", Team(), torch.device("cpu"))
    run.begin(0)
    run.step, run.loop.taken = 10, [torch.tensor(v) for v in (1.0, 2.0, float("nan"), 3.0)]
    with pytest.raises(PomonaError, match="at step 9 of 18"):
        run.read_losses()
    run.loop.taken, run.loss = [torch.tensor(v) for v in (1.0, 2.5)], 0.0
    assert run.read_losses() == 2.5
    assert run.loss == 3.5
    assert not (tmp_path / "run").exists()


def test_a_full_disk_keeps_the_last_checkpoint_and_the_run_goes_on_later(tmp_path, monkeypatch, whole):
    folder, write = tmp_path / "run", checkpoint.write
    calls = 0

    def full(path, data):
        nonlocal calls
        calls += path.name == "tensors.safetensors"
        if calls == 2:
            path.write_bytes(data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", full)
        with pytest.raises(PomonaError, match="the disk is full.*--resume"):
            train(whole[1], folder)
    assert not list(folder.glob("*.part"))
    assert checkpoint.load(folder)["step"] == 6
    train(whole[1], folder, resume=True)
    assert same_weights(whole[0], folder)


def test_a_full_disk_under_the_metrics_is_named_too(tmp_path, whole):
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(whole[0] / "recipe.toml", folder)
    (folder / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(PomonaError, match="the disk is full: .*metrics.jsonl"):
        train(whole[1], folder, resume=True)


# ---- data parallel


def test_two_processes_train_what_one_does(tmp_path):
    method = DPF.replace("every=4", "every=4, compressor='soft', allocation='global(floor=0.05)'")
    made = recipe(method, epochs=2, model="mlp(hidden=[32])", drop_last=True, average=1.0)
    train(made, tmp_path / "one")
    together(f"train(Recipe.load({made.to_dict()!r}), {str(tmp_path / 'two')!r})")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-5)
        assert torch.equal(two[name] == 0, tensor == 0)
    ours, theirs = (rows(tmp_path / name, "epoch") for name in ("one", "two"))
    assert [r["loss"] for r in theirs] == pytest.approx([r["loss"] for r in ours], rel=1e-4)
