"""Plain text for language models."""

from __future__ import annotations

from collections.abc import Sequence
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
    """The user's own text: `input.txt`, divided in order into train, valid and test; or one file for each part.

    The files of the parts are found by their endings: train.txt, valid.txt, test.txt (as in `ptb.train.txt`). The
    vocabulary is that of the whole text. A split is one stream of tokens; y is x shifted by one.
    """

    length: int = 64  # tokens per window
    unit: str = "char"  # what a token is: a "char" or a "word" (separated by whitespace; a line ends in <eos>)
    valid: float = 0.05  # the fraction of input.txt before the test text that is held out for validation
    test: float = 0.05  # the fraction at the end of input.txt that is the test text
    licence: ClassVar[str] = "yours"
    citation: ClassVar[str] = "yours"
    folders: ClassVar[tuple[str, ...]] = ("text",)
    instructions: ClassVar[str] = "put your text into text/input.txt, or train.txt, valid.txt and test.txt"

    def __post_init__(self) -> None:
        require(self.length >= 1, f"length must be 1 or more, got {self.length}.")
        require(self.unit in ("char", "word"), f"unit must be 'char' or 'word', got '{self.unit}'.")
        require(
            self.valid > 0 and self.test > 0 and self.valid + self.test < 1,
            f"valid and test must be above 0 and sum to less than 1, got {self.valid} and {self.test}.",
        )

    def read(self, folder: Path) -> Dataset:
        units, ends = self.read_units(folder)
        vocabulary, tokens = number_units(units)
        parts = [Split.from_arrays(part[:-1].astype(np.int64), part[1:]) for part in np.split(tokens, ends)]
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
            labels=tuple(vocabulary),
        )

    def read_units(self, folder: Path) -> tuple[np.ndarray, list[int]]:
        """Return the whole text as an array of characters or words, and the positions where train and valid end."""
        whole = folder / "input.txt"
        if whole.exists() or not any(folder.glob("*train.txt")):
            units = self.read_file(whole)
            return units, [
                round(len(units) * (1 - self.valid - self.test)),
                round(len(units) * (1 - self.test)),
            ]
        files = [next(iter(sorted(folder.glob(f"*{p}.txt"))), folder / f"{p}.txt") for p in ("train", "valid", "test")]
        parts = [self.read_file(file) for file in files]
        return np.concatenate(parts), [len(parts[0]), len(parts[0]) + len(parts[1])]

    def read_file(self, path: Path) -> np.ndarray:
        """Read one file as an array of characters or words."""
        with self.parsing(path, "UTF-8 text"):
            text = self.read_bytes(path).decode()
        if not text:
            raise PomonaError(f"{path} is empty: put text into it.")
        if self.unit == "word":
            # As objects: an array of texts takes as many bytes for every word as for the longest one.
            return np.array(text.replace("\n", " <eos> ").split(), dtype=object)
        return np.array([text]).view("U1")


def number_units(units: np.ndarray) -> tuple[Sequence[str], np.ndarray]:
    """Return the sorted vocabulary of a text, and the number of each of its characters or words in it."""
    if units.dtype != object:
        characters, tokens = np.unique(units, return_inverse=True)
        return characters.tolist(), tokens
    vocabulary = sorted(set(units))
    numbers = {unit: number for number, unit in enumerate(vocabulary)}
    return vocabulary, np.fromiter(map(numbers.__getitem__, units), np.int64, len(units))


@SOURCES.register("shakespeare")
@dataclass(frozen=True)
class Shakespeare(Text):
    """One megabyte of Shakespeare's plays with 65 different characters."""

    classes: ClassVar[int] = 65
    contents: ClassVar[str] = "1 115 394 characters"
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
