"""Named choices: methods, patterns, schedules, compressors, models.

A choice is a frozen dataclass registered under a name. It can be written in three ways, and this
file is the only place that turns one into another:

    Balanced(block=32)                      in Python
    {name = "balanced", block = 32}         in a recipe
    "balanced(block=32)"                    on the command line, or in a recipe
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from .errors import PomonaError, unknown

T = TypeVar("T")
R = TypeVar("R")


class Registry(Generic[T]):
    """Records of one kind by name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._records: dict[str, type[T]] = {}

    def add(self, name: str) -> Callable[[type[R]], type[R]]:
        """Class decorator: register a frozen dataclass under `name`."""

        def register(record: type[R]) -> type[R]:
            if not dataclasses.is_dataclass(record):
                raise TypeError(f"{record.__name__} must be a dataclass to be registered as '{name}'")
            record.name = name  # type: ignore[attr-defined]
            self._records[name] = record  # type: ignore[assignment]
            return record

        return register

    def __getitem__(self, name: str) -> type[T]:
        if name not in self._records:
            raise unknown(self.kind, name, self._records)
        return self._records[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._records))

    def names(self, pattern: str = "*") -> list[str]:
        """Registered names that match a shell pattern."""
        return fnmatch.filter(self, pattern)

    def make(self, choice: Any) -> T:
        """A record from any of its three spellings (a record is returned as it is)."""
        if isinstance(choice, str):
            name, options = parse(choice)
        elif isinstance(choice, Mapping):
            options = dict(choice)
            if "name" not in options:
                raise PomonaError(f'a {self.kind} needs a name: {{name = "…"}}, got {options!r}.')
            name = options.pop("name")
        elif any(isinstance(choice, record) for record in self._records.values()):
            return choice
        else:
            raise PomonaError(f"{choice!r} is no {self.kind}: give one of {', '.join(self)}.")
        return build(self[name], self.kind, options)


def build(record: type[T], kind: str, options: Mapping[str, Any]) -> T:
    """Make a record, refusing options it does not have and values of the wrong type."""
    fields = {f.name: f for f in dataclasses.fields(record) if f.init}  # type: ignore[arg-type]
    hints = type_hints(record)  # type: ignore[arg-type]
    for key, value in options.items():
        if key not in fields:
            raise unknown(f"option of {kind} '{record.name}'", key, fields)  # type: ignore[attr-defined]
        check_type(key, value, hints[key])
    missing = [f.name for f in fields.values() if required(f) and f.name not in options]
    if missing:
        raise PomonaError(f"{kind} '{record.name}' needs {' and '.join(missing)}.")  # type: ignore[attr-defined]
    return record(**options)


@functools.cache
def type_hints(record: type) -> dict[str, Any]:
    """The types of a record's fields; to resolve them takes longer than to make the record."""
    return typing.get_type_hints(record)


def required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def check_type(key: str, value: Any, hint: Any) -> None:
    """Refuse a plain value of the wrong type. Hints that are no plain types are left to the record."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    plain = {int, float, str, bool, type(None)}
    if not set(allowed) <= plain:
        return
    fits = any(
        (isinstance(value, a) and not (isinstance(value, bool) and a is not bool))
        or (a is float and type(value) is int)
        for a in allowed
    )
    if not fits:
        wanted = " or ".join("nothing" if a is type(None) else a.__name__ for a in allowed)
        raise PomonaError(f"{key} takes {wanted}, got {value!r}.")


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Split "name(option=value, …)" into name and options; only literals are understood, and TOML's true and false."""
    text = text.strip()
    if "(" not in text:
        return text, {}
    try:
        call = ast.parse(text, mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)) or call.args:
            raise ValueError
        return call.func.id, {str(k.arg): value(k.value) for k in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise PomonaError(f"'{text}' is not of the form name(option=value, …).") from error


def value(node: ast.expr) -> Any:
    """What is written for an option."""
    if isinstance(node, ast.Name) and node.id in ("true", "false"):
        return node.id == "true"
    return ast.literal_eval(node)


def describe(record: Any) -> dict[str, Any]:
    """The recipe spelling of a record: its name and every option, defaults included."""
    options = {f.name: plain(getattr(record, f.name)) for f in dataclasses.fields(record) if f.init}
    return {"name": record.name, **options}


def plain(value: Any) -> Any:
    """Nested records as dictionaries, tuples as lists: what TOML and JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return describe(value) if hasattr(value, "name") else dataclasses.asdict(value)
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    return value
