"""docs/theory.md: its figures are those of the records, and its code and commands print what it shows."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pomona.cli import main
from pomona.cli.bound.group import bound

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "theory.md").read_text()
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")


@pytest.fixture(scope="module")
def writer(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("theory_page")


@pytest.fixture(scope="module")
def records(writer: ModuleType) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (writer.RECORD, *writer.LOOSENESS_RECORDS)]


def test_drawings_are_those_of_the_record(writer: ModuleType) -> None:
    for name, drawing in writer.render_drawings().items():
        assert (writer.DRAWINGS / name).read_text() == drawing
    for shown in re.findall(r"\]\((theory/[^)]+\.svg)\)", TEXT):
        assert (ROOT / "docs" / shown).is_file()


def test_every_mean_of_tables_2_and_3_is_the_papers(writer: ModuleType, records: list[dict[str, Any]]) -> None:
    """Check that they agree within four standard errors of both, plus half a unit of the last printed digit."""
    for name, count, runs in (("qian-table2", 30, 1000), ("qian-table3", 27 * 5, 500)):
        cells = records[0]["tables"][name]["cells"]
        apart = [writer.qian_tables.standard_errors_off(cell) for cell in cells]
        assert len([a for a in apart if a is not None]) == count
        assert all(a is None or a <= 4 for a in apart)
        assert {cell["runs"] for cell in cells} == {runs}


def test_the_weights_of_table_1_are_of_the_order_that_theorem_2_assumes(records: list[dict[str, Any]]) -> None:
    cells = records[0]["tables"]["qian-table1"]["cells"]
    for name, low, high in (("d E w²", 0.1, 10), ("d² E w⁴", 0.1, 100)):
        values = [cell["mean"] for cell in cells if cell["setting"]["quantity"] == name]
        assert len(values) == 4
        assert all(low < value < high for value in values)


def test_no_error_found_exceeds_a_bound(records: list[dict[str, Any]]) -> None:
    rows = [row for row in records[1]["theory"] if "found" in row]
    assert {row["rule"] for row in rows} == {"magnitude", "random", "kernels"}
    assert {row["width"] for row in rows if row["rule"] == "random"} == {64 << k for k in range(7)}
    for row in rows:
        assert 0 < row["found"] <= row["certificate"] <= row["sharp"]
        assert row["corrected"] is None or row["found"] <= row["corrected"]


def test_tables_of_certificates_show_their_record(load_script: Callable[[str], ModuleType]) -> None:
    tables = load_script("certificate_tables")
    record = {
        "predictions": [
            {"network": "MLP", "region": "radius 0.1", "sparsity": 0.2, "before": 0.0, "after": 0.95, "true": 0.96}
        ],
        "looseness": [{"depth": 8, "region": "Ball(radius=1.0)", "before": 279.4, "after": 4.25}],
        "transformer": [
            {"region": "Cube(low=0, high=1)", "sparsity": 0.05, "intervals": 9.0, "linear": 2.5, "found": 0.5}
        ],
        "pruning": [
            {"network": "MLP", "radius": 0.01, "method": "certified", "sparsity": 0.5, "certified": 0.99}
            | {"certifiable": 1.0, "held_out": 0.97, "held_out_certifiable": 0.98}
        ],
    }
    assert "| MLP | radius 0.1 | 20% | 0.0% | 95.0% | 96.0% |" in tables.format_predictions([record])
    assert "| 8 | Ball(radius=1.0) | 279× | 4.25× |" in tables.format_depth_looseness([record])
    assert "| Cube(low=0, high=1) | 5% | 9 | 2.5 | 0.5 |" in tables.format_depth_looseness([record])
    row = "| MLP | 0.01 | certified | 50.0% | 99.0% of 100.0% | 97.0% of 98.0% |"
    assert row in tables.format_certified_pruning([record])
    assert "Not measured yet" in tables.format_predictions([])


def assert_same_output(shown: str, printed: str, tolerance: float = 1e-3) -> None:
    """Assert that two outputs have the same words, and the same figures within a relative tolerance."""
    assert NUMBER.sub("#", shown).split() == NUMBER.sub("#", printed).split()
    figures = [[float(x) for x in NUMBER.findall(text)] for text in (shown, printed)]
    assert figures[0] == pytest.approx(figures[1], rel=tolerance, abs=1e-6)


@pytest.mark.parametrize(
    ("command", "shown"), re.findall(r"```console\n\$ pomona (.*?)\n(.*?)```", TEXT, re.DOTALL), ids=lambda text: ""
)
def test_the_commands_print_what_is_shown(command: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 0
    assert_same_output(shown, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("command", "shown"),
    re.findall(r"^\| .*? \| `pomona (bound [^`]*)` \| (.*\*\*.*) \|$", TEXT, re.MULTILINE),
    ids=lambda text: "",
)
def test_the_examples_of_the_first_table_are_printed(
    command: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(command)) == 0
    printed = capsys.readouterr().out
    for figure in re.findall(r"\*\*(.*?)\*\*", shown):
        assert re.search(rf"(?<![\d.,]){re.escape(figure)}", printed), figure


def test_every_command_of_bound_is_in_the_first_table() -> None:
    first = TEXT.partition("## What you can do with it")[2].partition("\n## ")[0]
    named = set(re.findall(r"`pomona bound (\w+)", first))
    assert named >= {command.name or command.callback.__name__ for command in bound.registered_commands}


def test_table_1_and_the_figures_are_of_the_networks_that_the_page_names(records: list[dict[str, Any]]) -> None:
    tables = records[0]["tables"]
    assert "for 20 epochs on" in tables["qian-table1"]["notes"]
    assert tables["qian-figure1"]["notes"] in tables["qian-table1"]["notes"]
    assert len(tables["qian-figure2"]["cells"]) == 13 + 3
    words = " ".join(TEXT.split())
    for name in ("qian-table1", "qian-figure2"):
        assert tables[name]["notes"] in words


def test_trained_networks_are_kept_with_the_commit_that_trained_them(
    load_script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("qian_klabjan_tables")
    weights = tuple(torch.full((2, k), float(k)) for k in range(1, 13))
    calls = []

    def train(seed: int, progress: Any) -> Any:
        calls.append(seed)
        return script.qian_tables.Network("small", weights, "It was trained.")

    monkeypatch.setitem(script.TRAINED, "small", train)
    monkeypatch.setattr(script.environment, "current_commit", lambda: "0123456789ab")
    trained = script.get_network("small", tmp_path)
    monkeypatch.setattr(script.environment, "current_commit", lambda: "a later one")
    for network, commit in (trained, script.get_network("small", tmp_path)):
        assert (network.name, network.origin, commit) == ("small", "It was trained.", "0123456789ab")
        assert all(torch.equal(a, b) for a, b in zip(network.weights, weights, strict=True))
    assert calls == [0]


def test_the_code_prints_what_is_shown() -> None:
    """Allow a tolerance: the attack and the training depend a little on the machine."""
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 4
    for code, shown in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, names)
        assert_same_output(shown, printed.getvalue(), tolerance=0.1)
