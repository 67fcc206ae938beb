"""A data set with its shape, classes and normalization."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pomona.errors import PomonaError, require, unknown_name_error

from . import keyed_random
from .batches import Batches
from .image_stream import ImageStream, StreamedBatches
from .split import Split, cut_windows

Kind = Literal["image", "tokens", "table", "text"]

# Mean and standard deviation of ImageNet, which many recipes use for all color images (IteRand also for CIFAR).
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training, validation and test parts of a data set.

    kind     x of a split                                       y
    image    uint8 (rows, channels, height, width)              class
             (without values where images stay on the disk)
    tokens   int64 (rows, length), padded with 0                class
    table    float32 (rows, features)                           class
    text     int64 (tokens,), one stream                        the next token
    """

    name: str
    train: Split
    test: Split
    classes: int
    input_shape: tuple[int, ...]
    mean: tuple[float, ...] | None = None  # per channel, of pixels in [0, 1]; None: x is not normalized
    std: tuple[float, ...] | None = None
    kind: Kind = "image"
    augment: str | None = None  # the usual augmentation for training on this data set
    valid: Split | None = None
    vocab: int | None = None  # number of token ids
    labels: tuple[str, ...] = ()  # names of the classes, or the tokens of a text
    fitted: str = ""  # what the inputs owe to all training rows together, such as a vocabulary

    def part(self, name: str) -> Split:
        """Return the part `train`, `valid` or `test`; raise PomonaError if there is no such part."""
        parts = {"train": self.train, "valid": self.valid, "test": self.test}
        if name not in parts:
            raise unknown_name_error("part", name, parts)
        split = parts[name]
        if split is None:
            raise PomonaError(f"'{self.name}' has no validation part: load it with validation=COUNT.")
        return split

    def batches(self, batch_size: int, *, part: str = "train", carry: bool = False, **options: Any) -> Batches:
        """Return `Batches` of a part, with this data set's mean, std and (for training) augmentation.

        Text is cut into windows of `input_shape[0]` tokens. With `carry=True` they are not shuffled, and each row of a
        batch continues the same row of the previous batch.
        """
        split = self.part(part)
        if self.kind == "text":
            split = cut_windows(split, self.input_shape[0], batch_size if carry else 0)
            if carry:
                options = {"shuffle": False, "drop_last": True} | options
        augment = self.augment if part == "train" else None
        defaults = {"mean": self.mean, "std": self.std, "augment": augment}
        if isinstance(split, ImageStream):
            return StreamedBatches(split, batch_size, **(defaults | options))
        return Batches(split, batch_size, **(defaults | options))

    def to(self, device: torch.device | str) -> Dataset:
        """Return the data set on another device."""
        valid = None if self.valid is None else self.valid.to(device)
        return dataclasses.replace(self, train=self.train.to(device), test=self.test.to(device), valid=valid)

    def hold_out(self, validation: int | float, seed: int = 0) -> Dataset:
        """Return the data set with a random part of train, a number of rows or a fraction below 1, moved to `valid`."""
        rows = len(self.train)
        is_fraction = isinstance(validation, float)
        require(
            0 <= validation < (1 if is_fraction else rows),
            f"validation must be a count from 0 to {rows - 1} or a fraction below 1, got {validation}.",
        )
        count = min(round(validation * rows), rows - 1) if is_fraction else int(validation)
        if not count:
            return self
        require(
            self.valid is None,
            f"'{self.name}' has its own validation part, so validation must be 0, got {validation}.",
        )
        train, valid = keyed_random.stratified_split(self.train.y.cpu().numpy(), count, seed)
        return dataclasses.replace(self, train=self.train.take_rows(train), valid=self.train.take_rows(valid))

    def describe(self) -> dict[str, Any]:
        """Return the facts that a run records about its data."""
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
