"""What docs/iterand.md says about its tables."""

from __future__ import annotations

from typing import Any

import pytest


def test_statements_about_accuracy_hold(trained_cells: Any) -> None:
    table3, table10 = (list(trained_cells(f"iterand-{name}")) for name in ("table3", "table10"))
    assert {cell["runs"] for cell in table3 + table10} == {1}
    for cell in table3:
        apart = cell["mean"] - cell["paper"]
        assert abs(apart) <= cell["paper_std"] if cell["label"] == "Conv6" else 0.3 < apart < 0.45
    ours, paper = (
        {(cell["label"], cell["row"], *cell["column"].split()): cell[key] for cell in table3 + table10}
        for key in ("mean", "paper")
    )
    pairs = [(*where, kind) for *where, method, kind in (key for key in ours if len(key) == 4) if method == "IteRand"]
    assert len(pairs) == 4
    for label, row, kind in pairs:
        gap, theirs = (
            found[label, row, "IteRand", kind] - found[label, row, "edge-popup", kind] for found in (ours, paper)
        )
        assert gap > 0
        assert gap == pytest.approx(theirs, abs=0.25)
    assert all(4 < cell["paper"] - cell["mean"] < 6 for cell in table10)
    order = [[cell[key] for cell in table10] for key in ("mean", "paper")]
    assert all(values == sorted(values, reverse=True) for values in order)


def test_statements_about_tickets_hold(load_script: Any) -> None:
    """Check that tickets belong to recorded runs, and that a sign takes one bit, trained or not."""
    read_records = load_script("page_helpers").read_records
    [tickets], [h200] = (read_records(f"iterand-{name}.json") for name in ("tickets", "h200"))
    runs = load_script("results_page").load_run_store().runs
    for row in tickets["trained"]:
        assert runs[row["fingerprint"]].recipe.name == row["run"]
    for rows in (tickets["trained"], h200["tickets"]):
        popup, signs = rows[:2]
        assert 8 * (signs["bytes"] - popup["bytes"]) / (0.4 * popup["state_bytes"] / 4) == pytest.approx(1, abs=0.02)
