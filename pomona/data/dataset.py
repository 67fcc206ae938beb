"""A data set in memory, and what is worth knowing about it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pomona.errors import PomonaError, require, unknown_name_error

from . import draws
from .batches import Batches
from .split import Split, windows

Kind = Literal["image", "tokens", "table", "text"]

# Mean and standard deviation that many recipes use for every colour image (IteRand's for CIFAR too).
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Train and test parts of a data set.

    kind     x of a split                                       y
    image    uint8 (rows, channels, height, width)              class
    tokens   int64 (rows, length), 0 where there is no word     class
    table    float32 (rows, features)                           class
    text     int64 (tokens,), one stream                        the token that follows
    """

    name: str
    train: Split
    test: Split
    classes: int
    input_shape: tuple[int, ...]
    mean: tuple[float, ...] | None = None  # per channel, of pixels in [0, 1]; None leaves x as it is
    std: tuple[float, ...] | None = None
    kind: Kind = "image"
    augment: str | None = None  # what this data set is customarily trained with
    valid: Split | None = None
    vocab: int | None = None  # number of token ids
    labels: tuple[str, ...] = ()  # names of the classes, or the tokens of a text

    def part(self, name: str) -> Split:
        """`train`, `valid` or `test`."""
        parts = {"train": self.train, "valid": self.valid, "test": self.test}
        if name not in parts:
            raise unknown_name_error("part", name, parts)
        split = parts[name]
        if split is None:
            raise PomonaError(f"'{self.name}' has no validation part: load it with validation=COUNT.")
        return split

    def batches(self, batch_size: int, *, part: str = "train", carry: bool = False, **options: Any) -> Batches:
        """`Batches` of a part, with this data set's mean, std and (for training) augmentation.

        Text comes in windows of `input_shape[0]` tokens; with `carry=True` they are not shuffled and
        each row goes on where it ended in the batch before.
        """
        split = self.part(part)
        if self.kind == "text":
            split = windows(split, self.input_shape[0], batch_size if carry else 0)
            if carry:
                options = {"shuffle": False, "drop_last": True} | options
        augment = self.augment if part == "train" else None
        defaults = {"mean": self.mean, "std": self.std, "augment": augment}
        return Batches(split, batch_size, **(defaults | options))

    def to(self, device: torch.device | str) -> Dataset:
        """The same data on another device."""
        valid = None if self.valid is None else self.valid.to(device)
        return dataclasses.replace(self, train=self.train.to(device), test=self.test.to(device), valid=valid)

    def hold_out(self, validation: int | float, seed: int = 0) -> Dataset:
        """Move a random part of train, a count of rows or a fraction below 1, to `valid`."""
        rows = len(self.train)
        share = isinstance(validation, float)
        require(
            0 <= validation < (1 if share else rows),
            f"validation must be a count from 0 to {rows - 1} or a fraction below 1, got {validation}.",
        )
        count = min(round(validation * rows), rows - 1) if share else int(validation)
        if not count:
            return self
        require(
            self.valid is None,
            f"'{self.name}' has its own validation part, so validation must be 0, got {validation}.",
        )
        train, valid = draws.stratified(self.train.y.cpu().numpy(), count, seed)
        return dataclasses.replace(self, train=self.train.take(train), valid=self.train.take(valid))

    def describe(self) -> dict[str, Any]:
        """What a run records about its data."""
        return {
            "name": self.name,
            "kind": self.kind,
            "classes": self.classes,
            "vocab": self.vocab,
            "input_shape": list(self.input_shape),
            "train": len(self.train),
            "valid": 0 if self.valid is None else len(self.valid),
            "test": len(self.test),
            "mean": None if self.mean is None else list(self.mean),
            "std": None if self.std is None else list(self.std),
        }
