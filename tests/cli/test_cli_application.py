"""The command-line application: bad input, unexpected errors, version and help."""

from __future__ import annotations

import subprocess
import sys

import pytest
from cli_helpers import read_files

import pomona
from pomona import lab
from pomona.cli import main

BAD_INPUT = {
    "unknown command": (["trian"], "unknown command 'trian': did you mean 'train'?"),
    "unknown flag": (["train", "small.toml", "--jsno"], "--jsno"),
    "missing argument": (["train"], "RECIPE"),
    "number that is none": (["demo", "--seed", "one"], "--seed"),
    "negative seed": (["demo", "--seed", "-1"], "--seed"),
    "share above one": (["bench", "--sparsity", "1.5"], "--sparsity"),
    "unknown engine": (["sweep", "small.toml", "--engine", "rray"], "unknown engine 'rray': did you mean 'ray'?"),
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
        ["--set", "method.pattern=balanced(block=7)"],
        "fits no layer of DigitsCNN: blocks of 7 do not divide the rows of features.0.weight (8×9): 1 would fit",
    ),
    "nothing to prune": (["--set", "model=mlp(hidden=[])"], "has nothing to prune"),
    "data that is not present": (
        ["--set", "data=cifar10", "--set", "model=resnet20"],
        "pomona data --download cifar10",
    ),
    "no run to resume": (["--resume"], "there is no run to resume in 'runs/small'"),
    "file for a folder": (["--out", "small.toml"], "'small.toml' is a file"),
    "unknown download": (["data", "--download", "cifar1"], "did you mean 'cifar10'?"),
    "no download": (["data", "--download", "digits"], "has no download"),
    "demo into a file": (["demo", "--out", "small.toml"], "'small.toml' is a file"),
}


@pytest.mark.parametrize(("arguments", "expected"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input_prints_one_sentence_and_exits_with_2(run_command, work_folder, arguments, expected):
    before = read_files(work_folder)
    if arguments[0].startswith("--"):
        arguments = ["train", "small.toml", *arguments]
    code, out, err = run_command(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert expected in err
    assert err.rstrip().endswith((".", "?"))
    assert "Value error" not in err
    assert "Input should" not in err
    assert read_files(work_folder) == before


def test_an_unexpected_error_prints_one_sentence_and_exits_with_1(run_command, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("the first line\nand the second")

    monkeypatch.setattr(lab, "train", fail)
    code, out, err = run_command("train", "small.toml")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "RuntimeError: the first line)" in err
    assert "POMONA_TRACEBACK=1" in err
    monkeypatch.setenv("POMONA_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        main(["train", "small.toml"])


def test_version_and_help(run_command):
    assert run_command("--version") == (0, f"pomona {pomona.__version__}\n", "")
    code, out, _ = run_command()
    assert code == 0
    for command in ("demo", "train", "methods", "data", "check"):
        assert f"  {command} " in out
        assert run_command(command, "--help")[0] == 0


def test_help_and_version_import_no_slow_package():
    code = """
import sys
from pomona.cli import app, main
import typer
group = typer.main.get_command(app)
bound = group.commands["bound"]
for words in ([], ["--version"], *([name] for name in group.commands), *(["bound", name] for name in bound.commands)):
    assert main(words if words == ["--version"] else [*words, "--help"]) == 0, words
print("imported:", *(name for name in ("torch", "numpy", "scipy", "sklearn") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "pomona bound iterand" in done.stdout
    assert done.stdout.splitlines()[-1] == "imported:"
