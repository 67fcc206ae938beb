"""Runs: the files they write, their metrics and their summary."""

from __future__ import annotations

import json

import pytest
import torch
from run_helpers import (
    DPF,
    RecordingListener,
    digits_recipe,
    read_metrics,
    run_in_two_processes,
)
from safetensors import safe_open
from safetensors.torch import load_file

from pomona import models
from pomona.errors import PomonaError
from pomona.lab import Recipe, describe_run, train
from pomona.lab.runs import checkpoint
from pomona.lab.runs.distributed import DistributedContext, select_device
from pomona.lab.runs.evaluate import accuracy
from pomona.lab.runs.run import Run
from pomona.lab.runs.run_inputs import load_data
from pomona.lab.runs.strategy import TrainingStrategy


def test_the_files_of_a_finished_run(complete_run):
    folder, made, summary = complete_run
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


def test_the_summary_is_the_last_epoch(complete_run):
    folder, made, summary = complete_run
    last = read_metrics(folder, "epoch")[-1]
    assert summary["accuracy"] == last["accuracy"]
    assert (summary["epoch"], summary["step"]) == (3, 18)
    assert summary["fingerprint"] == made.fingerprint()
    assert summary["seed"] == 0
    assert summary["macs_left"] < summary["macs"]
    assert summary["nonzeros"] < summary["params"]


def test_the_saved_model_has_the_recorded_accuracy(complete_run):
    folder, made, summary = complete_run
    with safe_open(folder / "model.safetensors", "pt") as file:
        options = json.loads(file.metadata()["pomona"])
    model = models.build(**options)
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    test = load_data(made, None, torch.device("cpu")).batches(1000, part="test").evaluate()
    assert accuracy(model, test) == pytest.approx(summary["accuracy"])
    cost = models.summary(model, (1, 8, 8))
    assert (cost.nonzeros, cost.macs_left) == (summary["nonzeros"], summary["macs_left"])
    assert cost.sparsity == pytest.approx(summary["model_sparsity"])
    assert summary["sparsity"] == pytest.approx(0.9, abs=1e-3)


def test_metrics_have_a_line_for_each_epoch_and_each_update(complete_run):
    folder, _, _ = complete_run
    epochs, updates = read_metrics(folder, "epoch"), read_metrics(folder, "update")
    assert [(row["epoch"], row["step"]) for row in epochs] == [(1, 6), (2, 12), (3, 18)]
    assert [row["step"] for row in updates] == [0, 4, 8, 12, 16]
    assert all(0 <= row["delta"] <= 1 for row in updates)
    assert epochs[0]["lr"] == 0.1
    assert epochs[-1]["lr"] == pytest.approx(0.001)
    assert epochs[-1]["loss"] < epochs[0]["loss"]
    assert all(row["images_per_second"] > 0 for row in epochs)
    assert [row["seconds"] for row in epochs] == sorted(row["seconds"] for row in epochs)


def test_zeros_are_recorded_beside_the_sparsity(complete_run, tmp_path):
    folder, _, summary = complete_run
    assert all(row["zeros"] == row["sparsity"] for row in read_metrics(folder, "epoch"))
    assert summary["zeros"] == summary["sparsity"]
    train(digits_recipe("set(sparsity=0.5, every=6)", epochs=2), tmp_path / "run")
    first = read_metrics(tmp_path / "run", "epoch")[0]  # right after an update, whose new weights start at zero
    assert first["sparsity"] == pytest.approx(0.5, abs=1e-3)
    assert first["zeros"] > 0.55


def test_a_checkpoint_stores_the_state_of_the_pruner_once(complete_run):
    folder, _, _ = complete_run
    optimizer = checkpoint.load(folder)["optimizer"]
    assert "pomona" in optimizer
    assert "pomona" not in optimizer["param_groups"][0]


def test_accuracy_is_also_reestimated_where_statistics_are_stale(complete_run):
    folder, _, _ = complete_run
    # Updates every 4 steps until step 16.2: all three evaluations come within 4 steps of one.
    assert all("accuracy_reestimated" in row for row in read_metrics(folder, "epoch"))


def test_fixed_masks_and_models_without_batch_norm_are_not_reestimated(tmp_path):
    train(digits_recipe("dpf(every=2, settle=0.5, schedule='constant()')", epochs=2), tmp_path / "a")
    first, last = read_metrics(tmp_path / "a", "epoch")
    assert "accuracy_reestimated" in first
    assert "accuracy_reestimated" not in last
    train(digits_recipe("dpf(every=1, settle=0.0)", epochs=1, model="mlp(hidden=[16])"), tmp_path / "b")
    assert "accuracy_reestimated" not in read_metrics(tmp_path / "b", "epoch")[0]


def test_progress_is_reported(tmp_path):
    progress = RecordingListener()
    train(digits_recipe("dense", epochs=2), tmp_path / "run", progress=progress)
    assert progress.calls[0] == ("start", 2, 6, "test")
    steps = [call for call in progress.calls if call[0] == "step"]
    assert len(steps) == 12
    assert all(isinstance(loss, float) for _, loss in steps)
    assert [call[1]["epoch"] for call in progress.calls if call[0] == "epoch"] == [1, 2]
    assert progress.calls[-1] == ("close",)


def test_dense_training_and_pruning_after_the_last_step(tmp_path):
    dense = train(digits_recipe("dense", epochs=1), tmp_path / "dense")
    assert (dense["method"], dense["sparsity"]) == ("dense", 0.0)
    cut = train(digits_recipe("oneshot(sparsity=0.75, at=1.0)", epochs=1), tmp_path / "cut")
    assert cut["sparsity"] == pytest.approx(0.75, abs=1e-3)
    assert cut["accuracy"] != dense["accuracy"]
    assert "accuracy_reestimated" in cut


def test_seeds_differ_and_a_seed_repeats(tmp_path):
    def weights(seed, name):
        made = Recipe.load(digits_recipe("random(sparsity=0.5)", epochs=1).to_dict(), [f"seed={seed}"])
        train(made, tmp_path / name)
        return (tmp_path / name / "model.safetensors").read_bytes(), load_file(tmp_path / name / "model.safetensors")

    (first, one), (again, _), (_, other) = weights(1, "a"), weights(1, "b"), weights(2, "c")
    assert first == again
    masks = [[(w == 0) for k, w in sorted(side.items()) if w.dim() == 4] for side in (one, other)]
    assert not all(torch.equal(a, b) for a, b in zip(*masks, strict=True))


def test_the_random_state_of_the_caller_is_restored(tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train(digits_recipe("dense", epochs=1), tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_validation_part_is_measured_too(tmp_path):
    made = Recipe.load(
        digits_recipe("dense", epochs=1).to_dict(), ["data.validation=200", "data.augment=standard(pad=1)"]
    )
    row = train(made, tmp_path / "run")
    assert 0 <= row["valid_accuracy"] <= 100
    assert row["step"] == 5  # 1147 rows are left


@pytest.mark.parametrize("optimizer", ["adam", "adamw(weight_decay=0.1)", "sgd(nesterov=False)"])
def test_training_options_are_used_by_the_loop(tmp_path, optimizer):
    made = Recipe.load(
        digits_recipe("dense", epochs=1).to_dict(),
        [f"optimizer={optimizer}", "train.clip=0.5", "train.label_smoothing=0.1", "train.precision=bf16"],
    )
    assert train(made, tmp_path / "run")["loss"] > 0


def test_evaluations_follow_eval_every_and_the_last_epoch(tmp_path):
    train(digits_recipe("dense", epochs=3, eval_every=2), tmp_path / "run")
    assert ["accuracy" in row for row in read_metrics(tmp_path / "run", "epoch")] == [False, True, True]


def test_warnings_of_the_pruner_are_passed_to_note(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "pomona.methods.oneshot.OneShot.is_update_due", lambda self, time: False
    )  # it leaves all to finish()
    notes: list[str] = []
    train(digits_recipe("oneshot", epochs=1), tmp_path / "run", note=notes.append)
    assert len(notes) == 1
    assert "was pruned at once" in notes[0]


def test_describe_run_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    described = describe_run(digits_recipe("dpf", epochs=2, model="mlp(hidden=[32])"))
    assert (described["steps_per_epoch"], described["steps"], described["device"]) == (6, 12, "cpu")
    assert described["params"] == 64 * 32 + 32 + 32 * 10 + 10
    assert [*described["pruned"].values()] == [64 * 32]
    assert described["model"]["in_features"] == 64
    with pytest.raises(PomonaError, match="nothing to prune"):
        describe_run(digits_recipe(model="mlp(hidden=[])"))
    assert not list(tmp_path.iterdir())


def test_a_missing_gpu_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(PomonaError, match="torch sees no GPU"):
        train(digits_recipe(device="cuda"), tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_select_device_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert select_device("auto", local_rank=1) == torch.device("cuda", 1)
    assert select_device("cpu") == torch.device("cpu")
    with pytest.raises(PomonaError, match="there are 2 GPUs"):
        select_device("cuda:2")


def test_a_loss_that_is_not_finite_names_its_step(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(PomonaError, match=r"the loss is (nan|inf) at step \d+ of 18: lower optimizer.lr"):
        train(Recipe.load(digits_recipe("dense").to_dict(), ["optimizer.lr=1e30"]), folder)
    # What was saved before is still finite.
    if checkpoint.exists(folder):
        assert all(torch.isfinite(t).all() for t in checkpoint.load(folder)["model"].values())


def test_losses_read_late_name_the_right_step(tmp_path):
    run = Run(TrainingStrategy(digits_recipe("dense")), tmp_path / "run", DistributedContext(), torch.device("cpu"))
    run.begin_stage(0)
    run.step, run.loop.losses = 10, [torch.tensor(v) for v in (1.0, 2.0, float("nan"), 3.0)]
    with pytest.raises(PomonaError, match="at step 9 of 18"):
        run.read_losses()
    run.loop.losses, run.loss_sum = [torch.tensor(v) for v in (1.0, 2.5)], 0.0
    assert run.read_losses() == 2.5
    assert run.loss_sum == 3.5
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path):
    method = DPF.replace("every=4", "every=4, compressor='soft', allocation='global(floor=0.05)'")
    made = digits_recipe(method, epochs=2, model="mlp(hidden=[32])", drop_last=True, average=1.0)
    train(made, tmp_path / "one")
    run_in_two_processes(f"train(Recipe.load({made.to_dict()!r}), {str(tmp_path / 'two')!r})")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-5)
        assert torch.equal(two[name] == 0, tensor == 0)
    ours, theirs = (read_metrics(tmp_path / name, "epoch") for name in ("one", "two"))
    assert [r["loss"] for r in theirs] == pytest.approx([r["loss"] for r in ours], rel=1e-4)
