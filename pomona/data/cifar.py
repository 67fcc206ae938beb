"""CIFAR-10 and CIFAR-100: the binary version, and the python version read without unpickling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .dataset import Dataset
from .sources import SOURCES, Download, Source
from .split import Split
from .unpickle import unpickle

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Cifar(Source):
    """Colour images of 32×32; 50 000 to train, 10 000 to test."""

    holds: ClassVar[str] = "50 000 + 10 000 colour images of 32×32"
    licence: ClassVar[str] = "no licence stated; cite the report"
    citation: ClassVar[str] = "Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009"
    classes: ClassVar[int]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    train: ClassVar[tuple[str, ...]]
    test: ClassVar[str]
    rows: ClassVar[int]  # images in one file of train
    test_rows: ClassVar[int] = 10_000
    label_bytes: ClassVar[int]  # in a binary record; the last one is the class
    key: ClassVar[str]  # of the labels, in the python version
    names: ClassVar[tuple[str, str, str]]  # of the classes: text file, python file and its key

    def read(self, folder: Path) -> Dataset:
        binary = folder.name.endswith(("-bin", "-binary"))
        read = self.binary if binary else self.python
        parts = [read(folder / file, self.rows) for file in self.train]
        images, labels = (np.concatenate(p) for p in zip(*parts, strict=True))
        return Dataset(
            self.name,
            Split.of(images, labels),
            Split.of(*read(folder / self.test, self.test_rows)),
            classes=self.classes,
            input_shape=(3, 32, 32),
            mean=self.mean,
            std=self.std,
            augment="standard",
            labels=self.class_names(folder, binary),
        )

    def binary(self, path: Path, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """A file of records: the label bytes, then red, green and blue planes."""
        path = path.with_suffix(".bin")
        data = np.frombuffer(self.content(path), np.uint8)
        record = self.label_bytes + PIXELS
        if data.size != rows * record:
            raise self.damaged(path, f"{data.size} bytes", f"{rows * record} ({rows} records of {record})")
        records = data.reshape(rows, record)
        return self.checked(path, records[:, self.label_bytes :], records[:, self.label_bytes - 1])

    def python(self, path: Path, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """A pickled dictionary of one array and a list of labels."""
        content = self.dictionary(path)
        images, labels = content.get("data"), content.get(self.key)
        if not isinstance(images, np.ndarray) or images.shape != (rows, PIXELS):
            raise self.damaged(path, f"'data' of shape {getattr(images, 'shape', None)}", f"{(rows, PIXELS)}")
        whole = isinstance(labels, list) and len(labels) == rows and all(type(v) is int for v in labels)
        if not whole:
            raise self.damaged(path, f"no list of {rows} whole numbers under '{self.key}'", "one")
        return self.checked(path, images, np.array(labels))

    def checked(self, path: Path, images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        bad = np.flatnonzero((labels < 0) | (labels >= self.classes))
        if bad.size:
            raise self.damaged(path, f"label {labels[bad[0]]} in record {bad[0]}", f"0 to {self.classes - 1}")
        return images.reshape(-1, 3, 32, 32), labels

    def class_names(self, folder: Path, binary: bool) -> tuple[str, ...]:
        text, meta, key = self.names
        if binary:
            return tuple(self.content(folder / text).decode("utf-8", "replace").split())
        return tuple(str(n) for n in self.dictionary(folder / meta).get(key, ()))

    def dictionary(self, path: Path) -> dict[str, Any]:
        content = self.content(path)
        try:
            return unpickle(content)
        except ValueError as error:
            raise self.damaged(path, str(error), "a dictionary of numbers, names and one uint8 array") from error


@SOURCES.register("cifar10")
@dataclass(frozen=True)
class Cifar10(Cifar):
    """Ten classes of colour images."""

    classes: ClassVar[int] = 10
    folders: ClassVar[tuple[str, ...]] = ("cifar-10-batches-bin", "cifar-10-batches-py")
    mean: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)  # of the 50 000, per channel
    std: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)
    train: ClassVar[tuple[str, ...]] = tuple(f"data_batch_{i}" for i in range(1, 6))
    test: ClassVar[str] = "test_batch"
    rows: ClassVar[int] = 10_000
    label_bytes: ClassVar[int] = 1
    key: ClassVar[str] = "labels"
    names: ClassVar[tuple[str, str, str]] = ("batches.meta.txt", "batches.meta", "label_names")
    downloads: ClassVar[dict[str, tuple[Download, ...]]] = {
        "cifar-10-batches-bin": (
            Download(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "md5:c32a1d4ab5d03f1284b67883e8d87530",
            ),
        ),
        "cifar-10-batches-py": (
            Download(
                "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
                "md5:c58f30108f718f92721af3b95e74349a",
            ),
        ),
    }


@SOURCES.register("cifar100")
@dataclass(frozen=True)
class Cifar100(Cifar):
    """A hundred classes of colour images (the fine labels)."""

    classes: ClassVar[int] = 100
    folders: ClassVar[tuple[str, ...]] = ("cifar-100-binary", "cifar-100-python")
    mean: ClassVar[tuple[float, ...]] = (0.5071, 0.4865, 0.4409)
    std: ClassVar[tuple[float, ...]] = (0.2673, 0.2564, 0.2762)
    train: ClassVar[tuple[str, ...]] = ("train",)
    test: ClassVar[str] = "test"
    rows: ClassVar[int] = 50_000
    label_bytes: ClassVar[int] = 2
    key: ClassVar[str] = "fine_labels"
    names: ClassVar[tuple[str, str, str]] = ("fine_label_names.txt", "meta", "fine_label_names")
    downloads: ClassVar[dict[str, tuple[Download, ...]]] = {
        "cifar-100-binary": (
            Download(
                "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
                "md5:03b5dce01913d631647c71ecec9e9cb8",
            ),
        ),
        "cifar-100-python": (
            Download(
                "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
                "md5:eb9058c3a382ffc7106e4002c42a8d85",
            ),
        ),
    }
