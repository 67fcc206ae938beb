"""The pages with measured figures: they are up to date, start with an example, and their code runs."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from pomona.cli import main

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("balanced", "convergence", "errata", "export", "harm", "iterand", "overhead", "privacy", "results", "theory")
# A Python block, and the output shown right after it, if there is one.
PYTHON_WITH_OUTPUT = re.compile(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", re.DOTALL)

WRITERS = (
    "balanced_page",
    "errata_page",
    "export_page",
    "harm_page",
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


# docs/convergence.md is executed by tests/theory/test_theory_convergence.py, docs/privacy.md and docs/theory.md by
# the tests of this folder, which also check what they print.
@pytest.mark.parametrize("page", ["balanced", "errata", "export", "harm", "iterand", "overhead"])
def test_the_code_of_a_page_runs_and_prints_what_is_shown(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = PYTHON_WITH_OUTPUT.findall((DOCS / f"{page}.md").read_text(encoding="utf-8"))
    assert len(blocks) == 1
    [(code, shown)] = blocks
    names: dict[str, Any] = {"__name__": page}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, names)
    if shown:
        assert printed.getvalue() == shown


def test_the_command_of_the_results_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    commands = re.findall(r"^\$ pomona (.+)$", (DOCS / "results.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert commands == ["table dpf-onepass"]
    assert main(shlex.split(commands[0])) == 0
    assert "ResNet-20" in capsys.readouterr().out
