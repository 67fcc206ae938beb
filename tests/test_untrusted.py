"""The boundary for files of strangers: limits before anything is built, and one sentence for every failure."""

from __future__ import annotations

import gzip
import json
import os
import time
import zlib
from pathlib import Path

import pytest

from pomona import untrusted
from pomona.errors import MAX_MESSAGE_LENGTH, PomonaError, escape_unprintable, unknown_name_error
from pomona.untrusted import GZIP, MAX_DEPTH


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("step"), "the file is damaged: it has no 'step'; copy it again."),
        (ValueError("first line.\nsecond"), "the file is damaged: first line; copy it again."),
        (TypeError(), "the file is damaged: TypeError; copy it again."),
        (RecursionError("maximum depth"), "the file is damaged: it is nested too deeply; copy it again."),
        (MemoryError(), "the file needs more memory than there is; copy it again."),
        (FileNotFoundError(2, "No such file"), "the file cannot be read: No such file; copy it again."),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_failure_becomes_one_sentence(error: Exception, message: str):
    with pytest.raises(PomonaError) as caught, untrusted.reading("the file", "copy it again"):
        raise error
    assert str(caught.value) == message
    assert caught.value.__cause__ is error


def test_an_error_of_pomona_and_an_interruption_pass():
    with pytest.raises(PomonaError, match=r"^mine$"), untrusted.reading("the file"):
        raise PomonaError("mine")
    with pytest.raises(KeyboardInterrupt), untrusted.reading("the file"):
        raise KeyboardInterrupt


def test_no_message_has_characters_that_a_terminal_obeys():
    error = PomonaError("a\x1b[2J\x9b31m\u202eb\ud800\nc" + "x" * 10_000_000)
    assert "\x1b" not in str(error)
    assert str(error).startswith(r"a\u001b[2J\u009b31m\u202eb\ud800 c")
    assert len(str(error)) < 2 * MAX_MESSAGE_LENGTH
    assert escape_unprintable("two\nlines\tand ü") == "two\nlines\tand ü"
    start = time.process_time()
    assert len(str(unknown_name_error("method", "x" * 20_000_000, ["dpf"]))) < 300
    assert time.process_time() - start < 1


def test_only_regular_files_of_limited_size_are_read(tmp_path: Path):
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert untrusted.read_bytes(file, 5) == b"12345"
    with pytest.raises(PomonaError, match="has 5 bytes, and at most 4 are read"):
        untrusted.read_bytes(file, 4)
    os.mkfifo(tmp_path / "pipe")
    for read in (untrusted.read_bytes, untrusted.read_tensors, untrusted.read_tensor_metadata):
        with pytest.raises(PomonaError, match="is no regular file, but a pipe"):  # and no waiting for a writer
            read(tmp_path / "pipe")
        with pytest.raises(PomonaError, match="is no regular file, but a device"):
            read("/dev/zero")


def nested_json(depth: int) -> bytes:
    return b'{"a":[' * (depth // 2) + b"1" + b"]}" * (depth // 2)


def test_json_is_limited_in_depth_and_size():
    assert untrusted.parse_json(nested_json(MAX_DEPTH)) == json.loads(nested_json(MAX_DEPTH))
    many = b'["' + b"[{" * 1000 + rb"\"[[\\" + b'", ' + b"[1], " * 100_000 + b"1]"
    assert untrusted.parse_json(many) == json.loads(many)  # brackets in texts, and beside each other, are not nested
    for text in (nested_json(MAX_DEPTH + 2), b"[" * 1_000_000, b"[[]," * 1_000_000, b'{"":' * 500_000):
        with pytest.raises(ValueError, match="nested more than 64 deep"):
            untrusted.parse_json(text)
    with pytest.raises(ValueError, match="has 8 bytes, and at most 7 are read"):
        untrusted.parse_json(b"[1, 2]  ", 7)


def test_the_depth_of_json_is_counted_across_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(untrusted, "MIB", 16)
    assert untrusted.parse_json(nested_json(MAX_DEPTH)) == json.loads(nested_json(MAX_DEPTH))
    with pytest.raises(ValueError, match="nested"):
        untrusted.parse_json(nested_json(MAX_DEPTH + 2))


@pytest.mark.parametrize(
    "text",
    [
        "a." * 100_000 + "a = 1",
        "[" + "a." * 100_000 + "a]",
        "x = {" + "a." * 100_000 + "a = 1}",
        "'a' . \"a\"." * 10_000 + "a = 1",
        "a = " + "[" * 100_000,
        "a = " + "[" * 100 + "]" * 100,
        "a = " + "{a = " * 100 + "1" + "}" * 100,
    ],
    ids=["key", "table", "inline", "quoted", "open", "lists", "tables"],
)
def test_deep_toml_is_refused_at_once(text: str):
    start = time.process_time()
    with pytest.raises(ValueError, match="nested more than 64 deep"):
        untrusted.parse_toml(text)
    assert time.process_time() - start < 2


def test_toml_that_is_long_but_not_deep_is_read():
    text = "x = " + "[1, " * 30 + "1" + "]" * 30 + "\n" + 'y = "' + "a." * 1000 + '"\n# ' + "b." * 30 + "\n"
    assert untrusted.parse_toml(text)["y"] == "a." * 1000
    with pytest.raises(ValueError, match="bytes, and at most 262,144 are read"):
        untrusted.parse_toml("#" * 300_000)


def test_compressed_data_are_limited_before_they_are_unpacked():
    data = b"abc" * 1000
    assert untrusted.inflate(zlib.compress(data), 3000) == data
    assert untrusted.inflate(gzip.compress(data) + gzip.compress(b"d") + b"\0\0", 3001, GZIP) == data + b"d"
    for packed, form in ((zlib.compress(data), zlib.MAX_WBITS), (gzip.compress(data), GZIP)):
        with pytest.raises(ValueError, match="more than the 2,999 bytes"):
            untrusted.inflate(packed, 2999, form)
        with pytest.raises(EOFError, match="end too early"):
            untrusted.inflate(packed[:-5], 3000, form)
    with pytest.raises(EOFError, match="empty"):
        untrusted.inflate(b"", 10)
