"""The boundary for files that a stranger may have made: limits before anything is built, one error for all failures.

A reader opens its files, decompresses and parses through this module, inside `reading`. Nothing here or behind it
allocates what a header claims: sizes, depths and counts are compared with limits first.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from safetensors import safe_open

from .errors import PomonaError, escape_unprintable, require

if TYPE_CHECKING:
    from torch import Tensor

MIB = 1 << 20
MAX_DEPTH = 64  # of nested lists, tables and objects
MAX_TOML_BYTES = MIB // 4
MAX_JSON_BYTES = 64 * MIB
TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"
MAX_REASON_LENGTH = 200  # characters of a parser's message
GZIP = 16 + zlib.MAX_WBITS  # zlib's code for a gzip header and trailer

# A dotted key with more parts than tables may be nested: the standard library's parser takes quadratic time for it.
QUOTED = re.compile(r"""\"[^"\n]*+"|'[^'\n]*+'""")
LONG_KEY = re.compile(rf"(?<![\w-])[\w-]++(?:[ \t]*+\.[ \t]*+[\w-]++){{{MAX_DEPTH}}}")
# By how much a byte of JSON, outside of strings, changes the depth.
NESTING = np.zeros(256, np.int32)
NESTING[list(b"[{")], NESTING[list(b"]}")] = 1, -1


@contextmanager
def reading(what: str, advice: str = "") -> Iterator[None]:
    """Turn every failure within the block into a PomonaError of one sentence about `what`, such as "the file 'x'".

    `advice` says what to do, and is appended behind a semicolon. A PomonaError passes unchanged.
    """
    ending = f"; {advice}." if advice else "."
    try:
        yield
    except PomonaError:
        raise
    except MemoryError as error:
        raise PomonaError(f"{what} needs more memory than there is{ending}") from error
    except OSError as error:
        raise PomonaError(f"{what} cannot be read: {error.strerror or describe(error)}{ending}") from error
    except Exception as error:  # a hostile file can make anything fail, and must do no more than that
        raise PomonaError(f"{what} is damaged: {describe(error)}{ending}") from error


def describe(error: Exception) -> str:
    """Return the first line of an error's message, printable and of limited length, without its full stop."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    lines = str(error).strip().splitlines()
    text = escape_unprintable(lines[0] if lines else "")[:MAX_REASON_LENGTH].rstrip(".")
    if isinstance(error, KeyError):
        return f"it has no {text}"
    return text or type(error).__name__


# ---- files


def read_bytes(path: Path | str, limit: int | None = None) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes; a pipe or a device is refused."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        require(limit is None or size <= limit, f"'{path}' has {size:,} bytes, and at most {limit or 0:,} are read.")
        return file.read() if limit is None else file.read(size)  # a buffer of `limit` bytes takes longer


def open_regular(path: Path | str, mode: str = "rb") -> BinaryIO:
    """Open a regular file in a binary mode; raise PomonaError, without waiting, for a pipe or a device."""

    def open_checked(name: str, flags: int) -> int:
        handle = os.open(name, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
        try:
            require_regular(path, os.fstat(handle).st_mode)
        except BaseException:
            os.close(handle)
            raise
        return handle

    return open(path, mode, opener=open_checked)  # type: ignore[return-value]


def require_regular(path: Path | str, mode: int | None = None) -> None:
    """Raise PomonaError unless a path is that of a regular file, and OSError where there is none."""
    mode = os.stat(path).st_mode if mode is None else mode
    if not stat.S_ISREG(mode):
        raise PomonaError(f"'{path}' is no regular file, but a {describe_mode(mode)}: replace it with a copy.")


def describe_mode(mode: int) -> str:
    """Return what kind of thing a path names, in words."""
    kinds = {"folder": stat.S_ISDIR, "pipe": stat.S_ISFIFO, "socket": stat.S_ISSOCK}
    return next((name for name, check in kinds.items() if check(mode)), "device")


def read_object(path: Path | str, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file; raise PomonaError with the file's name where it holds anything else."""
    with reading(f"'{path}'"):
        return require_object(parse_json(read_bytes(path, limit), limit))


def require_object(value: Any) -> dict[str, Any]:
    """Return a value that is an object of JSON; raise ValueError for any other."""
    if not isinstance(value, dict):
        raise ValueError("it holds no object")
    return value


def read_tensors(path: Path | str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors of a safetensors file."""
    require_regular(path)
    with safe_open(path, "pt") as file:
        names = list(file.keys())
        return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in names}


def read_tensor_metadata(path: Path | str) -> dict[str, str]:
    """Return the metadata of a safetensors file, without its tensors."""
    require_regular(path)
    with safe_open(path, "np") as file:  # "pt" would make a storage of the tensors
        return dict(file.metadata() or {})


# ---- parsers


def parse_json(data: bytes | str, limit: int = MAX_JSON_BYTES) -> Any:
    """Return the value of a JSON text of limited size and depth; raise ValueError for any other text."""
    data = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    require_length(len(data), limit)
    require_shallow_json(data)
    return json.loads(data)


def require_shallow_json(data: bytes) -> None:
    """Raise ValueError for a JSON text that is nested more than `MAX_DEPTH` deep."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    outside = re.sub(rb'"[^"]*+"', b"", data.replace(b"\\\\", b"").replace(b'\\"', b""))
    depth = 0
    for start in range(0, len(outside), MIB):
        depths = np.cumsum(NESTING[np.frombuffer(outside, np.uint8, min(MIB, len(outside) - start), start)])
        if depth + depths.max() > MAX_DEPTH:
            raise ValueError(TOO_DEEP)
        depth += int(depths[-1])


def parse_toml(text: str, limit: int = MAX_TOML_BYTES) -> dict[str, Any]:
    """Return the table of a TOML text of limited size and depth; raise ValueError for any other text."""
    require_length(len(text), limit)
    plain = text.replace("\\\\", "").replace('\\"', "")
    if LONG_KEY.search(QUOTED.sub("quoted", plain)):
        raise ValueError(TOO_DEEP)
    try:
        value = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    require_shallow(value)
    return value


def require_length(size: int, limit: int) -> None:
    """Raise ValueError for a text that is longer than those that are read."""
    if size > limit:
        raise ValueError(f"it has {size:,} bytes, and at most {limit:,} are read")


def require_shallow(value: Any) -> None:
    """Raise ValueError for lists and mappings that are nested more than `MAX_DEPTH` deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        lists = [one.values() if isinstance(one, Mapping) else one for one in level if isinstance(one, (Mapping, list))]
        level = [one for values in lists for one in values]
        if not level:
            return
    raise ValueError(TOO_DEEP)


# ---- compression


def inflate(data: bytes, limit: int, format: int = zlib.MAX_WBITS) -> bytes:
    """Return what zlib or, with `GZIP`, gzip has compressed; raise ValueError for more than `limit` bytes of it."""
    parts, left = [], limit
    while data:
        stream = zlib.decompressobj(format)
        parts.append(stream.decompress(data, left + 1))
        left -= len(parts[-1])
        if left < 0:
            raise ValueError(f"its compressed data have more than the {limit:,} bytes that are read")
        if not stream.eof:
            raise EOFError("its compressed data end too early")
        data = stream.unused_data.lstrip(b"\0") if format == GZIP else b""
    if not parts:
        raise EOFError("its compressed data are empty")
    return b"".join(parts)
