"""The helpers that page writers share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def test_rows_come_in_the_order_of_record_names(load_script: Any, empty_results: Path) -> None:
    for name, kept in (("b", {"rows": [3]}), ("a", {"rows": [1, 2]}), ("c", {"other": [4]})):
        (empty_results / f"x-{name}.json").write_text(json.dumps(kept))
    helpers = load_script("page_helpers")
    assert [row for _, row in helpers.read_rows("x-*.json", "rows")] == [1, 2, 3]
    assert [kept for kept, _ in helpers.read_rows("x-*.json", "other")] == [{"other": [4]}]
    assert helpers.read_records("y-*.json") == []


def test_machine_name_is_that_of_the_device(load_script: Any) -> None:
    machine = load_script("page_helpers").machine_name
    both = {"machine": {"cpu": "C", "gpus": [{"name": "G"}]}}
    assert [machine(both), machine(both, "cuda:0"), machine(both, "cpu")] == ["G", "G", "C"]
    assert machine({"machine": {"cpu": "C", "gpus": []}}) == "C"


def test_format_table(load_script: Any) -> None:
    format_table = load_script("page_helpers").format_table
    assert format_table(["a", "b"], [["1", ""], ["2", "3"]]) == "| a | b |\n|---|---|\n| 1 |  |\n| 2 | 3 |"
    assert format_table(["a", "b"], iter([["1", "2"]]), rule="| --- ").splitlines()[1] == "| --- | --- |"
    assert format_table(["a"], []) == load_script("page_helpers").NOT_MEASURED


def test_fill_page_replaces_the_text_between_markers(load_script: Any, tmp_path: Path) -> None:
    fill_page, page = load_script("page_helpers").fill_page, tmp_path / "p.md"
    page.write_text("A\n<!-- one -->\nold\n<!-- end -->\nB\n<!-- two -->\n<!-- end -->\n")
    text = fill_page(page, {"two": "2\n", "one": "1"})
    assert text == "A\n<!-- one -->\n1\n<!-- end -->\nB\n<!-- two -->\n2\n<!-- end -->\n"
    page.write_text(text)
    assert fill_page(page, {"two": "2\n", "one": "1"}) == text
    with pytest.raises(SystemExit, match="docs/p.md has no <!-- three -->"):
        fill_page(page, {"three": "3"})
    page.write_text("<!-- one -->\nold\n")
    with pytest.raises(SystemExit, match="<!-- one --> … <!-- end -->"):
        fill_page(page, {"one": "1"})
