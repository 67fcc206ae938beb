"""The oldest versions that pyproject.toml allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def test_minimum_versions_are_read_from_a_project(load_script: Any, tmp_path: Path) -> None:
    read, project = load_script("minimum_versions").minimum_versions, tmp_path / "pyproject.toml"
    project.write_text('[project]\ndependencies = ["torch>=2.9", "scikit-learn >= 1.4, <2"]\n')
    assert read(project) == {"torch": "2.9", "scikit-learn": "1.4"}
    project.write_text('[project]\ndependencies = ["torch>=2.9", "numpy"]\n')
    with pytest.raises(SystemExit, match="no minimum version: numpy"):
        read(project)


def test_every_dependency_of_pomona_has_a_minimum_and_every_test_exists(load_script: Any) -> None:
    script = load_script("minimum_versions")
    assert {"torch", "numpy", "safetensors", "typer"} <= script.minimum_versions().keys()
    assert all((script.ROOT / test).exists() for test in script.TESTS)
