"""The sentence for an option's value that the argument parser refuses."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from pomona.cli.bad_values import describe_bad_value, describe_parser_error


class Parameter:
    """What the parser says of an option."""

    opts = ("-n", "--number")


class ValidationError(ValueError):
    """A refusal with details, as pydantic raises it; earlier versions of typer have none."""

    def __init__(self, code: str, given: object, **context: Any) -> None:
        self.details = {"type": code, "input": given, "ctx": context, "msg": "Value error, Input should be another"}

    def errors(self) -> list[dict[str, Any]]:
        return [self.details]


def refuse(code: str, given: object, **context: Any) -> typer.BadParameter:
    """Return the parser's error for a value."""
    error = typer.BadParameter("Input should be another")
    error.param = Parameter()  # type: ignore[assignment]
    error.__cause__ = ValidationError(code, given, **context)
    return error


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (refuse("int_parsing", "one"), "--number takes a whole number, got 'one'."),
        (refuse("float_parsing", "half"), "--number takes a number, got 'half'."),
        (refuse("greater_than_equal", "-1", ge=0), "--number must be ≥ 0, got -1."),
        (refuse("less_than_equal", "2", le=0.999), "--number must be ≤ 0.999, got 2."),
        (refuse("value_error", "b", error=ValueError("'b' is no letter.")), "--number: 'b' is no letter."),
    ],
)
def test_a_bad_value_is_named_with_what_the_option_takes(error: Any, sentence: str) -> None:
    assert describe_bad_value(error) == describe_parser_error(error) == sentence


def test_other_errors_keep_the_words_of_the_parser() -> None:
    assert describe_bad_value(refuse("another_code", "b")) is None
    assert describe_bad_value(typer.BadParameter("a sentence.")) is None
    assert describe_parser_error(typer.BadParameter("two\nlines")) == "Invalid value: two."
    assert describe_parser_error(typer.BadParameter("a sentence.")) == "Invalid value: a sentence."
