"""Every figure in the record of docs/errata.md decides."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def errata():
    sys.path.insert(0, str(ROOT / "benchmarks"))  # where the script finds its neighbours
    try:
        yield importlib.import_module("errata")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def kept(errata):
    return json.loads(errata.RECORD.read_text())


def test_the_record_has_each_erratum_as_it_stands_and_each_figure_decides(errata, kept):
    for each, record in zip(errata.ERRATA, kept["errata"], strict=True):
        assert record["rows"]
        assert {key: getattr(each, key) for key in record if key != "rows"} == {
            key: value for key, value in record.items() if key != "rows"
        }
        assert all(each.decides(errata.Row(**row)) for row in record["rows"]), each.place


@pytest.mark.parametrize("name", ["rate", "tolerances", "reach", "sign", "chernoff", "last_layer"])
def test_the_quick_ones_come_out_again(errata, kept, name):
    [(each, record)] = [
        pair for pair in zip(errata.ERRATA, kept["errata"], strict=True) if pair[0].rows.__name__ == name
    ]
    again = each.rows(np.random.default_rng(errata.SEED))
    for row, before in zip(again, record["rows"], strict=True):
        assert row.case == before["case"]
        # Other versions of numpy may draw other numbers.
        assert row.drawn == pytest.approx(before["drawn"], rel=1e-3, abs=8 * before["error"])
        assert row.right == pytest.approx(before["right"], rel=1e-3, abs=8 * before["error"])
        assert each.decides(row)


@pytest.mark.parametrize(
    ("row", "bound", "decides"),
    [
        ((1.0, 0.1, 1.3, 2.0), False, True),
        ((1.0, 0.1, 1.5, 2.0), False, False),  # the right form is off
        ((1.0, 0.1, 1.3, 1.3), False, False),  # the printed one is not
        ((1.0, 0.1, 5.0, 0.5), True, True),
        ((1.0, 0.1, 0.5, 0.5), True, False),
        ((1.0, 0.1, 5.0, 0.9), True, False),
    ],
)
def test_what_decides(errata, row, bound, decides):
    each = errata.Erratum("000", "here", "a", "b", "", iter, bound=bound)
    assert each.decides(errata.Row("case", *row)) is decides
