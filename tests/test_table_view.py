"""Tables as text and as HTML: self-contained, escaped, with every cell, in the colors of the page."""

from __future__ import annotations

from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from run_helpers import digits_recipe
from torch import nn

import pomona as pm
from pomona.lab.runs.run import prepared_run
from pomona.lab.runs.strategy import TrainingStrategy
from pomona.lab.sweeps.run_store import StoredRun
from pomona.table_view import to_html

VOID = {"br"}


class TableReader(HTMLParser):
    """Reads the rows of a table, and refuses tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: dict[str, set[str]] = {}
        self.rows: list[list[str]] = []
        self.caption = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Begin a row or a cell."""
        self.tags.add(tag)
        for key, value in attributes:
            self.attributes.setdefault(key, set()).add(value or "")
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close the innermost tag."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Add text to the cell or caption that it stands in."""
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        elif self.open[-1] == "caption":
            self.caption += data


def make_network() -> nn.Sequential:
    """Return a small network with a convolution and two linear layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32), nn.ReLU(), nn.Linear(32, 10))


def test_a_table_by_hand() -> None:
    table = Table("name", title="a & b", caption="<note>", show_footer=True)
    table.columns[0].footer = "all"
    table.add_column("n", footer="3", justify="right")
    table.add_row("x<y>", "1")
    table.add_row("[bold]", "2")
    read = TableReader(to_html(table))
    assert read.rows == [["name", "n"], ["x<y>", "1"], ["[bold]", "2"], ["all", "3"]]
    assert read.caption == "a & b"
    assert "&lt;note&gt;" in to_html(table)
    assert "<tfoot>" not in to_html(Table("name"))


@given(st.lists(st.tuples(st.text(), st.text()), max_size=5), st.text(min_size=1))
def test_every_text_comes_back(rows: list[tuple[str, str]], title: str) -> None:
    rows = [(a.replace("\r", ""), b.replace("\r", "")) for a, b in rows]
    table = Table("a", "b", title=title.replace("\r", ""))
    for row in rows:
        table.add_row(*row)
    read = TableReader(to_html(table))
    assert read.rows == [["a", "b"], *([cell.replace("\n", "") for cell in row] for row in rows)]
    assert read.tags <= {"div", "table", "caption", "thead", "tbody", "tr", "th", "td", "br"}


def make_views() -> dict[str, Any]:
    """Return one object of each kind that a notebook shows as a table."""
    model = make_network()
    report = pm.prune(model, 0.9)
    waiting, attached = pm.RigL(0.5), pm.DPF(0.5, include=["3"])
    other = make_network()
    attached.attach(other, torch.optim.SGD(other.parameters(), 0.1), total_steps=4)
    compressed = pm.compress(model, (1, 8, 8), policy="all", patience=0)
    thin = make_network()
    pm.prune(thin, 0.5, pattern="filter")
    stored = StoredRun(digits_recipe(), Path("runs/test"), {"accuracy": 97.5, "sparsity": 0.9, "seconds": 3.2})
    return {
        "prune": report,
        "unattached pruner": waiting,
        "attached pruner": attached,
        "summary": pm.summary(model, (1, 8, 8)),
        "compression": compressed.compression,
        "shrunk": pm.shrink(thin, torch.randn(2, 1, 8, 8)) if find_spec("torch_pruning") else None,
        "prunable": pm.prunable(model, pattern="2:4"),
        "stored run": stored,
    }


@pytest.fixture(scope="module")
def views() -> dict[str, Any]:
    """Return the objects that a notebook shows as tables."""
    return make_views()


def require_view(views: dict[str, Any], name: str) -> Any:
    """Return the object of a name; skip the test where its package is not installed."""
    if views[name] is None:
        pytest.skip("needs torch-pruning")
    return views[name]


REPRESENTATIONS = {
    "prune": "<PruningReport: 90.00% of 9,288 weights in 2 layers pruned, Unstructured(), allocation global>",
    "unattached pruner": "not attached>",
    "attached pruner": "step 0 of 4>",
    "summary": "parameters are not zero",
    "compression": "<Compression: ",
    "shrunk": "<Shrunk: ",
    "prunable": "<Prunable: 1 of 6 parameters are pruned>",
    "stored run": "<StoredRun test, complete, in runs/test>",
}


@pytest.mark.parametrize("name", REPRESENTATIONS)
def test_a_view_is_self_contained_and_readable_on_any_page(views: dict[str, Any], name: str) -> None:
    text = require_view(views, name)._repr_html_()
    read = TableReader(text)
    assert len({len(row) for row in read.rows}) == 1
    assert len(read.rows) > 2
    assert read.tags <= {"div", "table", "caption", "thead", "tbody", "tfoot", "tr", "th", "td", "br"}
    assert read.attributes.keys() == {"style"}
    styles = "; ".join(read.attributes["style"])
    assert "color: inherit" in styles
    assert "#" not in styles  # no color but the page's
    assert "url(" not in styles


@pytest.mark.parametrize("name", REPRESENTATIONS)
def test_a_representation_is_one_line(views: dict[str, Any], name: str) -> None:
    text = repr(require_view(views, name))
    assert REPRESENTATIONS[name] in text
    assert "\n" not in text
    assert len(text) < 300


def test_a_pruner_shows_the_density_of_each_layer() -> None:
    model = make_network()
    pruner = pm.OneShot(0.75, allocation="uniform", exclude="0")
    options = TableReader(pruner._repr_html_()).rows
    assert options[1:4] == [["name", "oneshot"], ["sparsity", "0.75"], ["pattern", "unstructured"]]
    pruner.attach(model, torch.optim.SGD(model.parameters(), 0.1))
    read = TableReader(pruner._repr_html_())
    assert read.caption == "OneShot, Unstructured(), sparsity 75.00%, step 0 of 1"
    assert read.rows == [
        ["layer", "shape", "weights", "kept", "density"],
        ["3.weight", "32×288", "9,216", "2,304", "25.00%"],
        ["total", "", "9,216", "2,304", "25.00%"],
    ]
    pruner.finish()
    assert TableReader(pruner._repr_html_()).caption.endswith(", finished")


def test_a_run_shows_its_choices_and_figures() -> None:
    with prepared_run(TrainingStrategy(digits_recipe("dpf(0.5, pattern='balanced(9)')"))) as run:
        assert repr(run) == "<Run test, step 0 of 18, in .>"
        rows = TableReader(run._repr_html_()).rows
    assert rows == [
        ["run", "test"],
        ["data", "digits"],
        ["model", "digits_cnn"],
        ["method", "dpf"],
        ["method.sparsity", "0.5"],
        ["method.pattern", "balanced(block=9, blocks=None, pad=False)"],
        ["method.allocation", "global"],
        ["seed", "0"],
    ]


def test_a_stored_run_shows_what_it_has(views: dict[str, Any]) -> None:
    rows = dict(TableReader(views["stored run"]._repr_html_()).rows)
    assert (rows["accuracy"], rows["sparsity"], rows["seconds"]) == ("97.50 %", "90.00%", "3")
    unfinished = StoredRun(digits_recipe(), None, None)
    assert repr(unfinished) == "<StoredRun test, not complete, in a record>"
    assert "accuracy" not in dict(TableReader(unfinished._repr_html_()).rows)
