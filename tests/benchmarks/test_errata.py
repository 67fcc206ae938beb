"""Every figure in the record of docs/errata.md supports its erratum."""

from __future__ import annotations

import itertools
import json

import pytest


@pytest.fixture(scope="module")
def errata(load_script):
    return load_script("errata")


@pytest.fixture(scope="module")
def recorded(errata):
    return json.loads(errata.RECORD.read_text())["errata"]


@pytest.fixture(scope="module")
def pairs(errata, recorded):
    """Return the errata of errata.toml, each with its entry in the record."""
    return list(zip(errata.load_errata(), recorded, strict=True))


def test_the_record_has_the_errata_of_the_file_and_each_figure_supports_one(errata, pairs):
    for erratum, entry in pairs:
        assert entry["rows"]
        assert (erratum.bound, erratum.slack) == (entry["bound"], entry["slack"])
        reference = erratum.place.split(",")[0]  # the topic behind the comma may be reworded
        assert entry["place"].startswith(reference)
        assert all(erratum.is_supported_by(errata.Comparison(**row)) for row in entry["rows"]), erratum.place


def test_the_record_has_the_papers_in_the_order_of_the_file(pairs):
    changes = [a[0].paper != b[0].paper for a, b in itertools.pairwise(pairs)]
    assert changes == [a[1]["document"] != b[1]["document"] for a, b in itertools.pairwise(pairs)]


def test_every_measurement_belongs_to_one_erratum(errata, pairs):
    assert sorted(erratum.measurement for erratum, _ in pairs) == sorted(errata.MEASUREMENTS)


def test_an_entry_has_the_keys_of_the_record(errata, pairs):
    for erratum, entry in pairs:
        comparisons = [errata.Comparison(**row) for row in entry["rows"]]
        again = erratum.as_record(comparisons)
        assert list(again) == list(entry)
        assert again["rows"] == entry["rows"]


@pytest.mark.parametrize(
    "name",
    ["optimal_rate", "tolerance_sum", "layer_input", "required_entries", "chernoff_tail", "last_layer_norm"],
)
def test_the_fast_measurements_reproduce_the_record(pairs, name):
    [(erratum, entry)] = [pair for pair in pairs if pair[0].measurement == name]
    for again, before in zip(erratum.measure(), entry["rows"], strict=True):
        assert again.case == before["case"]
        # Other versions of numpy may draw other numbers.
        assert again.drawn == pytest.approx(before["drawn"], rel=1e-3, abs=8 * before["error"])
        assert again.right == pytest.approx(before["right"], rel=1e-3, abs=8 * before["error"])
        assert erratum.is_supported_by(again)


@pytest.mark.parametrize(
    ("row", "bound", "supported"),
    [
        ((1.0, 0.1, 1.3, 2.0), False, True),
        ((1.0, 0.1, 1.5, 2.0), False, False),  # the corrected form is off
        ((1.0, 0.1, 1.3, 1.3), False, False),  # the printed form is not
        ((1.0, 0.1, 5.0, 0.5), True, True),
        ((1.0, 0.1, 0.5, 0.5), True, False),
        ((1.0, 0.1, 5.0, 0.9), True, False),
        ((1.0, 0.1, 1.3, None), False, True),  # the printed form cannot be verified
        ((1.0, 0.1, 1.5, None), False, False),
    ],
)
def test_is_supported_by(errata, row, bound, supported):
    erratum = errata.Erratum("a paper", "a place", "printed", "right", "", "measurement", bound=bound)
    assert erratum.is_supported_by(errata.Comparison("case", *row)) is supported


def test_e2_is_the_only_formula_that_cannot_be_verified(pairs):
    unknown = [erratum for erratum, entry in pairs if any(row["printed"] is None for row in entry["rows"])]
    assert [erratum.measurement for erratum in unknown] == ["no_repeat_probability"]
    assert unknown[0].printed.startswith("cannot be verified")
