"""The captured loop: the same training as the eager one, alone and packed. `pytest -m gpu` on a machine with one."""

from __future__ import annotations

import contextvars
import dataclasses
import json
import queue
import threading
from types import SimpleNamespace

import pytest
import torch
from run_helpers import StopAfter, read_metrics
from safetensors.torch import load_file

from pomona.errors import PomonaError
from pomona.lab.recipes.recipe import Recipe
from pomona.lab.runs import loops
from pomona.lab.runs.concurrency import CONCURRENT_RUN
from pomona.lab.runs.distributed import DistributedContext
from pomona.lab.runs.interruption import Interrupted
from pomona.lab.runs.run_inputs import load_data
from pomona.lab.runs.train import train
from pomona.lab.sweeps import concurrent_runs
from pomona.lab.sweeps.job import Job
from pomona.lab.sweeps.job_queue import JobQueue

gpu = pytest.mark.gpu
METHODS = ["dense", "dpf(sparsity=0.9, every=4)", "incremental(sparsity=0.9, every=4)", "rigl(sparsity=0.9, every=8)",
           "sfp(sparsity=0.4)", "sparse_momentum(sparsity=0.9)", "dsr(sparsity=0.9, every=8)", "snip(sparsity=0.9)",
           "oneshot(sparsity=0.9, at=0.5)"]  # fmt: skip


def recipe(method: str = "dense", loop: str = "captured", model: str = "digits_cnn", **changes: object) -> Recipe:
    """Digits, 1,347 rows in batches of 64: 21 whole ones and one of 3."""
    given = {
        "name": "test",
        "data": "digits",
        "model": model,
        "method": method,
        "rate": "cosine",
        "optimizer": {"lr": 0.05},
        "train": {"epochs": 4, "batch_size": 64, "loop": loop, **changes},
    }
    return Recipe.load(given)


def losses(folder) -> torch.Tensor:
    return torch.tensor([row["loss"] for row in read_metrics(folder, "epoch")])


@pytest.mark.parametrize("loop", ["captured", "compiled"])
def test_a_loop_that_needs_a_gpu_is_refused_without_one(tmp_path, loop):
    with pytest.raises(PomonaError, match=f'train.loop = "{loop}" needs a GPU.*set it to "eager"'):
        train(recipe(loop=loop, device="cpu"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_unknown_loop_is_refused():
    with pytest.raises(PomonaError, match="did you mean 'captured'"):
        recipe(loop="capture")


def test_concurrent_runs_are_refused_without_a_gpu(tmp_path):
    with pytest.raises(PomonaError, match="concurrent runs need a GPU, and 'test' is for 'cpu'"):
        list(concurrent_runs.train_concurrently([Job(recipe(loop="auto", device="cpu"), tmp_path)], 2, print))


def test_an_eager_loop_cannot_run_concurrently():
    one = recipe(loop="eager")
    run = SimpleNamespace(
        recipe=one,
        options=one.train,
        device=torch.device("cuda"),
        processes=DistributedContext(),
        batches=None,
        model=torch.nn.Linear(1, 1),
        networks=[],
        stage_steps=1,
    )
    assert loops.choose_loop(run) == "eager"
    packed_run = contextvars.copy_context()
    packed_run.run(CONCURRENT_RUN.set, True)
    with pytest.raises(PomonaError, match="'test' asks for train.loop = \"eager\", which cannot run concurrently"):
        packed_run.run(loops.choose_loop, run)


def test_concurrent_runs_share_one_copy_of_the_data():
    context, cpu = contextvars.copy_context(), torch.device("cpu")
    context.run(CONCURRENT_RUN.set, True)
    first, again = (context.run(load_data, recipe(), None, cpu) for _ in range(2))
    other = dataclasses.replace(recipe(), data=dataclasses.replace(recipe().data, validation=100))
    assert first is again
    assert context.run(load_data, other, None, cpu).valid is not None
    assert load_data(recipe(), None, cpu) is not first  # one that is alone reads its files


def test_a_thread_that_fails_reports_its_error(monkeypatch, tmp_path):
    """Else whoever waits for its job would wait for ever."""
    told: queue.SimpleQueue = queue.SimpleQueue()
    monkeypatch.setattr(concurrent_runs, "select_device", lambda name: torch.device("meta"))  # has no streams
    waiting = JobQueue([Job(recipe(), tmp_path / "run")])
    thread = threading.Thread(target=concurrent_runs.serve_jobs, args=(waiting, told, threading.Event()))
    thread.start()
    thread.join(10)
    kind, (index, outcome) = told.get_nowait()
    assert (kind, index) == ("done", 0)
    assert "Error: " in outcome["error"]


@gpu
@pytest.mark.parametrize("method", METHODS)
def test_the_captured_loop_trains_like_the_eager_loop(tmp_path, method):
    ends = {loop: train(recipe(method, loop), tmp_path / loop) for loop in ("eager", "captured")}
    eager, captured = (losses(tmp_path / loop) for loop in ("eager", "captured"))
    torch.testing.assert_close(captured[0], eager[0], rtol=5e-3, atol=1e-3)  # then rounding is amplified
    torch.testing.assert_close(captured, eager, rtol=0.15, atol=0.03)
    assert ends["captured"]["sparsity"] == ends["eager"]["sparsity"]
    assert abs(ends["captured"]["accuracy"] - ends["eager"]["accuracy"]) < 4  # of 450 images
    updates = [[row["step"] for row in read_metrics(tmp_path / loop, "update")] for loop in ("eager", "captured")]
    assert updates[0] == updates[1]


@gpu
def test_the_compiled_loop_in_bf16_trains_like_the_eager_loop_in_float32(tmp_path):
    for loop, precision in (("eager", "float32"), ("compiled", "bf16")):
        train(recipe("dpf(sparsity=0.8, every=4)", loop, precision=precision), tmp_path / loop)
    torch.testing.assert_close(losses(tmp_path / "compiled"), losses(tmp_path / "eager"), rtol=0.1, atol=0.05)


@gpu
@pytest.mark.parametrize("method", ["dpf(sparsity=0.9, every=4)", "rigl(sparsity=0.9, every=8)"])
@pytest.mark.parametrize("steps", [22, 30])  # at the end of an epoch, and within one
def test_a_resumed_captured_run_is_bit_identical(tmp_path, method, steps):
    one = recipe(method, model="lenet300", checkpoint_steps=5)  # cuDNN's convolutions add up in any order
    train(one, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(one, tmp_path / "cut", stop=StopAfter(steps))
    train(one, tmp_path / "cut", resume=True)
    assert torch.equal(losses(tmp_path / "cut"), losses(tmp_path / "whole"))
    ends = [load_file(tmp_path / name / "model.safetensors") for name in ("cut", "whole")]
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[1])


@gpu
def test_the_loops_share_their_checkpoints(tmp_path):
    with pytest.raises(Interrupted):
        train(recipe("dpf(sparsity=0.9, every=4)", "captured"), tmp_path / "run", stop=StopAfter(30))
    ended = train(recipe("dpf(sparsity=0.9, every=4)", "eager"), tmp_path / "run", resume=True)
    assert ended["epoch"] == 4


@gpu
@pytest.mark.parametrize("model", ["digits_cnn", "lenet300"])
def test_concurrent_runs_train_as_alone_and_fail_alone(tmp_path, model):
    """Bit for bit without convolutions, where cuDNN chooses its algorithm again in each thread."""
    exact = model == "lenet300"
    methods = [method for method in METHODS if not (exact and method.startswith("sfp"))]  # it has no filters
    recipes = [dataclasses.replace(recipe(method, model=model), seed=k) for k, method in enumerate(methods)]
    wild = dataclasses.replace(recipe(), optimizer=dataclasses.replace(recipe().optimizer, lr=1e9))
    jobs = [Job(one, tmp_path / str(k)) for k, one in enumerate([*recipes, wild])]
    found = dict(concurrent_runs.train_concurrently(jobs, 4, print))
    assert "the loss is" in found[len(recipes)]["error"]
    for k, one in enumerate(recipes):
        assert "error" not in found[k], found[k]
        assert found[k]["seed"] == k
        alone = train(one, tmp_path / f"alone{k}")
        assert found[k]["sparsity"] == alone["sparsity"]
        ours, theirs = losses(tmp_path / str(k)), losses(tmp_path / f"alone{k}")
        torch.testing.assert_close(ours, theirs, rtol=0 if exact else 0.15, atol=0 if exact else 0.03)
        assert found[k]["accuracy"] == alone["accuracy"] or not exact


@gpu
def test_interrupted_concurrent_runs_leave_checkpoints(tmp_path):
    jobs = [Job(recipe("dpf(sparsity=0.9, every=4)", epochs=200), tmp_path / str(k)) for k in range(3)]
    coming = concurrent_runs.train_concurrently([Job(recipe(epochs=1), tmp_path / "short"), *jobs], 4, print)
    assert next(coming)[0] == 0
    coming.close()  # the others are under way
    assert all((job.folder / "checkpoint").exists() and not (job.folder / "summary.json").exists() for job in jobs)
    assert json.loads((tmp_path / "short" / "summary.json").read_text())["epoch"] == 1


@gpu
def test_a_model_with_dropout_is_trained_eagerly_and_not_concurrently(tmp_path):
    settings = {"name": "drop", "data": "digits", "optimizer": {"lr": 0.05}, "train": {"epochs": 1, "batch_size": 512}}
    one = Recipe.load({**settings, "model": "densenet40(dropout=0.2)"})
    ((_, outcome),) = concurrent_runs.train_concurrently([Job(one, tmp_path / "packed")], 2, print)
    assert "'drop' would replay one and the same dropout, so it cannot run concurrently with others" in outcome["error"]
    assert train(one, tmp_path / "alone")["epoch"] == 1
