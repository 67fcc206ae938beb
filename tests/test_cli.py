"""The command line: what it prints, how it refuses, and how a run is stopped and taken up again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pomona
from pomona import lab
from pomona.cli import main
from pomona.lab.recipes.bundled import recipes
from pomona.methods import METHODS

SMALL = """
data = "digits"
model = "digits_cnn(rho=0.5)"
method = "dpf(sparsity=0.9, every=2)"

[train]
epochs = 4
batch_size = 256
device = "cpu"
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a small recipe and no data but the digits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POMONA_DATA", raising=False)
    monkeypatch.delenv("POMONA_TRACEBACK", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("small.toml").write_text(SMALL)
    return tmp_path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]):
    """Run a command; its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, with what it holds."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stopped(folder: str, steps: int, *settings: str) -> None:
    """A run that was stopped after some steps (an epoch has six)."""
    left = iter(range(steps - 1))
    with pytest.raises(lab.Interrupted):
        lab.train(lab.Recipe.load("small.toml", settings), folder, stop=lambda: next(left, None) is None)


# ---- what cannot be done

BAD = {
    "unknown command": (["trian"], "unknown command 'trian': did you mean 'train'?"),
    "unknown flag": (["train", "small.toml", "--jsno"], "--jsno"),
    "missing argument": (["train"], "RECIPE"),
    "number that is none": (["demo", "--seed", "one"], "--seed"),
    "negative seed": (["demo", "--seed", "-1"], "--seed"),
    "unknown recipe": (["train", "dpf-resnet2"], "did you mean 'dpf-resnet20'?"),
    "missing recipe file": (["train", "no/such.toml"], "there is no recipe 'no/such.toml'"),
    "unknown method": (["--set", "method.name=dfp"], "unknown method 'dfp': did you mean 'dpf'?"),
    "unknown model": (["--set", "model=resnet2"], "unknown model 'resnet2': did you mean 'resnet20'?"),
    "unknown data set": (["--set", "data=cifar1"], "unknown data set 'cifar1': did you mean 'cifar10'?"),
    "unknown method option": (["--set", "method.evry=4"], "did you mean 'every'?"),
    "unknown model option": (["--set", "model.roh=1.0"], "did you mean 'rho'?"),
    "misspelt section": (["--set", "optimiser.lr=0.1"], "did you mean 'optimizer'?"),
    "misspelt key": (["--set", "train.epoch=3"], "did you mean 'epochs'?"),
    "wrong type": (["--set", "train.epochs=many"], "train.epochs takes int, got 'many'"),
    "no value": (["--set", "train.epochs"], "key=value"),
    "sparsity of one": (["--set", "method.sparsity=1.0"], "[0, 1)"),
    "sparsity below zero": (["--set", "method.sparsity=-0.1"], "[0, 1)"),
    "pattern that does not divide": (
        ["--set", "method.pattern=balanced(block=6)"],
        "features.0.weight (8×9): 3 would fit",
    ),
    "nothing to prune": (["--set", "model=mlp(hidden=[])"], "has nothing to prune"),
    "data that is not here": (["--set", "data=cifar10", "--set", "model=resnet20"], "pomona data --download cifar10"),
    "no run to resume": (["--resume"], "there is no run to resume in 'runs/small'"),
    "file for a folder": (["--out", "small.toml"], "'small.toml' is a file"),
    "unknown download": (["data", "--download", "cifar1"], "did you mean 'cifar10'?"),
    "no download": (["data", "--download", "digits"], "has no download"),
    "demo into a file": (["demo", "--out", "small.toml"], "'small.toml' is a file"),
}


@pytest.mark.parametrize(("arguments", "expected"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_sentence_and_code_two_and_writes_nothing(call, here, arguments, expected):
    before = tree(here)
    if arguments[0].startswith("--"):
        arguments = ["train", "small.toml", *arguments]
    code, out, err = call(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert expected in err
    assert tree(here) == before


def test_misspelt_key_in_a_file(call):
    Path("small.toml").write_text(SMALL.replace("[train]", "[trian]"))
    code, _, err = call("train", "small.toml")
    assert (code, err) == (2, "error: unknown key of the recipe 'trian': did you mean 'train'?\n")


def test_recipe_that_is_no_toml(call):
    Path("small.toml").write_text("data = digits")
    code, _, err = call("train", "small.toml")
    assert code == 2
    assert "is no valid TOML" in err


def test_damaged_data_file(call, here):
    folder = here / "data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    (folder / "data_batch_1.bin").write_bytes(bytes(100))
    before = tree(here)
    code, _, err = call("train", "small.toml", "--set", "data=cifar10", "--set", "model=resnet20", "--data-dir", "data")
    assert code == 2
    assert "data_batch_1.bin is damaged: 100 bytes" in err
    assert tree(here) == before


def test_existing_run_is_not_touched(call, here):
    stopped("runs/small", 2)
    before = tree(here)
    code, _, err = call("train", "small.toml")
    assert code == 2
    assert "'runs/small' is not empty: go on with --resume" in err
    code, _, err = call("train", "runs/small")
    assert code == 2
    assert "resume the run in it with --resume" in err
    code, _, err = call("train", "--resume", "small.toml", "--set", "seed=1")
    assert code == 2
    assert "other settings (seed: 1, not 0)" in err
    assert tree(here) == before


def test_checkpoint_of_another_model(call, here):
    stopped("runs/small", 2)
    other = lab.Recipe.load("small.toml", ["model.rho=0.25"])
    Path("runs/small/recipe.toml").write_text(other.to_toml())
    before = tree(here)
    code, _, err = call("train", "--resume", "runs/small")
    assert code == 2
    assert "is of another model: 'features.0.weight' is 8×1×3×3 there and 4×1×3×3 here" in err
    assert tree(here) == before


def test_truncated_checkpoint_falls_back_to_the_one_before(call):
    stopped("runs/small", 15)
    tensors = Path("runs/small/checkpoint/tensors.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:100])
    code, out, err = call("train", "--resume", "runs/small", "--json")
    assert code == 0
    assert err.startswith("note: 'checkpoint' is damaged")
    assert "going on from 'checkpoint.previous'" in err
    assert json.loads(out)["epoch"] == 4


def test_diverging_run_names_the_step(call):
    code, _, err = call("train", "small.toml", "--set", "optimizer.lr=1e30")
    assert code == 2
    assert "the loss is" in err
    assert "Traceback" not in err


def test_unforeseen_error_is_one_sentence_and_code_one(call, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("the first line\nand the second")

    monkeypatch.setattr(lab, "train", fail)
    code, out, err = call("train", "small.toml")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "RuntimeError: the first line)" in err
    assert "POMONA_TRACEBACK=1" in err
    monkeypatch.setenv("POMONA_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        main(["train", "small.toml"])


# ---- what can


def test_train_writes_a_run_and_tells_what_was_reached(call):
    code, out, err = call("train", "small.toml", "--set", "method.sparsity=0.5", "--name", "half")
    assert code == 0
    summary = json.loads(Path("runs/half/summary.json").read_text())
    assert summary["sparsity"] == pytest.approx(0.5, abs=1e-3)
    assert f"{summary['accuracy']:.2f} %" in out
    assert "runs/half" in out
    lines = err.splitlines()
    assert [line.split(" · ")[0] for line in lines] == [f"half: epoch {k}/4" for k in (1, 2, 3, 4)]
    assert all(word in lines[-1] for word in ("loss", "accuracy", "sparsity 50.0 %", "images/s", "0:00 left"))


def test_train_as_json_is_the_summary_and_nothing_else(call):
    code, out, err = call("train", "small.toml", "--out", "elsewhere", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(Path("elsewhere/summary.json").read_text())


def test_dry_run_shows_everything_and_writes_nothing(call, here):
    before = tree(here)
    code, out, err = call("train", "small.toml", "--dry-run", "--set", "seed=7")
    assert (code, err) == (0, "")
    assert out.startswith(lab.Recipe.load("small.toml", ["seed=7"]).to_toml())
    assert "runs/small" in out
    assert "24, 6 an epoch" in out
    code, out, err = call("train", "small.toml", "--dry-run", "--json")
    plan = json.loads(out)
    assert plan["recipe"] == lab.Recipe.load("small.toml").to_dict()
    assert (plan["would"], plan["folder"], plan["steps"]) == ("train", "runs/small", 24)
    assert tree(here) == before


def test_complete_run_is_resumed_by_doing_nothing(call, here):
    _, first, _ = call("train", "small.toml", "--json")
    before = tree(here)
    code, again, _ = call("train", "small.toml", "--resume", "--json")
    assert (code, again) == (0, first)
    assert "nothing: the run is complete" in call("train", "small.toml", "--resume", "--dry-run")[1]
    assert tree(here) == before


def test_ctrl_c_stops_with_a_checkpoint_and_the_command_that_goes_on(call, here):
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
    assert err.splitlines()[-1].endswith("to go on: pomona train --resume 'runs/a run'")
    assert not Path("runs/a run/summary.json").exists()
    code, out, _ = call("train", "--resume", "runs/a run", "--json")
    assert code == 0
    assert json.loads(out)["epoch"] == 40


def test_second_ctrl_c_still_names_the_last_checkpoint(call, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    stopped("runs/small", 2)
    monkeypatch.setattr(lab, "train", interrupt)
    assert call("train", "small.toml", "--name", "new") == (130, "", "stopped before there was anything to resume.\n")
    code, _, err = call("train", "small.toml", "--resume", "--data-dir", "mine")
    assert code == 130
    assert err.endswith("last checkpoint: pomona train --resume runs/small --data-dir mine\n")


def test_methods_as_json_are_the_registry(call):
    code, out, err = call("methods", "--json")
    records = {record["name"]: record for record in json.loads(out)}
    assert (code, err) == (0, "")
    assert set(records) == set(METHODS)
    dpf = records["dpf"]
    assert (dpf["paper"], dpf["weights"]) == ("Lin et al., ICLR 2020", "soft")
    assert dpf["options"]["every"] == 16
    assert dpf["options"]["schedule"] == {"name": "cubic", "start": 0.0, "until": 0.75}
    for record in records.values():  # the options as printed make the method they were read from
        assert METHODS.resolve({"name": record["name"], **record["options"]}) == METHODS[record["name"]]()


def test_data_tells_what_is_here_and_how_to_get_the_rest(call, here):
    code, out, _ = call("data", "--json", "--data-dir", "mine")
    entries = {entry["name"]: entry for entry in json.loads(out)}
    assert code == 0
    assert entries["digits"]["present"]
    assert not entries["cifar10"]["present"]
    assert entries["cifar10"]["looked"][0] == "mine/cifar-10-batches-bin"
    (here / "mine" / "cifar-10-batches-bin").mkdir(parents=True)
    _, out, _ = call("data", "--json", "--data-dir", "mine")
    assert next(e for e in json.loads(out) if e["name"] == "cifar10")["path"] == "mine/cifar-10-batches-bin"


def test_check_tells_what_the_machine_has(call):
    import torch

    code, out, _ = call("check", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == sys.version.split()[0]
    assert found["machine"]["cores"] == os.cpu_count()
    assert len(found["machine"]["gpus"]) == torch.cuda.device_count()
    assert found["data"] == ["digits"]


@pytest.mark.parametrize("command", ["methods", "data", "check"])
def test_tables_for_people(call, command):
    code, out, err = call(command)
    assert (code, err) == (0, "")
    assert {"methods": "dpf", "data": "pomona data --download cifar10", "check": "torch"}[command] in out


def test_version_and_help(call):
    assert call("--version") == (0, f"pomona {pomona.__version__}\n", "")
    code, out, _ = call()
    assert code == 0
    for command in ("demo", "train", "methods", "data", "check"):
        assert f"  {command} " in out
        assert call(command, "--help")[0] == 0


def test_shipped_recipes_load_by_name_as_the_paper_has_them():
    shipped = {name: lab.Recipe.load(path) for name, path in recipes().items()}
    assert set(shipped) >= {"dpf-resnet20", "dpf-wrn28_2", "dense-resnet20", "digits-dpf"}
    assert all(recipe.name == name for name, recipe in shipped.items())
    resnet, wide = shipped["dpf-resnet20"], shipped["dpf-wrn28_2"]
    rates = [recipe.rate.over(recipe.optimizer.lr, recipe.train.epochs, 1) for recipe in (resnet, wide)]
    # Section 5 and appendix A.1: ResNet ×0.1 at 150 and 225 of 300 epochs, WideResNet ×0.2 at 60, 120, 160 of 200.
    assert [rates[0](e) for e in (0, 149, 150, 224, 225, 299)] == pytest.approx([0.2, 0.2, 0.02, 0.02, 0.002, 0.002])
    assert [rates[1](e) for e in (0, 59, 60, 119, 120, 160)] == pytest.approx([0.1, 0.1, 0.02, 0.02, 0.004, 0.0008])
    assert resnet.method["schedule"]["until"] * 300 == 225
    assert wide.method["schedule"]["until"] * 200 == 120
    dense = shipped["dense-resnet20"]
    assert {d.split(":")[0].split(".")[0] for d in dense.differences(resnet)} == {"method"}


# ---- sweep, retrain, shrink


def test_sweep_runs_every_cell_and_goes_on_with_what_is_missing(call):
    axes = ["--over", "method=random,oneshot", "--over", "method.sparsity=0.5,0.8", "--set", "train.epochs=1"]
    code, out, err = call("sweep", "small.toml", *axes, "--jobs", "1", "--out", "grid", "--json")
    assert code == 0, err
    cells = json.loads(out)["cells"]
    assert {(cell["method"], cell["sparsity"]) for cell in cells} == {
        (method, sparsity) for method in ("random", "oneshot") for sparsity in (0.5, 0.8)
    }
    before = tree(Path("grid"))
    code, out, err = call("sweep", "small.toml", *axes, "--jobs", "1", "--out", "grid", "--only-missing", "--json")
    assert code == 0, err
    assert json.loads(out)["cells"] == cells
    assert {k: v for k, v in tree(Path("grid")).items() if "sweep" not in k} == {
        k: v for k, v in before.items() if "sweep" not in k
    }


TABLE = """
title = "digits"
paper = "nobody, table 0"
seeds = [0]
columns = { dense = { method = "dense" }, DPF = { "method.settle" = 0 } }

[[part]]
label = "CNN"
rows = { "method.sparsity" = [0.5] }
recipe = { data = "digits", model = "digits_cnn(rho=0.5)", method = "dpf(every=2)" }
set = { "train.epochs" = 1, "train.batch_size" = 256, "train.device" = "cpu" }
paper = { dense = "95.01 ± 0.04", DPF = "*" }
"""


def test_a_table_is_filled_shown_and_kept(call):
    Path("mine.toml").write_text(TABLE)
    code, out, err = call("table", "mine.toml")
    assert code == 0, err
    assert "0 of 2 cells complete, 2 of 2 runs missing" in out
    assert "95.01 ± 0.04" in out
    code, out, err = call("sweep", "mine.toml", "--only", "column=DPF", "--jobs", "1", "--keep", "--json")
    assert code == 0, err
    (cell,) = json.loads(out)["cells"]
    assert (cell["method"], cell["sparsity"], cell["runs"], cell["paper"]) == ("dpf", 0.5, 1, None)
    (record,) = Path("results/runs").glob("*.json")
    assert json.loads(record.read_text())["accuracy"] == cell["mean"]
    code, out, err = call("table", "mine.toml", "--json")
    shown = json.loads(out)
    assert [c["mean"] for c in shown["cells"]] == [None, cell["mean"]]
    assert shown["missing"] == 1
    code, out, err = call("table", "mine.toml", "--markdown")
    assert f"{cell['mean']:.2f} ×1<br>*" in out
    code, out, err = call("sweep", "mine.toml", "--dry-run", "--json")
    assert [run["state"] for run in json.loads(out)] == ["missing", "complete"]


def test_under_torchrun_one_process_speaks(call, monkeypatch):
    Path("mine.toml").write_text(TABLE)
    spoken = call("sweep", "mine.toml", "--dry-run")
    monkeypatch.setenv("RANK", "1")
    assert call("sweep", "mine.toml", "--dry-run") == (0, "", "")
    assert "digits_cnn-dense" in spoken[1]


def test_a_table_with_nothing_in_it_is_shown(call, monkeypatch):
    from pomona.lab.tables import definitions as papers

    monkeypatch.setattr(papers, "computed", lambda: {"nil": lambda: {"title": "T", "paper": "P", "cells": []}})
    for option in ([], ["--markdown"]):
        code, out, err = call("table", "nil", *option)
        assert (code, err) == (0, "")
        assert "nothing was measured yet" in out
    assert json.loads(call("table", "nil", "--json")[1])["cells"] == []


def test_a_bare_table_lists_them_all(call, here):
    before = tree(here)
    code, out, err = call("table", "--json")
    assert code == 0, err
    found = {table["name"]: table for table in json.loads(out)}
    assert {"dpf-table1", "dpf-figure12"} <= found.keys()
    assert found["dpf-table2"]["missing"] <= found["dpf-table2"]["runs"] == 135
    assert tree(here) == before


def test_tuning_says_how_to_use_what_it_found(call):
    run = ["sweep", "small.toml", "--set", "train.epochs=1", "--jobs", "1", "--tune"]
    code, out, err = call(*run, "lr=0.05,0.1", "--json")
    assert code == 0, err
    best = json.loads(out)["best"]
    code, out, err = call(*run, "lr=0.05,0.1")
    assert f"to use it: --set optimizer.lr={best:g}" in out
    assert " of " not in err  # all of it was there
    code, out, err = call(*run, "lr", "--dry-run")
    assert out == "optimizer.lr: 0.025, 0.05, 0.075, 0.1\n"


def test_retrain_sets_a_mask_beside_its_run(call):
    code, _, err = call("train", "small.toml", "--set", "train.epochs=1", "--out", "run")
    assert code == 0, err
    code, out, err = call("retrain", "run", "--from", "init", "--json")
    assert code == 0, err
    first, second = json.loads(out)["runs"]
    assert first["sparsity"] == pytest.approx(second["sparsity"])


def test_shrink_writes_a_smaller_network(call):
    settings = ["--set", 'method="oneshot(pattern=\\"filter\\", sparsity=0.5, at=0.5)"', "--set", "train.epochs=1"]
    code, _, err = call("train", "small.toml", *settings, "--out", "run")
    assert code == 0, err
    code, out, err = call("shrink", "run", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["params"]["after"] < told["params"]["before"]
    assert Path(told["file"]).is_file()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["sweep", "small.toml", "--over", "method=dfp"], "did you mean 'dpf'?"),
        (["sweep", "small.toml", "--over", "method.sparsity"], "method.sparsity"),
        (["sweep", "small.toml", "--set", "train.device=cpu", "--packed", "4"], "runs are packed on a GPU"),
        (["sweep", "small.toml", "--packed", "4", "--jobs", "2"], "give packed or jobs"),
        (["sweep", "small.toml", "--only", "seed=0"], "--only is not for a recipe"),
        (["sweep", "dpf-table1", "--over", "seed=0"], "--over is not for a table"),
        (["sweep", "dpf-table1", "--tune", "lr"], "--tune is not for a table"),
        (["sweep", "small.toml", "--tune", "lr", "--keep"], "--keep is not for tuning"),
        (["sweep", "small.toml", "--tune", "lr", "--over", "train.clip=1.0"], "leave out --over train.clip"),
        (["sweep", "small.toml", "--tune", "lrr"], "did you mean 'lr'?"),
        (["table", "dpf-tabel1"], "did you mean 'dpf-table1'?"),
        (["table", "small.toml"], "'small.toml' is a recipe, no table"),
        (["table", "dpf-resnet20"], "'dpf-resnet20' is a recipe, no table"),
        (["table", "dpf-table1", "--only", "sparsity=0.1"], "unknown sparsity of dpf-table1 '0.1'"),
        (["table", "dpf-table1", "--only", "label=resnet-20"], "did you mean 'ResNet-20'?"),
        (["table", "dpf-table1", "--set", "seed=5"], "seed is what its runs differ in"),
        (["table", "dpf-table1", "--runs", "nowhere"], "'nowhere' is none"),
        (["table", "dpf-table1", "--markdown", "--json"], "give --markdown or --json"),
        (["table", "--only", "seed=0"], "--only is for one table"),
        (["table", "gip", "--only", "seed=0"], "gip is computed, not trained"),
        (["table", "dpf-table1", "--set", "train.epoch=3"], "did you mean 'epochs'?"),
        (["retrain", "nowhere"], "is no run"),
        (["shrink", "nowhere"], "is no finished run"),
    ],
)
def test_what_these_refuse(call, here, arguments, expected):
    before = tree(here)
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert expected in err
    assert err.count("\n") == 1
    assert tree(here) == before
