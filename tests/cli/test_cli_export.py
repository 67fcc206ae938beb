"""`pomona export`: the network of a run in every format, with notes about what was not gained."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from cli_helpers import SMALL_RECIPE
from safetensors.torch import load_file

import pomona as pm
from pomona import lab


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run with 90 % unstructured zeros."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "small.toml").write_text(SMALL_RECIPE)
    lab.train(lab.Recipe.load(folder / "small.toml"), folder / "run")
    return folder / "run"


@pytest.fixture
def run(trained: Path, work_folder: Path) -> Path:
    """Return a copy of the run in the working directory."""
    return shutil.copytree(trained, work_folder / "run")


def test_a_state_without_zeros_loads_by_its_name(run: Path, run_command) -> None:
    code, out, err = run_command("export", "run", "--format", "csr", "--seconds", "0", "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["file"] == "run/csr.safetensors"
    assert facts["bytes"] == (run / "csr.safetensors").stat().st_size < facts["state_bytes"] / 3
    assert facts["difference"] <= facts["tolerance"]
    state = load_file(run / "model.safetensors")
    assert all(torch.equal(value, state[name]) for name, value in pm.load(facts["file"]).state_dict().items())
    assert err.splitlines() == [f"note: {sentence}" for sentence in facts["warnings"]]


def test_a_balanced_file_that_holds_dense_weights_says_so(run: Path, run_command, monkeypatch) -> None:
    module = sys.modules[pm.compress.__module__]  # the function hides the module of its name
    monkeypatch.setattr(module, "time_layer", lambda *_: {"dense": 1.0, "balanced": 2.0})
    monkeypatch.setattr(module, "plan_copy", lambda *_: None)  # the whole network in one call is no choice either
    code, out, err = run_command("export", "run", "--seconds", "0")
    assert code == 0
    assert "note: nothing was packed: every layer is faster with dense weights here" in err
    size = (run / "balanced.safetensors").stat().st_size
    dense = sum(value.nbytes for value in load_file(run / "model.safetensors").values())
    assert f"note: nothing became smaller: 'run/balanced.safetensors' has {size:,} bytes where" in err
    assert f"{dense:,}." in err
    assert "packed network" not in out


def test_the_table_shows_bytes_and_latency(run: Path, run_command) -> None:
    code, out, _ = run_command("export", "run", "--format", "safetensors", "--out", "plain", "--seconds", "0")
    assert code == 0
    for shown in ("plain", "bytes", "ms, batch 1, one thread", "largest difference", "zeros"):
        assert shown in out
    assert set(load_file("plain")) == set(load_file(run / "model.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize(("file_format", "name"), [("onnx", "model.onnx"), ("openvino", "model.xml")])
def test_a_run_is_written_for_another_runtime(file_format: str, name: str, run: Path, run_command) -> None:
    pytest.importorskip("onnxruntime" if file_format == "onnx" else "openvino")
    code, out, _ = run_command("export", "run", "--format", file_format, "--no-pack", "--seconds", "0", "--json")
    assert code == 0
    assert json.loads(out)["packed"] is None
    assert (run / name).is_file()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--format", "oonx"], "unknown format 'oonx': did you mean 'onnx'?"),
        (["--format", "csr", "--policy", "all"], "the format csr has no option policy; its options: architecture."),
        (["--format", "ticket"], "trained weights: a ticket holds random ones"),
        (["--dtype", "float8"], "unknown dtype 'float8'"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(arguments: list[str], expected: str, run: Path, assert_refused) -> None:
    assert_refused(["export", "run", *arguments], expected)
