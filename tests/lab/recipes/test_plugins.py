"""Plugins: a user's module that registers a method and a pattern, used by the command line and its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pomona as pm
from pomona.lab.recipes import plugins

PLUGIN = '''
from dataclasses import dataclass

import torch

from pomona.methods import method
from pomona.methods._single_update import SingleUpdate
from pomona.patterns import PATTERNS, Unstructured


@PATTERNS.register("checkerboard")
@dataclass(frozen=True)
class Checkerboard(Unstructured):
    """Keep every second weight, whatever the scores are."""

    @property
    def sparsity(self):
        return 0.5

    def select_masks(self, scores, sparsity):
        return [(torch.arange(s.numel(), device=s.device) % 2 == 0).view(s.shape) for s in scores]


@method("last_rows", paper="a scratch method", weights="hard")
@dataclass(frozen=True, kw_only=True)
class LastRows(SingleUpdate):
    """Keep the weights of the last rows."""

    def update(self, targets, sparsity):
        positions = {name: torch.arange(float(w.numel())).view(w.shape) for name, w in targets.latent.items()}
        return self.select(targets, positions, sparsity)
'''


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "my_plugin.py").write_text(PLUGIN)
    return tmp_path


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a folder."""
    root = str(Path(pm.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-m", "pomona", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_sweep_in_two_processes_uses_a_method_and_a_pattern_of_a_plugin(scratch: Path) -> None:
    done = run(
        scratch,
        *("--plugin", "my_plugin", "sweep", "digits-dpf", "--jobs", "2", "--json"),
        *("--over", "method=last_rows(sparsity=0.5),oneshot(sparsity=0.5,pattern='checkerboard')"),
        *("--set", "train.epochs=1"),
    )
    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout)["cells"]
    assert {cell["method"] for cell in cells} == {"last_rows", "oneshot"}
    assert all(cell["runs"] == 1 for cell in cells)


def test_the_environment_variable_names_plugins_too(scratch: Path) -> None:
    done = run(scratch, "methods", "--json", POMONA_PLUGINS="my_plugin")
    assert "last_rows" in {entry["name"] for entry in json.loads(done.stdout)}
    assert "last_rows" not in {entry["name"] for entry in json.loads(run(scratch, "methods", "--json").stdout)}


def test_a_plugin_that_cannot_be_imported_is_refused(scratch: Path) -> None:
    done = run(scratch, "--plugin", "no_such_module", "methods")
    assert done.returncode == 2
    assert "error: plugin 'no_such_module' cannot be imported (ModuleNotFoundError" in done.stderr
    assert "Traceback" not in done.stderr


def test_plugins_are_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugins.VARIABLE, "json")
    plugins.add_plugins(["math", "json"])
    assert os.environ[plugins.VARIABLE] == "json,math"
