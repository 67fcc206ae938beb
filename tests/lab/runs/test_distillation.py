"""Distillation: the loss, runs with a teacher that train and resume, and teachers that are refused."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_helpers import (
    DPF,
    StopAfter,
    digits_recipe,
    have_same_weights,
    read_metrics,
    run_in_two_processes,
    train_until_killed,
    untimed_metrics,
)
from safetensors.torch import load_file, save_file
from torch import nn

from pomona.errors import PomonaError
from pomona.lab import Interrupted, Recipe, train
from pomona.lab.runs import checkpoint, retrain
from pomona.lab.runs.distillation import distillation_loss, load_teacher
from pomona.lab.runs.run import prepared_run
from pomona.lab.runs.strategy import TrainingStrategy
from pomona.lab.sweeps import concurrent_runs
from pomona.lab.sweeps.job import Job


def student_recipe(teacher: dict, method: str = DPF, **train) -> Recipe:
    """Return a recipe of a run on the digits with a teacher."""
    return Recipe.load(digits_recipe(method, **train).to_dict() | {"teacher": teacher})


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory):
    """Return the folder of a dense run on the digits."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("teacher") / "dense"
    train(digits_recipe("dense", epochs=2), folder)
    return folder


# ---- the loss


@pytest.mark.parametrize("temperature", [1.0, 2.0, 4.0])
def test_the_loss_of_a_hand_worked_case(temperature):
    """The student says (1/4, 3/4) and the teacher (1/2, 1/2), so KL is ½ log 2 + ½ log ⅔ = ½ log 4/3."""
    student = temperature * torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])
    teacher = torch.zeros(2, 2)
    divergence = 0.5 * math.log(4 / 3)
    expected = temperature**2 * (divergence + 0.0) / 2  # the second sample agrees
    assert distillation_loss(student, teacher, temperature).item() == pytest.approx(expected, rel=1e-6)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    classes=st.integers(2, 7),
    temperature=st.floats(0.5, 20.0),
)
def test_the_loss_and_its_gradient_have_their_closed_forms(seed, rows, classes, temperature):
    """T² Σ p log(p / q), and the gradient T (q − p), for softmax outputs p of the teacher and q of the student."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = 3 * torch.randn(2, rows, classes, generator=generator)
    student.requires_grad_()
    loss = distillation_loss(student, teacher, temperature)
    loss.backward()
    q, p = ((one.detach().double() / temperature).softmax(-1) for one in (student, teacher))
    expected = temperature**2 * (p * (p / q).log()).sum() / rows
    torch.testing.assert_close(loss.detach().double(), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(student.grad.double(), temperature * (q - p) / rows, rtol=1e-3, atol=1e-5)


def test_the_loss_is_a_mean_over_the_tokens_of_a_text():
    student, teacher = torch.randn(2, 3, 4, 5)
    whole = distillation_loss(student, teacher, 2.0)
    alone = [distillation_loss(student[i, j : j + 1], teacher[i, j : j + 1], 2.0) for i in range(3) for j in range(4)]
    torch.testing.assert_close(whole, torch.stack(alone).mean())


def test_a_step_takes_the_loss_of_labels_and_teacher(tmp_path, dense_run):
    """One step on all rows: its loss is that of the first weights, by torch's own modules."""
    teacher = {"run": str(dense_run), "weight": 0.7, "temperature": 3.0}
    made = student_recipe(teacher, epochs=1, label_smoothing=0.1, batch_size=2000)
    with prepared_run(TrainingStrategy(made)) as run:
        inputs, targets = next(run.batches.epoch(0))
        logits, soft = run.model(inputs), run.teacher(inputs)
    labels = nn.CrossEntropyLoss(label_smoothing=0.1)(logits, targets)
    divergence = nn.KLDivLoss(reduction="batchmean")(torch.log_softmax(logits / 3, 1), torch.softmax(soft / 3, 1))
    train(made, tmp_path / "run")
    (row,) = read_metrics(tmp_path / "run", "epoch")
    assert row["loss"] == pytest.approx(0.3 * labels.item() + 0.7 * 9 * divergence.item(), rel=1e-5)


# ---- runs


def test_a_teacher_changes_the_training_but_not_its_start(dense_run):
    plain, distilled = digits_recipe(), student_recipe({"run": str(dense_run)})
    with prepared_run(TrainingStrategy(plain)) as run:
        weights, random_state = run.model.state_dict(), torch.get_rng_state()
    with prepared_run(TrainingStrategy(distilled)) as run:
        assert all(torch.equal(run.model.state_dict()[name], tensor) for name, tensor in weights.items())
        assert torch.equal(torch.get_rng_state(), random_state)
        expected = load_file(dense_run / "model.safetensors")
        assert all(torch.equal(run.teacher.state_dict()[name], tensor) for name, tensor in expected.items())
        assert not any(module.training for module in run.teacher.modules())
        assert not any(parameter.requires_grad for parameter in run.teacher.parameters())
        assert all(module.training for module in run.model.modules())


def test_a_resumed_run_with_a_teacher_is_bit_identical(tmp_path, dense_run):
    before = load_file(dense_run / "model.safetensors")
    made = student_recipe({"run": str(dense_run)}, epochs=2)
    summary = train(made, tmp_path / "whole")
    for steps in (1, 5, 3):  # within an epoch, at the end of one …
        with pytest.raises(Interrupted):
            train(made, tmp_path / "run", resume=(tmp_path / "run").exists(), stop=StopAfter(steps))
        assert sum(t.numel() for t in checkpoint.load(tmp_path / "run")["model"].values()) == sum(
            t.numel() for t in before.values()
        )
    train(made, tmp_path / "run", resume=True)
    assert have_same_weights(tmp_path / "whole", tmp_path / "run")
    assert untimed_metrics(tmp_path / "run") == untimed_metrics(tmp_path / "whole")
    assert summary["sparsity"] == pytest.approx(0.9, abs=1e-4)
    assert summary["fingerprint"] != digits_recipe(epochs=2).fingerprint()
    train(digits_recipe(epochs=2), tmp_path / "plain")
    assert not have_same_weights(tmp_path / "plain", tmp_path / "whole")


@pytest.mark.slow
def test_a_killed_run_with_a_teacher_resumes_bit_for_bit(tmp_path, dense_run):
    made = student_recipe({"run": str(dense_run)}, checkpoint_steps=2)
    train(made, tmp_path / "whole")
    step = random.randint(3, 17)
    train_until_killed(made, tmp_path / "run", step)
    train(made, tmp_path / "run", resume=True)
    assert have_same_weights(tmp_path / "whole", tmp_path / "run"), f"killed at step {step}"


def test_a_student_reaches_the_accuracy_of_its_teacher(tmp_path):
    known = train(digits_recipe("dense", epochs=6, batch_size=64), tmp_path / "dense")["accuracy"]
    teacher = {"run": str(tmp_path / "dense"), "weight": 1.0}  # no labels at all
    learned = train(student_recipe(teacher, "dense", epochs=6, batch_size=64), tmp_path / "run")["accuracy"]
    assert min(known, learned) > 90


def test_a_file_of_weights_trains_like_the_run_it_is_from(tmp_path, dense_run):
    for name, teacher in (("run", {"run": str(dense_run)}), ("file", {"file": str(dense_run / "model.safetensors")})):
        train(student_recipe(teacher, epochs=1), tmp_path / name)
    assert have_same_weights(tmp_path / "run", tmp_path / "file")
    prints = [json.loads((tmp_path / name / "summary.json").read_text())["fingerprint"] for name in ("run", "file")]
    assert prints[0] != prints[1]


def test_fine_tuning_and_retraining_have_the_teacher_too(tmp_path, dense_run):
    given = student_recipe({"run": str(dense_run)}, epochs=1).to_dict()
    tuned, plain = (Recipe.load(given | {"finetune": {"epochs": 1}} | change) for change in ({}, {"teacher": {}}))
    for name, made in (("tuned", tuned), ("plain", plain)):
        train(made, tmp_path / name)
    rows = [read_metrics(tmp_path / name, "epoch")[-1] for name in ("tuned", "plain")]
    assert rows[0]["stage"] == rows[1]["stage"] == "finetune"
    assert rows[0]["loss"] < rows[1]["loss"] / 2  # the share of the labels is a tenth, and the networks nearly agree
    again, _ = retrain.prepare_retraining(tmp_path / "tuned")
    assert again.teacher == tuned.teacher


@pytest.mark.slow
def test_two_processes_train_with_one_teacher(tmp_path, dense_run):
    made = student_recipe({"run": str(dense_run)}, epochs=1, drop_last=True)
    run_in_two_processes(f"train(Recipe.load({made.to_dict()!r}), {str(tmp_path / 'two')!r})")
    train(Recipe.load(made.to_dict() | {"teacher": {}}), tmp_path / "plain")
    distilled, plain = (read_metrics(tmp_path / name, "epoch")[-1]["loss"] for name in ("two", "plain"))
    assert distilled < plain / 2


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher": {"weight": 0.5}}, r"\[teacher\] names no teacher: give the folder of a finished run"),
        ({"data": "digits(validation=100)"}, "was trained with data.validation = 0, and this run has 100"),
        ({"data": "imdb"}, "was trained with data.name = 'digits', and this run has 'imdb'"),
        ({"model": "digits_cnn(num_classes=12)"}, "has num_classes = 10, and this run has num_classes = 12"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(tmp_path, dense_run, change, message):
    made = Recipe.load(student_recipe({"run": str(dense_run)}).to_dict() | change)
    with pytest.raises(PomonaError, match=message):
        load_teacher(made, {"num_classes": 10} | made.model, torch.device("cpu"))
    if made.data.name == "digits":
        with pytest.raises(PomonaError, match=message):
            train(made, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_missing_changed_or_damaged_teacher_is_refused(tmp_path):
    train(digits_recipe("dense", epochs=1), tmp_path / "dense")
    file = tmp_path / "dense" / "model.safetensors"
    by_run, by_file = student_recipe({"run": str(tmp_path / "dense")}), student_recipe({"file": str(file)})

    def refuses(made: Recipe, message: str) -> None:
        with pytest.raises(PomonaError, match=message):
            train(made, tmp_path / "run")

    refuses(student_recipe({"run": "gone", "fingerprint": "abc"}), "'gone', is not a finished run: train it first")
    refuses(student_recipe({"run": str(tmp_path / "dense"), "fingerprint": "abc"}), "the teacher of this run has abc")
    save_file(load_file(file), file)  # without the name of the network
    refuses(by_file, "has the hash .*, and that of this run has")
    refuses(student_recipe({"file": str(file)}), "cannot be read: give the model.safetensors of a finished run")
    file.write_bytes(b"no weights")
    refuses(by_run, "the teacher in '.*model.safetensors' cannot be read: .*, or train it again")
    file.unlink()
    refuses(by_file, "teacher.file names '.*', which cannot be read: No such file or directory")
    (tmp_path / "dense" / "summary.json").unlink()
    refuses(by_run, "is not a finished run")
    assert not (tmp_path / "run").exists()


# ---- on a GPU


def gpu_recipe(loop: str, method: str = "dpf(sparsity=0.9, every=4)", teacher: dict | None = None, **train) -> Recipe:
    """Return a recipe with 21 whole batches for each epoch and one of 3 rows."""
    options = {"epochs": 4, "batch_size": 64, "device": "cuda", "loop": loop, **train}
    given = {"name": "test", "data": "digits", "model": "digits_cnn", "method": method, "teacher": teacher or {}}
    return Recipe.load(given | {"rate": "cosine", "optimizer": {"lr": 0.05}, "train": options})


def losses(folder) -> torch.Tensor:
    """Return the training losses of the epochs of a run."""
    return torch.tensor([row["loss"] for row in read_metrics(folder, "epoch")])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("loop", "precision", "method"),
    [
        ("captured", "float32", "dpf(sparsity=0.9, every=4)"),
        ("captured", "float32", "rigl(sparsity=0.9, every=8)"),  # some of its steps are eager
        ("compiled", "bf16", "dpf(sparsity=0.8, every=4)"),
    ],
)
def test_a_captured_run_with_a_teacher_trains_like_an_eager_one(tmp_path, loop, precision, method):
    train(gpu_recipe("eager", "dense"), tmp_path / "dense")
    teacher = {"run": str(tmp_path / "dense"), "weight": 0.5}
    train(gpu_recipe("eager", method, teacher), tmp_path / "eager")
    train(gpu_recipe(loop, method, teacher, precision=precision), tmp_path / loop)
    first = {"rtol": 5e-3, "atol": 1e-3} if precision == "float32" else {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(losses(tmp_path / loop)[0], losses(tmp_path / "eager")[0], **first)
    torch.testing.assert_close(losses(tmp_path / loop), losses(tmp_path / "eager"), rtol=0.15, atol=0.1)


@pytest.mark.gpu
def test_concurrent_students_wait_for_their_teacher(tmp_path):
    dense = gpu_recipe("captured", "dense")
    teacher = {"run": str(tmp_path / "dense"), "fingerprint": dense.fingerprint()}
    students = [gpu_recipe("captured", f"dpf(sparsity={s}, every=4)", teacher) for s in (0.5, 0.8, 0.9)]
    recipes = [*students, dense, gpu_recipe("captured", epochs=1)]
    folders = [*(tmp_path / f"student{k}" for k in range(3)), tmp_path / "dense", tmp_path / "other"]
    jobs = [Job(made, folder) for made, folder in zip(recipes, folders, strict=True)]
    ends = list(concurrent_runs.train_concurrently(jobs, 4, print))
    assert [result.get("error") for _, result in ends] == [None] * 5
    order = [index for index, _ in ends]
    assert set(order[-3:]) == {0, 1, 2}
    alone = train(students[0], tmp_path / "alone")
    torch.testing.assert_close(losses(tmp_path / "student0"), losses(tmp_path / "alone"), rtol=0.15, atol=0.1)
    assert dict(ends)[0]["sparsity"] == alone["sparsity"]
