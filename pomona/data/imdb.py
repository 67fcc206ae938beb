"""The Large Movie Review data set (aclImdb): positive and negative reviews."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from pomona.errors import require

from .dataset import Dataset
from .sources import SOURCES, Download, Source
from .split import Split

PADDING, UNKNOWN, FIRST = 0, 1, 2  # token ids; words follow from FIRST on, the most frequent first
WORD = re.compile(r"[^\W\d_]+")


@SOURCES.register("imdb")
@dataclass(frozen=True)
class Imdb(Source):
    """Reviews as token ids. Words are lower-case runs of letters; the vocabulary is that of the training reviews.

    Id 0 is padding, 1 a word outside the vocabulary, 2 the most frequent word, and so on. By default reviews are
    truncated and padded at the front, as in Keras.
    """

    words: int = 10_000  # size of the vocabulary: the most frequent words of train
    maxlen: int = 80  # tokens per review
    keep: str = "last"  # which tokens of a longer review: the "first" or the "last"
    pad: str = "left"  # where a shorter review is filled: "left" or "right"
    classes: ClassVar[int] = 2
    training_rows: ClassVar[int | None] = 25_000
    contents: ClassVar[str] = "25 000 + 25 000 reviews"
    licence: ClassVar[str] = "no licence stated; cite the paper"
    citation: ClassVar[str] = "Maas et al., Learning Word Vectors for Sentiment Analysis, ACL 2011"
    folders: ClassVar[tuple[str, ...]] = ("aclImdb",)
    reviews: ClassVar[int] = 12_500  # of each class, in train and in test
    downloads: ClassVar[dict[str, tuple[Download, ...]]] = {
        "aclImdb": (
            Download(
                "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
                "md5:7c2ac02c03563afcf9b574c7e56c153a",
            ),
        )
    }

    def __post_init__(self) -> None:
        require(
            self.words >= 1 and self.maxlen >= 1,
            f"words and maxlen must be 1 or more, got {self.words} and {self.maxlen}.",
        )
        require(self.keep in ("first", "last"), f"keep must be 'first' or 'last', got '{self.keep}'.")
        require(self.pad in ("left", "right"), f"pad must be 'left' or 'right', got '{self.pad}'.")

    def read(self, folder: Path) -> Dataset:
        counts: Counter[str] = Counter()
        train, test = self.read_reviews(folder / "train", counts), self.read_reviews(folder / "test", Counter())
        ranked = sorted(counts, key=lambda word: (-counts[word], word))[: self.words]
        ids = {word: FIRST + i for i, word in enumerate(ranked)}
        return Dataset(
            self.name,
            self.encode(train, ids),
            self.encode(test, ids),
            classes=2,
            input_shape=(self.maxlen,),
            kind="tokens",
            vocab=FIRST + self.words,
            labels=("neg", "pos"),
            fitted="the vocabulary",
        )

    def read_reviews(self, folder: Path, counts: Counter[str]) -> list[list[str]]:
        """Return the words of each truncated review, negative reviews first, and add all of their words to `counts`."""
        reviews = []
        for label in ("neg", "pos"):
            paths = sorted((folder / label).glob("*.txt"))
            if len(paths) != self.reviews:
                raise self.damaged_error(folder / label, f"{len(paths)} reviews", f"{self.reviews}")
            for path in paths:
                words = tokenize(self.read_bytes(path).decode("utf-8", "replace"))
                counts.update(words)
                reviews.append(words[: self.maxlen] if self.keep == "first" else words[-self.maxlen :])
        return reviews

    def encode(self, reviews: list[list[str]], ids: dict[str, int]) -> Split:
        """Return padded token ids and labels of reviews, the first half of which are negative."""
        x = np.full((len(reviews), self.maxlen), PADDING, dtype=np.int64)
        for row, words in zip(x, reviews, strict=True):
            start = self.maxlen - len(words) if self.pad == "left" else 0
            row[start : start + len(words)] = [ids.get(word, UNKNOWN) for word in words]
        return Split.from_arrays(x, np.arange(2).repeat(self.reviews))


def tokenize(text: str) -> list[str]:
    """Return the lower-case runs of letters in a text, without the HTML line breaks of the reviews."""
    return WORD.findall(text.lower().replace("<br />", " "))
