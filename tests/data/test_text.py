"""The reader of plain text for language models."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import torch

from pomona.data import load
from pomona.errors import PomonaError


def test_text_is_divided_in_order_and_shifted(tmp_path: Path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "input.txt").write_text("abcdefghij" * 10)
    data = load("text", root=tmp_path, length=4, valid=0.2, test=0.1)
    assert (data.vocab, data.classes, data.input_shape, data.labels) == (10, 10, (4,), tuple("abcdefghij"))
    assert [len(data.part(p)) for p in ("train", "valid", "test")] == [69, 19, 9]
    assert data.train.x[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert torch.equal(data.train.y, (data.train.x + 1) % 10)
    x, y = next(data.batches(3, seed=1).epoch(0))
    assert x.shape == (3, 4)
    assert torch.equal(y, (x + 1) % 10)
    first, second = list(data.batches(2, carry=True).epoch(0))[:2]
    assert second[0][:, 0].tolist() == first[1][:, -1].tolist()


def test_text_in_words_and_in_parts(tmp_path: Path):
    (tmp_path / "text").mkdir()
    for part, text in (("train", "the cat\nthe dog\n"), ("valid", "a cat\n"), ("test", "a dog\n")):
        (tmp_path / "text" / f"ptb.{part}.txt").write_text(text)
    data = load("text", root=tmp_path, unit="word", length=2)
    assert data.labels == ("<eos>", "a", "cat", "dog", "the")
    assert data.train.x.tolist() == [4, 2, 0, 4, 3]
    assert data.test.y.tolist() == [3, 0]
    (tmp_path / "text" / "ptb.valid.txt").unlink()
    with pytest.raises(PomonaError, match=r"valid.txt cannot be read"):
        load("text", root=tmp_path, unit="word", length=2)


def test_a_long_word_takes_its_space_once(tmp_path: Path):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "input.txt").write_text("a b c " * 2000 + "x" * 20_000_000)
    tracemalloc.start()
    try:
        data = load("text", root=tmp_path, unit="word", length=2)
        assert tracemalloc.get_traced_memory()[1] < 200_000_000  # 480 GB as an array of texts
    finally:
        tracemalloc.stop()
    assert data.vocab == 4
    assert len(data.labels[3]) == 20_000_000


def test_invalid_text_is_refused(tmp_path: Path):
    folder = tmp_path / "tinyshakespeare"
    folder.mkdir()
    with pytest.raises(PomonaError, match=r"input.txt cannot be read .*--download shakespeare"):
        load("shakespeare", root=tmp_path)
    (folder / "input.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(PomonaError, match="expected UTF-8 text"):
        load("shakespeare", root=tmp_path)
    (folder / "input.txt").write_text("too short")
    with pytest.raises(PomonaError, match="the train part .* has 8 tokens, a window of length 64"):
        load("shakespeare", root=tmp_path)
    with pytest.raises(PomonaError, match="unit must be 'char' or 'word', got 'byte'"):
        load("shakespeare", root=tmp_path, unit="byte")
