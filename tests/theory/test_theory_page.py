"""docs/theory.md: its figures are those of the records, and its code and commands print what it shows."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pomona.cli import main

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "theory.md").read_text()
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))  # where the script finds its neighbours
    try:
        yield importlib.import_module("qian")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def records(script: ModuleType) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (script.RECORD, *script.MEASURED)]


def test_its_drawings_are_those_of_the_record(script: ModuleType) -> None:
    for name, drawing in script.drawings().items():
        assert (script.DRAWINGS / name).read_text() == drawing
    for shown in re.findall(r"\]\((theory/[^)]+\.svg)\)", TEXT):
        assert (ROOT / "docs" / shown).is_file()


def test_every_mean_of_tables_2_and_3_is_the_documents(script: ModuleType, records: list[dict[str, Any]]) -> None:
    """Within four standard errors, theirs and ours, and half a digit of print."""
    for name, count, runs in (("qian-table2", 30, 1000), ("qian-table3", 27 * 5, 500)):
        cells = records[0]["tables"][name]["cells"]
        apart = [script.qian_tables.standard_errors_off(cell) for cell in cells]
        assert len([a for a in apart if a is not None]) == count
        assert all(a is None or a <= 4 for a in apart)
        assert {cell["runs"] for cell in cells} == {runs}


def test_the_weights_of_table_1_are_of_the_order_that_theorem_2_assumes(records: list[dict[str, Any]]) -> None:
    cells = records[0]["tables"]["qian-table1"]["cells"]
    for name, low, high in (("d E w²", 0.1, 10), ("d² E w⁴", 0.1, 100)):
        values = [cell["mean"] for cell in cells if cell["setting"]["quantity"] == name]
        assert len(values) == 4
        assert all(low < value < high for value in values)


def test_nothing_found_is_beyond_what_is_promised(records: list[dict[str, Any]]) -> None:
    rows = [row for row in records[1]["theory"] if "found" in row]
    assert {row["rule"] for row in rows} == {"magnitude", "random", "kernels"}
    assert {row["width"] for row in rows if row["rule"] == "random"} == {64 << k for k in range(7)}
    for row in rows:
        assert 0 < row["found"] <= row["certificate"] <= row["sharp"]
        assert row["corrected"] is None or row["found"] <= row["corrected"]


def same(shown: str, printed: str, digits: float = 1e-3) -> None:
    """Words alike, and figures nearly so."""
    assert NUMBER.sub("#", shown).split() == NUMBER.sub("#", printed).split()
    figures = [[float(x) for x in NUMBER.findall(text)] for text in (shown, printed)]
    assert figures[0] == pytest.approx(figures[1], rel=digits, abs=1e-6)


@pytest.mark.parametrize(
    ("command", "shown"), re.findall(r"```console\n\$ pomona (.*?)\n(.*?)```", TEXT, re.DOTALL), ids=lambda text: ""
)
def test_the_commands_print_what_is_shown(command: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 0
    same(shown, capsys.readouterr().out)


def test_the_code_prints_what_is_shown() -> None:
    """The attack and the training depend a little on the machine."""
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 2
    for code, shown in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, names)
        same(shown, printed.getvalue(), digits=0.1)
