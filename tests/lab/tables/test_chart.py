"""Charts: escaped names, label positions and round limits of axes."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from pomona.lab.tables import chart

SVG = "{http://www.w3.org/2000/svg}"


def test_names_are_escaped():
    svg = chart.sparsity_chart({"a<b&c": [(0.5, 90.0), (0.9, 80.0)]}, title="x < y")
    words = [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert "a<b&c  80.0" in words
    assert "x < y" in words


@given(st.lists(st.floats(0, 300), min_size=1, max_size=8).map(sorted))
def test_labels_are_spread_and_stay_in_order(positions):
    moved = chart.spread_labels(positions, 17, 0, 300)
    assert all(after - before >= 17 - 1e-9 for before, after in itertools.pairwise(moved))
    assert moved[0] >= -1e-9
    assert moved[-1] <= 300
    if all(after - before >= 17 for before, after in itertools.pairwise(positions)):
        assert moved == positions


@given(st.floats(0, 100), st.floats(0, 100))
def test_accuracy_scale_contains_the_values_between_round_limits(a, b):
    low, high, unit = chart.accuracy_scale(min(a, b), max(a, b))
    assert low <= min(a, b) <= max(a, b) <= high
    assert low < high
    assert (high - low) / unit <= 8
