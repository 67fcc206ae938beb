"""Mutations of valid files: of bytes, of text, and of nested values with tensors in them."""

from __future__ import annotations

import copy
import json
import random
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")
HOSTILE_NUMBERS = (0, -1, -7, 1, 2**20, 2**31, 2**32, 2**63, 10**9, 10**30, 1e308, -1e308, float("nan"), float("inf"))
HOSTILE_TEXTS = (
    "",
    "../../../escaped",
    "/etc/passwd",
    "\x1b[2J\x1b]0;title\x07",
    "\x9b31m",
    "\u202etxt.exe",
    "</script><img src=x onerror=alert(1)>",
    "\0",
    "\ud800",
    "a" * 100_000,
    "nan",
    "__class__",
    "dpf(sparsity=" + "(" * 300,
    "mlp(hidden=[" + "9," * 5000 + "])",
    "x(" * 500,
    "{[]: 1}",
    "9" * 5000,
)
TOKENS = (
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
    b"'",
    b",",
    b"=",
    b".",
    b"\n",
    b"\0",
    b"\xff\xfe",
    b"null",
    b"true",
    b"-",
    b"e999",
)
LENGTHS = (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**62, 2**63, 2**64 - 1)
DEEP = 300  # levels of nested lists
LONG = 20_000  # entries of a list


def mutate_bytes(draw: random.Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Return bytes with one to four mutations."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 4))):
        changed = draw.choice(BYTE_MUTATIONS)(draw, changed, others)
    return bytes(changed)


def flip_bits(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> bytearray:
    """Flip some bits."""
    for _ in range(draw.randint(1, 8) if data else 0):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return data


def truncate(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> bytearray:
    """Cut off the end."""
    return data[: draw.randint(0, len(data))]


def splice(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> bytearray:
    """Put a part of another file, or of this one, in the place of some bytes."""
    source = draw.choice([bytes(data), *others])
    start, place = draw.randint(0, len(source)), draw.randint(0, len(data))
    part = source[start : start + draw.choice((1, 4, 16, 256, 4096))]
    data[place : place + draw.choice((0, len(part)))] = part
    return data


def write_length(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> bytearray:
    """Overwrite four or eight bytes with a length that files rarely have."""
    place, value = draw.randint(0, min(len(data), draw.choice((32, 256, 1 << 30)))), draw.choice(LENGTHS)
    form = draw.choice(("<I", ">I", "<Q", ">Q"))
    size = struct.calcsize(form)
    data[place : place + size] = struct.pack(form, value % (1 << 8 * size))
    return data


def repeat(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> bytearray:
    """Repeat a part many times."""
    place = draw.randint(0, len(data))
    part = data[place : place + draw.choice((1, 2, 8, 64))]
    data[place:place] = part * draw.choice((2, 100, 2000))
    return data


def insert_token(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> bytearray:
    """Insert a token of a text format, one time or many times."""
    place = draw.randint(0, len(data))
    data[place:place] = draw.choice(TOKENS) * draw.choice((1, 1, 2, DEEP))
    return data


def replace_number(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> bytearray:
    """Replace a number in a text by a hostile one."""
    found = list(NUMBER.finditer(data))[:500]
    if found:
        match = draw.choice(found)
        data[match.start() : match.end()] = str(draw.choice(HOSTILE_NUMBERS)).encode()
    return data


def replace_word(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> bytearray:
    """Replace a word of a text by a hostile text."""
    found = list(re.finditer(rb"\w+", data))[:500]
    if found:
        match = draw.choice(found)
        data[match.start() : match.end()] = draw.choice(HOSTILE_TEXTS).encode("utf-8", "surrogatepass")
    return data


BYTE_MUTATIONS: tuple[Callable[..., bytearray], ...] = (
    flip_bits,
    truncate,
    splice,
    write_length,
    repeat,
    insert_token,
    replace_number,
    replace_word,
)


def mutate_tree(draw: random.Random, tree: Any) -> Any:
    """Return a copy of nested values with one to three mutations."""
    changed = copy.deepcopy(tree)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = list_places(changed)
        if not places:
            return hostile_value(draw)
        container, key = draw.choice(places)
        change_place(draw, container, key)
    return changed


def list_places(tree: Any) -> list[tuple[Any, Any]]:
    """Return the containers and keys of all values in nested lists and dictionaries, up to some thousands."""
    places: list[tuple[Any, Any]] = []
    level = [tree]
    while level and len(places) < 4000:
        inner = []
        for one in level:
            keys = list(one) if isinstance(one, dict) else range(min(len(one), 50)) if isinstance(one, list) else ()
            places += [(one, key) for key in keys]
            inner += [one[key] for key in keys]
        level = inner
    return places


def change_place(draw: random.Random, container: Any, key: Any) -> None:
    """Replace, remove, rename or repeat one value of a container."""
    action = draw.randrange(8)
    value = container[key]
    if action == 0:
        del container[key]
    elif action == 1 and isinstance(container, dict):
        container[draw.choice((f"{key}x", "", "../x", "\x1b[0m"))] = container.pop(key)
    elif action == 2 and isinstance(container, list):
        container[key:key] = [value] * draw.choice((1, 3, 1000))
    elif action == 3 and isinstance(container, list | dict):
        other = draw.choice(list(container) if isinstance(container, dict) else range(len(container)))
        container[key], container[other] = container[other], value
    elif isinstance(value, Tensor):
        container[key] = hostile_tensor(draw, value)
    elif action == 4 and isinstance(value, int | float):
        container[key] = draw.choice((value + 1, -value, value * 1000, float(value), str(value)))
    else:
        container[key] = hostile_value(draw)


def hostile_value(draw: random.Random) -> Any:
    """Return a value that a reader may not expect."""
    kind = draw.randrange(8)
    if kind < 3:
        return draw.choice(HOSTILE_NUMBERS)
    if kind < 5:
        return draw.choice(HOSTILE_TEXTS)
    if kind == 5:
        return draw.choice((None, True, False, [], {}, [None], {"name": []}, {"": {}}))
    if kind == 6:
        nested: Any = 1
        for _ in range(draw.choice((5, DEEP))):
            nested = draw.choice(([nested], {"a": nested}))
        return nested
    return [draw.choice((0, 1, 2**20, -1))] * draw.choice((3, LONG))


def hostile_tensor(draw: random.Random, value: Tensor) -> Any:
    """Return a tensor of another content, shape or dtype, or no tensor at all."""
    flat = value.flatten()
    choices: list[Callable[[], Any]] = [
        lambda: torch.full_like(value, float("nan")) if value.is_floating_point() else torch.full_like(value, -1),
        lambda: torch.zeros_like(value),
        lambda: torch.full_like(value, 1),
        lambda: flat,
        lambda: flat[: len(flat) // 2].clone(),
        lambda: value[None],
        lambda: value.to(draw.choice((torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64))),
        lambda: torch.empty(0),
        lambda: hostile_value(draw),
    ]
    return draw.choice(choices)()


def encode_json(tree: Any) -> bytes:
    """Return nested values as JSON, which has no lone surrogates."""
    return json.dumps(tree, default=str).encode()
