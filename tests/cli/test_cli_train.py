"""The command `train`: results, previews, interruption, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_helpers import SMALL_RECIPE, interrupt_run, read_files

import pomona
from pomona import lab
from pomona.cli.train import summary_facts


def test_a_misspelt_key_in_a_recipe_is_refused(run_command):
    Path("small.toml").write_text(SMALL_RECIPE.replace("[train]", "[trian]"))
    code, _, err = run_command("train", "small.toml")
    assert (code, err) == (2, "error: unknown key of the recipe 'trian': did you mean 'train'?\n")


def test_the_facts_of_a_run_tell_zeros_from_pruned_weights():
    counts = {"nonzeros": 1, "params": 2, "macs_left": 1, "macs": 2}
    summary = {"sparsity": 0.9, "zeros": 0.907, "model_sparsity": 0.88, **counts, "seconds": 1.0}
    facts = summary_facts(summary, Path("runs/x"))
    assert facts["sparsity"] == "90.00% of the targets (90.70% are zero), 88.00% of the model"
    for same in ({"zeros": 0.9}, {}):
        facts = summary_facts({key: value for key, value in summary.items() if key != "zeros"} | same, Path("runs/x"))
        assert facts["sparsity"] == "90.00% of the targets, 88.00% of the model"


def test_a_recipe_that_is_not_toml_is_refused(run_command):
    Path("small.toml").write_text("data = digits")
    code, _, err = run_command("train", "small.toml")
    assert code == 2
    assert "is not valid TOML" in err


def test_a_damaged_data_file_is_refused(run_command, work_folder):
    folder = work_folder / "data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    (folder / "data_batch_1.bin").write_bytes(bytes(100))
    before = read_files(work_folder)
    code, _, err = run_command(
        "train", "small.toml", "--set", "data=cifar10", "--set", "model=resnet20", "--data-dir", "data"
    )
    assert code == 2
    assert "data_batch_1.bin is damaged: 100 bytes" in err
    assert read_files(work_folder) == before


def test_an_existing_run_is_not_changed(run_command, work_folder):
    interrupt_run("runs/small", 2)
    before = read_files(work_folder)
    code, _, err = run_command("train", "small.toml")
    assert code == 2
    assert "'runs/small' is not empty: go on with --resume" in err
    code, _, err = run_command("train", "runs/small")
    assert code == 2
    assert "resume the run in this folder with --resume" in err
    code, _, err = run_command("train", "--resume", "small.toml", "--set", "seed=1")
    assert code == 2
    assert "other settings (seed: 1, not 0)" in err
    assert read_files(work_folder) == before


def test_a_checkpoint_of_another_model_is_refused(run_command, work_folder):
    interrupt_run("runs/small", 2)
    other = lab.Recipe.load("small.toml", ["model.rho=0.25"])
    Path("runs/small/recipe.toml").write_text(other.to_toml())
    before = read_files(work_folder)
    code, _, err = run_command("train", "--resume", "runs/small")
    assert code == 2
    assert "is of another model: 'features.0.weight' is 8×1×3×3 there and 4×1×3×3 here" in err
    assert read_files(work_folder) == before


def test_a_truncated_checkpoint_is_replaced_by_the_previous_one(run_command):
    interrupt_run("runs/small", 15)
    tensors = Path("runs/small/checkpoint/tensors.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:100])
    code, out, err = run_command("train", "--resume", "runs/small", "--json")
    assert code == 0
    assert err.startswith("note: 'checkpoint' is damaged")
    assert "continuing from 'checkpoint.previous'" in err
    assert json.loads(out)["epoch"] == 4


@pytest.mark.filterwarnings("ignore:.*holds NaN or inf at step:UserWarning")
def test_a_diverging_run_is_reported(run_command):
    code, _, err = run_command("train", "small.toml", "--set", "optimizer.lr=1e30")
    assert code == 2
    assert "the loss is" in err
    assert "Traceback" not in err


def test_train_writes_a_run_and_prints_its_summary(run_command):
    code, out, err = run_command("train", "small.toml", "--set", "method.sparsity=0.5", "--name", "half")
    assert code == 0
    summary = json.loads(Path("runs/half/summary.json").read_text())
    assert summary["sparsity"] == pytest.approx(0.5, abs=1e-3)
    assert f"{summary['accuracy']:.2f} %" in out
    assert "runs/half" in out
    lines = err.splitlines()
    assert [line.split(" · ")[0] for line in lines] == [f"half: epoch {k}/4" for k in (1, 2, 3, 4)]
    assert all(word in lines[-1] for word in ("loss", "accuracy", "sparsity 50.0 %", "images/s", "0:00 left"))


def test_train_prints_only_the_summary_as_json(run_command):
    code, out, err = run_command("train", "small.toml", "--out", "elsewhere", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(Path("elsewhere/summary.json").read_text())


def test_dry_run_prints_the_recipe_and_writes_nothing(run_command, work_folder):
    before = read_files(work_folder)
    code, out, err = run_command("train", "small.toml", "--dry-run", "--set", "seed=7")
    assert (code, err) == (0, "")
    assert out.startswith(lab.Recipe.load("small.toml", ["seed=7"]).to_toml())
    assert "runs/small" in out
    assert "24, 6 per epoch" in out
    code, out, err = run_command("train", "small.toml", "--dry-run", "--json")
    plan = json.loads(out)
    assert plan["recipe"] == lab.Recipe.load("small.toml").to_dict()
    assert (plan["would"], plan["folder"], plan["steps"]) == ("train", "runs/small", 24)
    assert read_files(work_folder) == before


def test_resuming_a_complete_run_does_nothing(run_command, work_folder):
    _, first, _ = run_command("train", "small.toml", "--json")
    before = read_files(work_folder)
    code, again, _ = run_command("train", "small.toml", "--resume", "--json")
    assert (code, again) == (0, first)
    assert "nothing: the run is complete" in run_command("train", "small.toml", "--resume", "--dry-run")[1]
    assert read_files(work_folder) == before


def test_ctrl_c_writes_a_checkpoint_and_prints_the_command_that_resumes(run_command, work_folder):
    settings = ["--set", "train.epochs=40", "--set", "model.rho=0.25", "--set", "train.reestimate=0"]
    command = [sys.executable, "-m", "pomona", "train", "small.toml", *settings, "--out", "runs/a run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(pomona.__file__).parents[1])}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = Path("runs/a run/metrics.jsonl")
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert err.splitlines()[-1].endswith("to continue: pomona train --resume 'runs/a run'")
    assert not Path("runs/a run/summary.json").exists()
    code, out, _ = run_command("train", "--resume", "runs/a run", "--json")
    assert code == 0
    assert json.loads(out)["epoch"] == 40


def test_auto_resume_starts_a_run_or_continues_it(run_command):
    assert run_command("train", "small.toml", "--name", "whole")[0] == 0
    interrupt_run("runs/small", 2)
    for folder in ("runs/small", "runs/new"):
        assert run_command("train", "small.toml", "--auto-resume", "--out", folder)[0] == 0
        assert read_files(Path(folder))["model.safetensors"] == read_files(Path("runs/whole"))["model.safetensors"]


def test_a_second_ctrl_c_prints_the_command_that_resumes(run_command, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    interrupt_run("runs/small", 2)
    monkeypatch.setattr(lab, "train", interrupt)
    assert run_command("train", "small.toml", "--name", "new") == (
        130,
        "",
        "stopped before the first checkpoint: there is nothing to resume.\n",
    )
    code, _, err = run_command("train", "small.toml", "--resume", "--data-dir", "mine")
    assert code == 130
    assert err.endswith("last checkpoint: pomona train --resume runs/small --data-dir mine\n")
