"""The pages that scripts write from records are up to date."""

from __future__ import annotations

from typing import Any

import pytest

WRITERS = (
    "balanced_page",
    "errata_page",
    "iterand_page",
    "overhead_page",
    "privacy_page",
    "results_page",
    "theory_page",
)


@pytest.mark.parametrize("name", WRITERS)
def test_a_page_is_what_its_records_give(name: str, load_script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = load_script(name)
    if name == "privacy_page":
        monkeypatch.delitem(writer.PARTS, "shares")  # it has no record, and the accountant is slow
    written = writer.PAGE.read_text(encoding="utf-8")
    assert writer.render() == written, f"write the page again with python benchmarks/pages/{name}.py"
