"""Recipes as written: reading a TOML file and applying overrides of the form "dotted.key=value"."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pomona.errors import PomonaError, require, shorten
from pomona.methods import METHODS
from pomona.registry import Registry, parse_spec
from pomona.untrusted import MAX_TOML_BYTES, describe, parse_toml, read_bytes, reading

from .learning_rates import LEARNING_RATES
from .optimizers import OPTIMIZERS
from .stored_text import require_whole

MAX_KEY_PARTS = 8  # of a dotted key such as "method.pattern.block"
# The registry of a section that names one spec.
SECTION_REGISTRIES: dict[str, Registry[Any]] = {"method": METHODS, "optimizer": OPTIMIZERS, "rate": LEARNING_RATES}


def read_recipe(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return a recipe as written in a TOML file or mapping, with its overrides applied and no default filled in.

    A file that sets no name is named after itself. A mapping is copied, never changed.
    """
    if isinstance(source, Mapping):
        settings = copy.deepcopy(dict(source))
    else:
        settings = {"name": Path(source).stem} | _read_toml(Path(source))
    for override in overrides:
        with reading(f"the setting '{shorten(override)}'"):
            _apply_override(settings, override)
    return settings


def name_source(source: str | Path | Mapping[str, Any]) -> str:
    """Return what messages call a recipe: its file, where it comes from one."""
    return "the recipe" if isinstance(source, Mapping) else f"the recipe '{source}'"


def set_setting(settings: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key, such as "method.sparsity", in a recipe as written."""
    *path, last = key.split(".")
    require(len(path) < MAX_KEY_PARTS, f"'{shorten(key)}' has {len(path) + 1} parts, at most {MAX_KEY_PARTS} are read.")
    section = settings
    for depth, part in enumerate(path):
        inner = normalize_choice(section.get(part, {}), registry=SECTION_REGISTRIES.get(part))
        if not isinstance(inner, Mapping):
            where = ".".join(path[: depth + 1])
            raise PomonaError(f"'{key}' cannot be set: {where} is {shorten(repr(inner))}, which has no options.")
        section[part] = dict(inner)
        section = section[part]
    section[last] = value


def parse_value(text: str) -> Any:
    """Return the TOML value that a text spells, or the text itself if it is not a TOML value."""
    try:
        values = parse_toml(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return values["value"] if len(values) == 1 else text


def normalize_choice(given: Any, default: str | None = None, registry: Registry[Any] | None = None) -> Any:
    """Return a named choice as a mapping with its name.

    A choice is written as text, "sgd(lr=0.2)", or as a mapping; `default` is the name of a mapping without one. With a
    `registry`, text may give the first options without their names. Anything else is returned unchanged, for the
    caller to refuse.
    """
    if isinstance(given, str) and registry is not None:
        return registry.parse(given)
    if isinstance(given, str):
        name, options = parse_spec(given)
        return {"name": name, **options}
    if isinstance(given, Mapping) and default is not None:
        return {"name": default, **given}
    return given


def _apply_override(settings: dict[str, Any], override: str) -> None:
    """Set one "dotted.key=value" in a recipe as written."""
    key, equals, text = override.partition("=")
    require(
        bool(equals) and all(key.strip().split(".")),
        f"'{shorten(override)}' is not of the form key=value (train.epochs=10).",
    )
    set_setting(settings, key.strip(), parse_value(text.strip()))


def _read_toml(path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file; raise PomonaError where it cannot be read or parsed."""
    try:
        data = read_bytes(path, MAX_TOML_BYTES)
        require_whole(data, path)
        return parse_toml(data.decode())
    except OSError as error:
        raise PomonaError(f"the recipe '{path}' cannot be read: {error.strerror}.") from error
    except PomonaError:
        raise
    except ValueError as error:
        raise PomonaError(f"the recipe '{path}' is not valid TOML: {describe(error)}.") from error
