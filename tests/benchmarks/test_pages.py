"""The pages with measured figures: they are up to date, and start with an example."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from pomona.cli import main

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (
    "balanced",
    "convergence",
    "durability",
    "errata",
    "export",
    "harm",
    "iterand",
    "language-models",
    "overhead",
    "privacy",
    "results",
    "sparse-or-fewer-bits",
    "theory",
)

WRITERS = (
    "balanced_page",
    "durability_page",
    "errata_page",
    "export_page",
    "harm_page",
    "iterand_page",
    "language_models_page",
    "overhead_page",
    "privacy_page",
    "readme_page",
    "results_page",
    "sparse_or_fewer_bits_page",
    "theory_page",
)


@pytest.mark.parametrize("name", WRITERS)
def test_a_page_is_what_its_records_give(name: str, load_script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = load_script(name)
    if name == "privacy_page":
        monkeypatch.delitem(writer.PARTS, "shares")  # it has no record, and the accountant is slow
    written = writer.PAGE.read_text(encoding="utf-8")
    assert writer.render() == written, f"write the page again with python benchmarks/pages/{name}.py"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_starts_with_its_purpose_and_an_example(page: str) -> None:
    introduction = (DOCS / f"{page}.md").read_text(encoding="utf-8").split("\n## ")[0]
    assert introduction.startswith("# ")
    assert "This page" in introduction
    assert "```python" in introduction or "```console" in introduction


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_papers_by_author_and_year(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert not re.search(r"\bdocuments?\b|\b00[0-4]:", text)


@pytest.mark.parametrize("page", PAGES)
def test_the_scripts_that_a_page_names_exist(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    for script in re.findall(r"`python (benchmarks/\S+?\.py)", text):
        assert (DOCS.parent / script).is_file(), script
    for source in re.findall(r"`((?:pomona|tests|recipes)/\S+?\.\w+)`", text):
        assert (DOCS.parent / source).is_file(), source


def test_the_command_of_the_results_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    commands = re.findall(r"^\$ pomona (.+)$", (DOCS / "results.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert commands == ["table dpf-onepass"]
    assert main(shlex.split(commands[0])) == 0
    assert "ResNet-20" in capsys.readouterr().out
