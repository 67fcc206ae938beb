"""Plain text for language models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from pomona.errors import PomonaError, require

from .dataset import Dataset
from .sources import SOURCES, Download, Source
from .split import Split


@SOURCES.register("text")
@dataclass(frozen=True)
class Text(Source):
    """Your own text: `input.txt`, cut in order into train, valid and test; or one file for each part.

    Files of parts are found by how they end: train.txt, valid.txt, test.txt (`ptb.train.txt` will do).
    The vocabulary is that of the whole text. A split is one stream; y is x shifted by one.
    """

    length: int = 64  # tokens of a window
    unit: str = "char"  # what a token is: a "char" or a "word" (between blanks; a line ends in <eos>)
    valid: float = 0.05  # shares cut from the end of input.txt
    test: float = 0.05
    licence: ClassVar[str] = "yours"
    citation: ClassVar[str] = "yours"
    folders: ClassVar[tuple[str, ...]] = ("text",)
    advice: ClassVar[str] = "put your text into text/input.txt, or train.txt, valid.txt and test.txt"

    def __post_init__(self) -> None:
        require(self.length >= 1, f"length must be 1 or more, got {self.length}.")
        require(self.unit in ("char", "word"), f"unit must be 'char' or 'word', got '{self.unit}'.")
        require(
            self.valid > 0 and self.test > 0 and self.valid + self.test < 1,
            f"valid and test must be above 0 and sum to less than 1, got {self.valid} and {self.test}.",
        )

    def read(self, folder: Path) -> Dataset:
        units, ends = self.units(folder)
        vocabulary, tokens = np.unique(units, return_inverse=True)
        parts = [Split.of(part[:-1].astype(np.int64), part[1:]) for part in np.split(tokens, ends)]
        for part, name in zip(parts, ("train", "valid", "test"), strict=True):
            require(
                len(part) >= self.length,
                f"the {name} part of {folder} has {len(part) + 1} tokens, a window of length {self.length} "
                "needs one more than that: use a shorter length or a longer text.",
            )
        return Dataset(
            self.name,
            parts[0],
            parts[2],
            classes=len(vocabulary),
            input_shape=(self.length,),
            kind="text",
            valid=parts[1],
            vocab=len(vocabulary),
            labels=tuple(str(v) for v in vocabulary),
        )

    def units(self, folder: Path) -> tuple[np.ndarray, list[int]]:
        """The whole text as an array of chars or words, and where train and valid end."""
        whole = folder / "input.txt"
        if whole.exists() or not any(folder.glob("*train.txt")):
            units = self.cut(whole)
            return units, [
                round(len(units) * (1 - self.valid - self.test)),
                round(len(units) * (1 - self.test)),
            ]
        files = [next(iter(sorted(folder.glob(f"*{p}.txt"))), folder / f"{p}.txt") for p in ("train", "valid", "test")]
        parts = [self.cut(file) for file in files]
        return np.concatenate(parts), [len(parts[0]), len(parts[0]) + len(parts[1])]

    def cut(self, path: Path) -> np.ndarray:
        try:
            text = self.content(path).decode()
        except UnicodeDecodeError as error:
            raise self.damaged(path, str(error), "UTF-8 text") from error
        if not text:
            raise PomonaError(f"{path} is empty: put a text there.")
        if self.unit == "word":
            return np.array(text.replace("\n", " <eos> ").split())
        return np.array([text]).view("U1")


@SOURCES.register("shakespeare")
@dataclass(frozen=True)
class Shakespeare(Text):
    """A megabyte of Shakespeare's plays, 65 different characters."""

    classes: ClassVar[int] = 65
    holds: ClassVar[str] = "1 115 394 characters"
    licence: ClassVar[str] = "public domain"
    citation: ClassVar[str] = "Karpathy, The Unreasonable Effectiveness of Recurrent Neural Networks, 2015"
    folders: ClassVar[tuple[str, ...]] = ("tinyshakespeare",)
    downloads: ClassVar[dict[str, tuple[Download, ...]]] = {
        "tinyshakespeare": (
            Download(
                "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
                "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            ),
        )
    }
