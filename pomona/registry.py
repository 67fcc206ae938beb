"""Registries of named specs: methods, patterns, schedules, compressors, data sources, augmentations, optimizers.

A spec is a frozen dataclass that is registered under a name. A spec can be written in three ways, and this module is
the only place that converts between them:

    Balanced(block=32)                      in Python
    {name = "balanced", block = 32}         in a recipe
    "balanced(block=32)"                    anywhere; "balanced(32)" gives options in their order, as Python does
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import functools
import inspect
import io
import json
import re
import textwrap
import tokenize
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from .errors import PomonaError, shorten, unknown_name_error
from .untrusted import describe

SpecT = TypeVar("SpecT")
RegisteredT = TypeVar("RegisteredT")

TOML_NAMES = {"true": True, "false": False, "inf": float("inf")}  # values that Python spells otherwise
MAX_TEXT_LENGTH = 10_000  # characters of a spec in one line
PLAIN_TYPES = frozenset({int, float, str, bool, type(None)})  # the types that `validate_type` checks


class Registry(Generic[SpecT]):
    """Spec classes of one kind, by name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._specs: dict[str, type[SpecT]] = {}
        self._shorthands: dict[str, re.Pattern[str]] = {}  # by name

    def register(self, name: str, shorthand: str | None = None) -> Callable[[type[RegisteredT]], type[RegisteredT]]:
        r"""Return a class decorator that registers a frozen dataclass under `name`.

        A `shorthand` is a regular expression for a text that also stands for the spec. Its groups are whole numbers,
        the spec's first options: r"(\d+):(\d+)" makes "2:4" another form of "nm(2, 4)".
        """

        def register_class(spec: type[RegisteredT]) -> type[RegisteredT]:
            if not dataclasses.is_dataclass(spec):
                raise TypeError(f"{spec.__name__} must be a dataclass to be registered as '{name}'")
            spec.name = name  # type: ignore[attr-defined]
            self._specs[name] = spec  # type: ignore[assignment]
            if shorthand is not None:
                self._shorthands[name] = re.compile(shorthand)
            return spec

        return register_class

    def __getitem__(self, name: str) -> type[SpecT]:
        if not isinstance(name, str) or name not in self._specs:
            raise unknown_name_error(self.kind, name, self._specs)
        return self._specs[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._specs

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._specs))

    def names(self, pattern: str = "*") -> list[str]:
        """Return the registered names that match a shell pattern, sorted."""
        return fnmatch.filter(self, pattern)

    def resolve(self, choice: Any) -> SpecT:
        """Return the spec that `choice` stands for: a string, a mapping with a name, or a spec (returned as is).

        Raises PomonaError for an unknown name or option, a missing option, or a value of the wrong type.
        """
        if isinstance(choice, (str, Mapping)):
            options = self.parse(choice) if isinstance(choice, str) else dict(choice)
            if "name" not in options:
                raise PomonaError(f'a {self.kind} needs a name: {{name = "…"}}, got {options!r}.')
            name = options.pop("name")
        elif any(isinstance(choice, spec) for spec in self._specs.values()):
            return choice
        else:
            raise PomonaError(f"{choice!r} is not a valid {self.kind}: choose one of {', '.join(self)}.")
        return build_spec(self[name], self.kind, options)

    def parse(self, text: str) -> dict[str, Any]:
        """Return a spec in one line, "balanced(32)" or a shorthand, as a mapping of its name and options.

        The name may be unknown where all options have theirs. Raises PomonaError for text of another form.
        """
        for name, shorthand in self._shorthands.items():
            if found := shorthand.fullmatch(text.strip()):
                return {"name": name, **bind_arguments(self[name], self.kind, [int(n) for n in found.groups()])}
        name, arguments, options = parse_call(text)
        if arguments:
            options = bind_arguments(self[name], self.kind, arguments, options)
        return {"name": name, **options}


def bind_arguments(
    spec: Any, kind: str, arguments: Sequence[Any], options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return options together with arguments that have no name and stand for the spec's first options.

    An option that is a tuple also takes its entries one by one: "block(4, 4)" is "block((4, 4))".
    """
    names = [key for key, option in spec_options(spec).items() if option.kind is not option.KEYWORD_ONLY]
    hints, left, bound = resolve_type_hints(spec), list(arguments), dict(options or {})
    for key in names:
        if not left:
            break
        entries = typing.get_args(hints[key]) if typing.get_origin(hints[key]) is tuple else ()
        alone = not entries or ... in entries or isinstance(left[0], (tuple, list))
        count = 1 if alone else len(entries)
        value = left[0] if alone else tuple(left[:count])
        if key in bound:
            raise PomonaError(f"{kind} '{spec.name}' got {key} twice: {value!r} and {bound[key]!r}.")
        bound[key] = value
        del left[:count]
    if left:
        limit = f"only {', '.join(names)}" if names else "no option"
        raise PomonaError(f"{kind} '{spec.name}' takes {limit} without a name, got {left[0]!r} too: write name=value.")
    return bound


def build_spec(spec: type[SpecT], kind: str, options: Mapping[str, Any]) -> SpecT:
    """Instantiate a spec class; raise PomonaError for unknown or missing options and values of the wrong type."""
    known = spec_options(spec)
    hints = resolve_type_hints(spec)
    for key, value in options.items():
        if key not in known:
            raise unknown_name_error(f"option of {kind} '{spec.name}'", key, known)  # type: ignore[attr-defined]
        validate_type(key, value, hints[key])
    missing = [key for key, option in known.items() if option.default is option.empty and key not in options]
    if missing:
        raise PomonaError(f"{kind} '{spec.name}' needs {' and '.join(missing)}.")  # type: ignore[attr-defined]
    try:
        return spec(**options)
    except PomonaError:
        raise
    except Exception as error:  # an option of a type that is not plain is only checked by what uses it
        given = shorten(dict(options))
        raise PomonaError(f"{kind} '{spec.name}' does not take {given}: {describe(error)}.") from error  # type: ignore[attr-defined]


def spec_options(spec: Any) -> Mapping[str, inspect.Parameter]:
    """Return the options that a spec class takes, also those of type InitVar, which only set other options."""
    return _read_signature(spec).parameters


def describe_options(spec: Any) -> dict[str, str]:
    """Return what each option of a spec class means: the comment beside the option, or above it, in the source."""
    found: dict[str, str] = {}
    for base in reversed(spec.__mro__):  # a comment in a subclass replaces that of its base
        found |= _read_comments(base)
    return {key: found.get(key, "") for key in spec_options(spec)}


@functools.cache
def _read_comments(spec: type) -> Mapping[str, str]:
    """Return the comments of the fields in the source of one class; none where there is no source."""
    try:
        source = textwrap.dedent(inspect.getsource(spec))
    except (OSError, TypeError):
        return {}
    comments = {
        token.start[0]: re.sub(r"#|type: ignore\S*", "", token.string).strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    previous = 0  # the last line of the statement before
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            lines = range(previous + 1, (statement.end_lineno or 0) + 1)
            text = " ".join(filter(None, (comments.get(line) for line in lines)))
            if text.endswith("."):  # a sentence above the option
                text = text[0].lower() + text[1:-1]
            if text:
                found[statement.target.id] = text
        previous = statement.end_lineno or 0
    return found


def resolve_type_hints(spec: Any) -> dict[str, Any]:
    """Return the types of a spec's fields."""
    hints = _read_type_hints(spec)
    return {key: hint.type if isinstance(hint, dataclasses.InitVar) else hint for key, hint in hints.items()}


# Cached, because both take longer than building a spec.
_read_signature = functools.cache(inspect.signature)
_read_type_hints = functools.cache(typing.get_type_hints)


def validate_type(key: str, value: Any, hint: Any) -> None:
    """Raise PomonaError if an option's value does not have the plain type of its hint.

    An int is accepted where a float is expected, a bool only where a bool is expected. A hint with any type outside
    `PLAIN_TYPES` is not checked here: the spec validates such an option itself.
    """
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if not PLAIN_TYPES.issuperset(allowed):
        return
    fits = any(
        (isinstance(value, a) and not (isinstance(value, bool) and a is not bool))
        or (a is float and type(value) is int)
        for a in allowed
    )
    if not fits:
        wanted = " or ".join("nothing" if a is type(None) else a.__name__ for a in allowed)
        raise PomonaError(f"{key} takes {wanted}, got {shorten(repr(value))}.")


def parse_spec(text: str) -> tuple[str, dict[str, Any]]:
    """Split "name(option=value, …)" into the name and the options.

    Values are Python literals, or TOML's `true`, `false` and `inf`. Raises PomonaError for anything else.
    """
    name, arguments, options = parse_call(text)
    if arguments:
        raise form_error(text)
    return name, options


def parse_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Split "name(value, option=value, …)" into the name, the arguments without a name, and the options."""
    text = text.strip()
    if len(text) > MAX_TEXT_LENGTH:
        raise form_error(text)
    if "(" not in text:
        return text, [], {}
    try:
        call = ast.parse(text, mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            raise ValueError
        arguments = [evaluate_literal(value) for value in call.args]
        return call.func.id, arguments, {str(k.arg): evaluate_literal(k.value) for k in call.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise form_error(text) from error


def form_error(text: str) -> PomonaError:
    """Return the error for text that is no spec in one line."""
    return PomonaError(f"'{shorten(text.strip())}' is not of the form name(option=value, …).")


def evaluate_literal(node: ast.expr) -> Any:
    """Return the value of a literal in a syntax tree, or of TOML's `true`, `false` and `inf`."""
    if isinstance(node, ast.Name) and node.id in TOML_NAMES:
        return TOML_NAMES[node.id]
    return ast.literal_eval(node)


def spec_to_dict(spec: Any) -> dict[str, Any]:
    """Return a spec as a dictionary of its name and all its options, defaults included, as a recipe writes it."""
    options = {f.name: to_plain_data(getattr(spec, f.name)) for f in dataclasses.fields(spec) if f.init}
    return {"name": spec.name, **options}


def to_json(value: Any) -> str:
    """Return a value as JSON in one line."""
    return json.dumps(value, ensure_ascii=False)


def format_plain_data(value: Any, show: Callable[[Any], str] = to_json) -> str:
    """Return a value of `to_plain_data` as text: a spec as "name(option=value, …)", any other value by `show`."""
    if isinstance(value, Mapping) and "name" in value:
        options = ", ".join(f"{key}={format_plain_data(one, show)}" for key, one in value.items() if key != "name")
        return f"{value['name']}({options})" if options else str(value["name"])
    return show(value)


def to_plain_data(value: Any) -> Any:
    """Convert nested specs to dictionaries and tuples to lists, so that TOML and JSON can hold the value."""
    if type(value) in PLAIN_TYPES:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return spec_to_dict(value) if hasattr(value, "name") else dataclasses.asdict(value)
    if isinstance(value, (tuple, list)):
        return [to_plain_data(v) for v in value]
    return value


def flatten_settings(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every setting in nested sections, such as "optimizer.lr"."""
    for key, value in section.items():
        if type(value) not in PLAIN_TYPES and isinstance(value, Mapping):
            yield from flatten_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
