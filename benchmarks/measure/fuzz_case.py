"""A reader of files as the fuzz sees it: a source of inputs, and what reads them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz_mutations import mutate_bytes


@dataclass(frozen=True)
class Parser:
    """A reader of files, and a source of inputs for it."""

    name: str
    share: int  # of all inputs, relative to the other parsers
    valid: Sequence[Any]  # inputs that are accepted
    make: Callable[[random.Random], Any]  # return an input
    parse: Callable[[Any, Path], object]  # read an input, with a folder for its files


def file_parser(
    name: str,
    share: int,
    valid: Sequence[bytes],
    file: str,
    read: Callable[[Path], object],
    others: Sequence[bytes] = (),
) -> Parser:
    """Return the parser of a single file, whose inputs are mutations of valid files and of `others`."""
    seeds = [*valid, *others]
    return Parser(name, share, valid, lambda draw: mutate_bytes(draw, draw.choice(seeds), seeds), from_file(file, read))


def from_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    """Return a function that writes an input to a file of this name and reads it."""

    def parse(data: bytes, folder: Path) -> object:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return read(path)

    return parse
