"""The sentence for an option's value that the argument parser refuses."""

from __future__ import annotations

from typing import Any

from pomona.errors import shorten

# By the codes of pydantic, which typer validates values with.
EXPECTED = {
    "int_parsing": "takes a whole number",
    "int_from_float": "takes a whole number",
    "int_parsing_size": "takes a whole number of fewer digits",
    "float_parsing": "takes a number",
    "bool_parsing": "takes true or false",
    "finite_number": "takes a finite number",
}
LIMITS = {"greater_than_equal": ("≥", "ge"), "less_than_equal": ("≤", "le")}


def describe_parser_error(error: Any) -> str:
    """Return the sentence for an error of the argument parser, which typer imports or bundles."""
    sentence = describe_bad_value(error) or error.format_message().split("\n")[0]
    return sentence if sentence.endswith((".", "?")) else f"{sentence}."


def describe_bad_value(error: Any) -> str | None:
    """Return what an option takes and what it was given; None where the parser has another error, or says it itself."""
    find_details, param = getattr(error.__cause__, "errors", None), getattr(error, "param", None)
    if param is None or find_details is None:
        return None
    details: list[dict[str, Any]] = find_details()
    code, given, context = details[0]["type"], shorten(details[0]["input"]), details[0].get("ctx", {})
    name = max(param.opts, key=len)
    if code in EXPECTED:
        return f"{name} {EXPECTED[code]}, got '{given}'."
    if code in LIMITS:
        sign, key = LIMITS[code]
        return f"{name} must be {sign} {context[key]}, got {given}."
    if "error" in context:
        return f"{name}: {context['error']}".split("\n")[0]
    return None
