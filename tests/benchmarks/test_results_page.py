"""The page of results: its charts are what the records give, and it shows fresh statistics beside the last epoch."""

from __future__ import annotations

from typing import Any


def test_the_charts_are_what_the_records_give(load_script: Any) -> None:
    writer = load_script("results_page")
    written = {file.name: file.read_text(encoding="utf-8") for file in writer.DRAWINGS.glob("*.svg")}
    assert writer.render_drawings() == written, "draw them again with python benchmarks/pages/results_page.py"
    page = writer.PAGE.read_text(encoding="utf-8")
    assert all(f"](results/{name})" in page for name in written)
    assert any("figure14" in name for name in written)


def test_cells_with_stale_statistics_show_fresh_ones(load_script: Any, trained_cells: Any) -> None:
    page = load_script("results_page").PAGE.read_text(encoding="utf-8")
    stale = [cell for cell in trained_cells("dpf-table1") if "fresh" in cell]
    assert {(cell["column"], cell["row"]) for cell in stale} >= {("DPF", "90 %"), ("DPF", "95 %")}
    for cell in stale:
        assert f"{cell['mean']:.2f} ×{cell['runs']}<br>fresh {cell['fresh']:.2f}<br>" in page
        if cell["column"] == "DPF":
            assert cell["fresh"] > cell["mean"]
