"""docs/complaints.md names every test of a complaint, and its code prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "complaints.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.match(r"\| \[?[\w-]+/[\w.-]+#", line)]
COMPLAINTS = 25


def test_every_complaint_has_an_answer_and_a_test() -> None:
    tests = {path.name for path in HERE.glob("test_*.py")} - {Path(__file__).name}
    assert len(ROWS) == len({row[0] for row in ROWS}) == COMPLAINTS
    assert {row[-1].strip("`") for row in ROWS} == tests
    assert all(re.match(r"(yes|partly|no)\b", row[-2]) for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[-1].strip("`"))
def test_a_test_is_named_after_the_thread_that_it_links(row: list[str]) -> None:
    project, number, address = re.search(r"\[[\w-]+/([\w.-]+)#(\d+)\]\((\S+)\)", " ".join(row)).groups()  # type: ignore[union-attr]
    name = row[-1].strip("`").removeprefix("test_").removesuffix(".py")
    assert name.endswith(f"_{number}")
    assert project.lower().replace("-", "_") in name or name.startswith("pytorch_")
    head = (HERE / row[-1].strip("`")).read_text(encoding="utf-8").splitlines()[0]
    assert head.startswith(f'"""{address}: ')


def test_the_recipe_for_adapters_prints_what_the_page_shows() -> None:
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    ((code, shown),) = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {"__name__": "complaints"})
    assert printed.getvalue() == shown
