"""Import the scripts of benchmarks/ by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT_FOLDERS = [str(BENCHMARKS / folder) for folder in ("measure", "pages")]


@pytest.fixture(scope="session")
def load_script() -> Iterator[Callable[[str], ModuleType]]:
    """Return a function that imports a script of benchmarks/measure or benchmarks/pages."""
    sys.path[:0] = SCRIPT_FOLDERS  # a script imports its neighbours by their bare names
    try:
        yield importlib.import_module
    finally:
        for folder in SCRIPT_FOLDERS:
            sys.path.remove(folder)


@pytest.fixture
def empty_results(load_script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make page writers read an empty folder of records, and return it."""
    monkeypatch.setattr(load_script("page_helpers"), "RESULTS", tmp_path)
    return tmp_path


@pytest.fixture
def trained_cells(load_script: Callable[[str], ModuleType]) -> Callable[[str], Iterator[dict[str, Any]]]:
    """Return a function that yields the cells of a table that have runs."""
    results = load_script("results_page")

    def cells(name: str) -> Iterator[dict[str, Any]]:
        table = results.compare_with_paper(name, results.load_run_store())
        return (cell for cell in table["cells"] if cell["runs"])

    return cells
