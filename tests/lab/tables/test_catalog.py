"""The catalog of tables: computed tables are found by their names."""

from __future__ import annotations

import io
import sys
import types

import pytest
from rich.console import Console

from pomona.errors import PomonaError
from pomona.lab.tables import catalog, rendering
from pomona.lab.tables.catalog import compute_table, find_table


def print_text(grid, width: int = 200) -> str:
    """Return what rich prints at a width."""
    console = Console(file=io.StringIO(), width=width)
    console.print(grid)
    return console.file.getvalue()


def test_a_computed_table_is_found_by_its_name(monkeypatch):
    plain = {"model": "fcn", "method": "magnitude", "sparsity": 0.1, "setting": {"d": 64}, "std": None, "runs": 5}
    result = {"title": "C", "paper": "Q", "cells": [plain | {"mean": 1.5, "paper": 1.25}]}
    module = types.ModuleType("pomona_computed")
    calls: list[tuple] = []
    module.TABLES = {
        "made-table1": lambda: result,
        "made-table2": lambda seed=0, progress=None: progress(1, 2) or result,
    }
    monkeypatch.setitem(sys.modules, "pomona_computed", module)
    monkeypatch.setattr(catalog, "COMPUTED_TABLE_MODULES", ("pomona_computed", "pomona.nowhere.at_all"))
    for name in module.TABLES:
        assert compute_table(find_table(name), lambda *t: calls.append(t)) is result
    assert calls == [(1, 2)]
    heads, rows = rendering.layout_table(result)
    assert heads == ["model", "method", "sparsity", "setting", "ours", "paper", "difference"]
    assert rows == [["fcn", "magnitude", "0.1", "d = 64", "1.5 ×5", "1.25", "+0.25"]]
    assert "computed" in print_text(rendering.render_table(result))
    with pytest.raises(PomonaError, match="unknown table 'made-table3': did you mean 'made-table"):
        find_table("made-table3")
    with pytest.raises(PomonaError, match="made-table1 is computed"):
        find_table("made-table1", ["seed=1"])
