"""Specs in one line, "dpf(every=4)", and the meanings of their options."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, make_dataclass
from typing import ClassVar

import pytest

from pomona.errors import PomonaError
from pomona.registry import describe_options, flatten_settings, format_plain_data, parse_spec


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


@dataclass(frozen=True)
class Base:
    """A spec with options that a subclass changes."""

    count: int = 1  # how many
    size: int = 2  # how large
    plain: int = 3


@dataclass(frozen=True)
class Derived(Base):
    """A spec whose options have comments of each form."""

    kind: ClassVar[str] = "none"  # no option

    size: int = 4
    # Where it is. The second sentence,
    # on two lines.
    place: str = "here"
    switch: InitVar[bool] = False  # type: ignore[assignment]  # on or off
    plain: int = 5

    def __post_init__(self, switch: bool) -> None:
        """Do nothing."""


def test_the_meaning_of_an_option_is_its_comment():
    assert describe_options(Derived) == {
        "count": "how many",
        "size": "how large",
        "plain": "",
        "place": "where it is. The second sentence, on two lines",
        "switch": "on or off",
    }


def test_a_class_without_source_has_options_without_meaning():
    made = make_dataclass("Made", [("count", int, 1)])
    assert describe_options(made) == {"count": ""}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.9, "0.9"),
        (None, "null"),
        ("global", '"global"'),
        ({"name": "unstructured"}, "unstructured"),
        ({"name": "cubic", "start": 0.0, "until": 0.75}, "cubic(start=0.0, until=0.75)"),
        ({"name": "a", "inner": {"name": "b", "c": [1]}}, "a(inner=b(c=[1]))"),
    ],
)
def test_values_are_formatted_for_a_person(value, expected):
    assert format_plain_data(value) == expected


def test_values_can_be_shown_as_in_python():
    assert format_plain_data({"name": "a", "b": None, "c": {"name": "d", "e": True}}, str) == "a(b=None, c=d(e=True))"


def test_nested_settings_are_flattened():
    assert dict(flatten_settings({"a": 1, "b": {"c": {"d": 2}, "e": [3]}})) == {"a": 1, "b.c.d": 2, "b.e": [3]}
