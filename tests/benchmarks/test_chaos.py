"""The harness of chaos.py: runs survive its faults, and it finds a run that does not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MEASURE = Path(__file__).parents[2] / "benchmarks" / "measure"
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it harms the processes of Linux")


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own: faults are injected into forks, which must not have the tests' threads."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def subject(load_script: Callable[[str], Any]) -> Any:
    """Return the subject that trains the quickest."""
    return next(one for one in load_script("chaos_runs").SUBJECTS if one.name == "rigl")


@pytest.fixture(scope="module")
def undisturbed(subject: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of its undisturbed run."""
    folder = tmp_path_factory.mktemp("chaos") / "undisturbed"
    subject.go_on(folder, lambda text: None)
    return folder


def test_runs_survive_ten_faults(tmp_path: Path) -> None:
    record = tmp_path / "chaos.json"
    names = "rigl,dpsgd,cells"
    done = run_python(
        str(MEASURE / "chaos.py"), "--faults", "10", "--fuzz", "0", "--subjects", names, "--json", str(record)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    faults = json.loads(record.read_text())["faults"]
    assert faults["injected"] >= 10
    assert faults["survived"] == faults["injected"] == sum(faults["kinds"].values())
    assert faults["lost"] == 0
    assert faults["lost_cases"] == []
    assert f"faults injected: {faults['injected']}, survived: {faults['injected']}, lost: 0" in done.stdout


BROKEN = """
import os, sys, tempfile
from pathlib import Path

sys.path.insert(0, sys.argv[1])
os.environ["CHAOS_STARTED"] = "1"
from chaos_cases import harm_runs
from pomona.lab.runs import resume

resume._load_optimizer = lambda optimizer, state: None  # a resumed run has lost its momentum
print(harm_runs(4, 0, 2, ["rigl"], Path(sys.argv[2]))["lost_cases"])
"""


@pytest.mark.slow
def test_a_resume_that_loses_something_is_found(tmp_path: Path) -> None:
    done = run_python("-c", BROKEN, str(MEASURE), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "model.safetensors differs" in done.stdout


def change_weight(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def change_accuracy(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"accuracy": 100.0}))


def swap_lines(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(reversed(lines)))


HARM = {
    "model.safetensors": change_weight,
    "masks.safetensors": lambda folder: (folder / "masks.safetensors").unlink(),
    "recipe.toml": lambda folder: os.truncate(folder / "recipe.toml", 9),
    "summary.json": change_accuracy,
    "metrics.jsonl": swap_lines,
}


@pytest.mark.parametrize("name", list(HARM))
def test_every_difference_is_found(
    name: str, subject: Any, undisturbed: Path, tmp_path: Path, load_script: Callable[[str], Any]
) -> None:
    compare, folder = load_script("chaos_runs").compare, tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    assert compare(subject, folder, undisturbed) == []
    HARM[name](folder)
    assert compare(subject, folder, undisturbed, lines_lost=True) == [f"run: {name} differs"]


def test_lines_may_be_missing_only_where_a_note_says_so(
    subject: Any, undisturbed: Path, tmp_path: Path, load_script: Callable[[str], Any]
) -> None:
    compare, folder = load_script("chaos_runs").compare, tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:1] + lines[2:]))
    assert compare(subject, folder, undisturbed) == ["run: metrics.jsonl differs"]
    assert compare(subject, folder, undisturbed, lines_lost=True) == []


def test_an_error_that_is_no_sentence_is_lost(load_script: Callable[[str], Any], subject: Any, tmp_path: Path) -> None:
    faults, sessions = load_script("chaos_faults"), load_script("chaos_sessions")
    case = faults.Case(subject, tmp_path, None, 1.0, ())
    case.record(sessions.Outcome("refused", "the disk is full."))
    assert case.failures == []
    case.record(sessions.Outcome("crashed", "KeyError: 'step'"))
    case.record(sessions.Outcome("hung", "it still ran"))
    assert case.failures == ["crashed: KeyError: 'step'", "hung: it still ran"]
    results = [load_script("chaos_cases").CaseResult(0, "rigl", "training", ["disk full"] * 2, [], case.failures)]
    found = load_script("chaos_cases").summarize(results)
    assert (found["injected"], found["survived"], found["lost"]) == (2, 0, 2)
