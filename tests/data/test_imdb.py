"""The reader of the Large Movie Review data set on small files."""

from __future__ import annotations

from pathlib import Path

import pytest

from pomona.data import load
from pomona.data.imdb import Imdb, tokenize
from pomona.errors import PomonaError


@pytest.fixture
def reviews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Imdb, "reviews", 1)
    texts = {
        "train/neg": "Bad, BAD film!<br /><br />Don't see it",
        "train/pos": "A good film. Bad? no; film!",
        "test/neg": "bad bad zebra",
        "test/pos": "",
    }
    for part, text in texts.items():
        folder = tmp_path / "aclImdb" / part
        folder.mkdir(parents=True)
        (folder / "0_1.txt").write_text(text)
    return tmp_path


def test_reviews_become_token_ids(reviews: Path):
    assert tokenize("Don't<br />go—élan_2x") == ["don", "t", "go", "élan", "x"]
    # bad 3, film 3, then one each, in alphabetical order: a, don, …
    data = load("imdb", root=reviews, words=4, maxlen=5)
    assert (data.vocab, data.classes, data.input_shape, data.kind) == (6, 2, (5,), "tokens")
    assert data.train.x.tolist() == [[3, 5, 1, 1, 1], [1, 3, 2, 1, 3]]
    assert data.train.y.tolist() == [0, 1]
    assert data.test.x.tolist() == [[0, 0, 2, 2, 1], [0, 0, 0, 0, 0]]
    other = load("imdb(keep='first', pad='right')", root=reviews, words=4, maxlen=5)
    assert other.train.x.tolist() == [[2, 2, 3, 5, 1], [4, 1, 3, 2, 1]]
    assert other.test.x.tolist() == [[2, 2, 1, 0, 0], [0, 0, 0, 0, 0]]


def test_missing_reviews_are_refused(reviews: Path):
    (reviews / "aclImdb" / "test" / "pos" / "0_1.txt").unlink()
    with pytest.raises(PomonaError, match=r"test/pos is damaged: 0 reviews, expected 1; remove \S+/aclImdb and run"):
        load("imdb", root=reviews)
    with pytest.raises(PomonaError, match="keep must be 'first' or 'last', got 'middle'"):
        load("imdb", root=reviews, keep="middle")
