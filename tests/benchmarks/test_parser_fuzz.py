"""Mutated files at every parser: each is accepted or refused with one sentence, and a parser that fails is found."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pomona.errors import PomonaError

INPUTS = 2000


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], Any]) -> Any:
    """Return the script that feeds the parsers."""
    return load_script("parser_fuzz")


def test_every_parser_accepts_its_valid_files(script, tmp_path):
    for parser in script.make_parsers(tmp_path):
        for number, value in enumerate(parser.valid):
            scratch = tmp_path / parser.name / str(number)
            scratch.mkdir(parents=True)
            parser.parse(value, scratch)


def test_no_mutated_file_fails(script):
    report = script.fuzz(INPUTS, seed=1)
    assert [f"{name}: {line}" for name, one in report.parsers.items() for line in one.failures] == []
    assert report.count("inputs") >= INPUTS
    assert report.count("refused") > INPUTS / 2
    assert report.count("accepted") > 0


def raise_key_error(value: Any, folder: Path) -> None:
    raise KeyError("x")


def say_nothing(value: Any, folder: Path) -> None:
    raise PomonaError("")


def ask_for_memory(value: Any, folder: Path) -> None:
    try:
        bytearray(1 << 45)
    except MemoryError as error:
        raise PomonaError("it is too large.") from error


def grow(value: Any, folder: Path) -> None:
    bytearray(b"x") * (2 << 30)


def crash(value: Any, folder: Path) -> None:
    os.abort()


def hang(value: Any, folder: Path) -> None:
    time.sleep(600)


def loop(value: Any, folder: Path) -> None:
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass


@pytest.mark.parametrize(
    ("parse", "reason"),
    [
        (raise_key_error, "KeyError"),
        (say_nothing, "not one printable line"),
        (ask_for_memory, "memory without limit"),
        (grow, "GiB of memory"),
        (crash, "crash, exit code -6"),
        (hang, "no answer"),
        (loop, " s"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_parser_that_fails_is_found(script, monkeypatch, tmp_path, parse, reason):
    monkeypatch.setattr(script, "PATIENCE", 1.0 if parse is hang else 60.0)
    monkeypatch.setattr(script, "SECONDS", 0.1 if parse is loop else 60.0)
    monkeypatch.setattr(script, "make_parsers", lambda folder: [script.Parser("wrong", 1, [], lambda draw: b"", parse)])
    report = script.fuzz(2, workers=1)
    found = report.parsers["wrong"]
    assert (found.inputs, found.failed) == (2, 2)
    assert all(reason in line for line in found.failures)


def test_the_inputs_of_a_seed_are_always_the_same(script, tmp_path):
    for parser in script.make_parsers(tmp_path):
        first, again = ([repr(parser.make(script.random.Random(seed))) for seed in range(20)] for _ in range(2))
        assert first == again, parser.name
        assert len(set(first)) > 1, parser.name
