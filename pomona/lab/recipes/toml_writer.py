"""A TOML writer for recipes: values first, then one section for each mapping."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
encode_string = json.JSONEncoder(ensure_ascii=False).encode


def format_toml(sections: Mapping[str, Any]) -> str:
    """Return the TOML text of a mapping of values and of sections; an option that is None becomes a comment."""
    return "\n".join(_format_lines(sections)) + "\n"


def _format_lines(sections: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a TOML file: top-level values first, because TOML has no way back out of a section."""
    for key, value in sections.items():
        if not isinstance(value, Mapping):
            yield f"{format_key(key)} = {format_value(value)}"
    for section, options in sections.items():
        if isinstance(options, Mapping):
            yield f"\n[{format_key(section)}]"
            for key, value in options.items():
                name = format_key(key)
                yield f"# {name} is not set" if value is None else f"{name} = {format_value(value)}"


def format_key(key: str) -> str:
    """Return a TOML key, quoted where TOML requires it."""
    return key if BARE_KEY.fullmatch(key) else format_value(key)


def format_value(value: Any) -> str:
    """Return a plain value as a TOML value on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):  # JSON escapes are TOML escapes, except that JSON leaves U+007F unescaped
        return encode_string(value).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, Mapping):
        pairs = (f"{format_key(k)} = {format_value(v)}" for k, v in value.items() if v is not None)
        return f"{{{', '.join(pairs)}}}"
    raise TypeError(f"TOML has no way to write {value!r}")
