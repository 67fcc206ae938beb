"""Runs on images from the disk: killed in the middle of an epoch, with other workers, in two processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from image_helpers import make_image_folder
from run_helpers import (
    StopAfter,
    have_same_weights,
    read_metrics,
    run_in_two_processes,
    train_until_killed,
    untimed_metrics,
)

from pomona.data import load
from pomona.errors import PomonaError
from pomona.lab import Interrupted, Recipe, train
from pomona.lab.recipes import bundled
from pomona.lab.recipes.private_recipe import PrivateRecipe
from pomona.lab.runs.evaluate import measure
from pomona.lab.runs.loops import capture_obstacle
from pomona.lab.runs.model_file import load_model
from pomona.lab.runs.private import PrivateStrategy
from pomona.lab.runs.run import prepared_run
from pomona.lab.runs.strategy import TrainingStrategy

FINGERPRINT = "2da2908a8366"  # of dpf-resnet50, before images could stay on the disk
FOLDER_OPTIONS = {"name": "imagefolder", "size": 16, "stream": True, "workers": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_folder(tmp_path_factory.mktemp("images"), train=24)


def streamed_recipe(workers: int = 2, **options) -> Recipe:
    """Return a recipe with six steps of four images in each of its two epochs."""
    return Recipe.load(
        {
            "name": "streamed",
            "data": FOLDER_OPTIONS | {"workers": workers},
            "model": "resnet18(rho=0.0625)" if options.pop("norms", True) else "mlp(hidden=[16])",
            "method": "dpf(sparsity=0.5, every=2)",
            "train": {"epochs": 2, "batch_size": 4, "device": "cpu", "checkpoint_steps": 2, **options},
        }
    )


@pytest.fixture(scope="module")
def undisturbed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "undisturbed"
    train(streamed_recipe(), place, data_dir=folder)
    return place


def test_a_run_killed_within_an_epoch_is_resumed_bit_for_bit_with_other_workers(
    folder: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("POMONA_DATA", str(folder))
    train_until_killed(streamed_recipe(), tmp_path / "run", step=9)
    assert not (tmp_path / "run" / "summary.json").exists()
    train(streamed_recipe(workers=3), tmp_path / "run", resume=True)
    assert have_same_weights(tmp_path / "run", undisturbed)
    assert untimed_metrics(tmp_path / "run") == untimed_metrics(undisturbed)


def test_a_run_that_is_stopped_after_each_step_is_the_undisturbed_one(folder: Path, undisturbed: Path, tmp_path: Path):
    for session in range(12):
        try:
            train(
                streamed_recipe(workers=1 + session % 3),
                tmp_path / "run",
                resume=session > 0,
                data_dir=folder,
                stop=StopAfter(1),
            )
        except Interrupted:
            assert session < 11
    assert have_same_weights(tmp_path / "run", undisturbed)


def test_two_processes_share_each_batch_and_the_evaluation(folder: Path, tmp_path: Path):
    # Without batch norm, gradients of two halves are those of the whole but for the order of the sums.
    recipe = streamed_recipe(norms=False)
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    train(recipe, tmp_path / "alone", data_dir=folder)
    statement = f"train(Recipe.load('{tmp_path}/recipe.toml'), '{tmp_path}/pair', data_dir='{folder}')"
    run_in_two_processes(statement, timeout=300)
    for one, two in zip(*(read_metrics(tmp_path / run, "epoch") for run in ("alone", "pair")), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["test_loss"] == pytest.approx(one["test_loss"], rel=1e-4)
        assert two["accuracy"] == pytest.approx(one["accuracy"])


@pytest.mark.slow
def test_two_processes_resume_bit_for_bit(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "recipe.toml").write_text(streamed_recipe(average=0.5, log_every=1).to_toml())
    call = f"Recipe.load('{tmp_path}/recipe.toml'), '{tmp_path}/{{run}}', data_dir='{folder}'"
    run_in_two_processes(f"train({call.format(run='whole')})", timeout=300)
    stopped = f"""
from pomona.lab import Interrupted
from run_helpers import StopAfter
try:
    train({call.format(run="parts")}, stop=StopAfter(3))
except Interrupted:
    pass
else:
    raise SystemExit("the run was not stopped")
"""
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    run_in_two_processes(stopped, timeout=300)
    run_in_two_processes(f"train({call.format(run='parts')}, resume=True)", timeout=300)
    assert have_same_weights(tmp_path / "parts", tmp_path / "whole")


def test_the_images_of_a_streamed_run_do_not_change_its_fingerprint():
    recipe = Recipe.load(bundled.find_recipe("dpf-resnet50"))
    assert recipe.fingerprint() == FINGERPRINT
    assert Recipe.load(bundled.find_recipe("dpf-resnet50"), ["data.workers=7"]).fingerprint() == FINGERPRINT
    assert Recipe.load(bundled.find_recipe("dpf-resnet50"), ["data.stream=true"]).fingerprint() != FINGERPRINT
    assert Recipe.load_stored(recipe.to_dict()).fingerprint() == FINGERPRINT


def test_a_stream_is_not_captured_and_not_private(folder: Path, tmp_path: Path):
    with prepared_run(TrainingStrategy(streamed_recipe()), folder) as run:
        run.device = torch.device("cuda")  # this machine may have none
        assert capture_obstacle(run) == "needs all images on the GPU, and these stay on the disk"
    private = {"method": "dpsgd", "epsilon": 8.0}
    settings = streamed_recipe(norms=False).to_dict() | {"private": private}
    for key in ("method", "origin", "teacher", "finetune"):
        del settings[key]
    with pytest.raises(PomonaError, match="leaves its images on the disk, .* set data.stream = false"):
        train(PrivateStrategy(PrivateRecipe.load(settings)), tmp_path / "run", data_dir=folder)
    assert not (tmp_path / "run").exists()


def test_a_damaged_image_ends_a_run_that_goes_on_once_it_is_replaced(undisturbed: Path, folder: Path, tmp_path: Path):
    images = tmp_path / "images"
    shutil.copytree(folder, images)
    bad = next(images.glob("train/*/train_7.JPEG"))
    intact = bad.read_bytes()
    bad.write_bytes(intact[:200])
    with pytest.raises(PomonaError, match=r"train_7.JPEG is damaged: .*replace it with an intact copy"):
        train(streamed_recipe(checkpoint_steps=1), tmp_path / "run", data_dir=images)
    bad.write_bytes(intact)
    train(streamed_recipe(checkpoint_steps=1), tmp_path / "run", resume=True, data_dir=images)
    assert have_same_weights(tmp_path / "run", undisturbed)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the test finds processes in /proc")
def test_torchrun_restarts_a_killed_rank_and_the_run_goes_on_bit_for_bit(folder: Path, tmp_path: Path):
    (tmp_path / "recipe.toml").write_text(streamed_recipe(epochs=8, ema=0.9, eval_every=8, norms=False).to_toml())

    def command(run: str) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        train = ["-m", "pomona", "train", str(tmp_path / "recipe.toml"), "--auto-resume", "--data-dir", str(folder)]
        return [*torchrun, "--max-restarts", "2", *train, "--json", "--out", str(tmp_path / run)]

    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command("whole"), check=True, env=environment, capture_output=True, timeout=300)
    with subprocess.Popen(command("killed"), env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + 200
        while not (tmp_path / "killed" / "checkpoint").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        ranks = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        assert not (tmp_path / "killed" / "summary.json").exists()
        os.kill(int(ranks[-1]), signal.SIGKILL)
        _, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors.decode()
    assert b"exitcode: -9" in errors
    assert have_same_weights(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_evaluate_the_model_that_they_store(folder: Path, tmp_path: Path):
    recipe = streamed_recipe(reestimate=0, epochs=1)
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    statement = f"train(Recipe.load('{tmp_path}/recipe.toml'), '{tmp_path}/pair', data_dir='{folder}')"
    run_in_two_processes(statement, timeout=300)
    model = load_model(tmp_path / "pair" / "model.safetensors")
    batches = load(root=folder, **FOLDER_OPTIONS).batches(6, part="test")
    stored = read_metrics(tmp_path / "pair", "epoch")[-1]["test_loss"]
    assert stored == pytest.approx(measure(model, batches.evaluate())["loss"], rel=1e-5)
