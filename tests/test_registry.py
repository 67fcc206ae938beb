"""Parsing of specs that are written in one line: "dpf(every=4)"."""

from __future__ import annotations

import pytest

from pomona.errors import PomonaError
from pomona.registry import parse_spec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dpf", ("dpf", {})),
        (" dpf() ", ("dpf", {})),
        ("dpf(every=4, settle=0.1)", ("dpf", {"every": 4, "settle": 0.1})),
        ("balanced(block=8, pad=true)", ("balanced", {"block": 8, "pad": True})),
        ("filter(of='filters', norms=False)", ("filter", {"of": "filters", "norms": False})),
        ("block(shape=(4, 4))", ("block", {"shape": (4, 4)})),
    ],
)
def test_parse_name_and_options(text, expected):
    assert parse_spec(text) == expected


@pytest.mark.parametrize(
    "text", ["dpf(4)", "dpf(every=", "dpf(every=four)", "a.b(c=1)", "dpf(every=1)(2)", "dpf(x=1+y)"]
)
def test_parse_accepts_only_literal_options(text):
    with pytest.raises(PomonaError, match="is not of the form"):
        parse_spec(text)
