"""CIFAR-10 and CIFAR-100: the binary version, and the Python version, which is read without unpickling."""

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
    """Base of data sets with 50 000 training and 10 000 test images of 32×32 pixels in color."""

    training_rows: ClassVar[int | None] = 50_000
    contents: ClassVar[str] = "50 000 + 10 000 color images of 32×32"
    licence: ClassVar[str] = "no licence stated; cite the report"
    citation: ClassVar[str] = "Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009"
    classes: ClassVar[int]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    train_files: ClassVar[tuple[str, ...]]
    test_file: ClassVar[str]
    rows_per_file: ClassVar[int]  # images in each training file
    test_rows: ClassVar[int] = 10_000
    label_bytes: ClassVar[int]  # in a binary record; the last one is the class
    labels_key: ClassVar[str]  # of the labels in the Python version
    class_name_files: ClassVar[tuple[str, str, str]]  # text file; file of the Python version and the key in it

    def read(self, folder: Path) -> Dataset:
        binary = folder.name.endswith(("-bin", "-binary"))
        read = self.read_binary if binary else self.read_python
        parts = [read(folder / file, self.rows_per_file) for file in self.train_files]
        images, labels = (np.concatenate(p) for p in zip(*parts, strict=True))
        return Dataset(
            self.name,
            Split.from_arrays(images, labels),
            Split.from_arrays(*read(folder / self.test_file, self.test_rows)),
            classes=self.classes,
            input_shape=(3, 32, 32),
            mean=self.mean,
            std=self.std,
            augment="standard",
            labels=self.read_class_names(folder, binary),
        )

    def read_binary(self, path: Path, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Read images and labels from a file of records: the label bytes, then red, green and blue planes."""
        path = path.with_suffix(".bin")
        data = np.frombuffer(self.read_bytes(path), np.uint8)
        record_size = self.label_bytes + PIXELS
        if data.size != rows * record_size:
            expected = f"{rows * record_size} ({rows} records of {record_size})"
            raise self.damaged_error(path, f"{data.size} bytes", expected)
        records = data.reshape(rows, record_size)
        return self.validate_labels(path, records[:, self.label_bytes :], records[:, self.label_bytes - 1])

    def read_python(self, path: Path, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Read images and labels from a pickled dictionary of one array and a list."""
        content = self.read_pickle(path)
        images, labels = content.get("data"), content.get(self.labels_key)
        if not isinstance(images, np.ndarray) or images.shape != (rows, PIXELS):
            raise self.damaged_error(path, f"'data' of shape {getattr(images, 'shape', None)}", f"{(rows, PIXELS)}")
        valid = isinstance(labels, list) and len(labels) == rows and all(type(v) is int for v in labels)
        if not valid:
            raise self.damaged_error(path, f"no list of {rows} integers under '{self.labels_key}'", "one")
        with self.parsing(path, f"labels from 0 to {self.classes - 1}"):
            return self.validate_labels(path, images, np.array(labels))

    def validate_labels(self, path: Path, images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the images in their shape and the labels; raise PomonaError for a label out of range."""
        bad = np.flatnonzero((labels < 0) | (labels >= self.classes))
        if bad.size:
            raise self.damaged_error(path, f"label {labels[bad[0]]} in record {bad[0]}", f"0 to {self.classes - 1}")
        return images.reshape(-1, 3, 32, 32), labels

    def read_class_names(self, folder: Path, binary: bool) -> tuple[str, ...]:
        """Read the names of the classes from the text file or the pickled dictionary."""
        text, meta, key = self.class_name_files
        if binary:
            return tuple(self.read_bytes(folder / text).decode("utf-8", "replace").split())
        names = self.read_pickle(folder / meta).get(key, [])
        if not isinstance(names, list):
            raise self.damaged_error(folder / meta, f"no list under '{key}'", "the names of the classes")
        return tuple(n.decode("utf-8", "replace") if isinstance(n, bytes) else str(n) for n in names)

    def read_pickle(self, path: Path) -> dict[str, Any]:
        """Read a pickled dictionary without executing the pickle."""
        content = self.read_bytes(path)
        with self.parsing(path, "a dictionary of numbers, names and one uint8 array"):
            return unpickle(content)


@SOURCES.register("cifar10")
@dataclass(frozen=True)
class Cifar10(Cifar):
    """Color images in ten classes."""

    classes: ClassVar[int] = 10
    folders: ClassVar[tuple[str, ...]] = ("cifar-10-batches-bin", "cifar-10-batches-py")
    mean: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)  # of the training images, per channel
    std: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)
    train_files: ClassVar[tuple[str, ...]] = tuple(f"data_batch_{i}" for i in range(1, 6))
    test_file: ClassVar[str] = "test_batch"
    rows_per_file: ClassVar[int] = 10_000
    label_bytes: ClassVar[int] = 1
    labels_key: ClassVar[str] = "labels"
    class_name_files: ClassVar[tuple[str, str, str]] = ("batches.meta.txt", "batches.meta", "label_names")
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
    """Color images in a hundred classes (the fine labels)."""

    classes: ClassVar[int] = 100
    folders: ClassVar[tuple[str, ...]] = ("cifar-100-binary", "cifar-100-python")
    mean: ClassVar[tuple[float, ...]] = (0.5071, 0.4865, 0.4409)
    std: ClassVar[tuple[float, ...]] = (0.2673, 0.2564, 0.2762)
    train_files: ClassVar[tuple[str, ...]] = ("train",)
    test_file: ClassVar[str] = "test"
    rows_per_file: ClassVar[int] = 50_000
    label_bytes: ClassVar[int] = 2
    labels_key: ClassVar[str] = "fine_labels"
    class_name_files: ClassVar[tuple[str, str, str]] = ("fine_label_names.txt", "meta", "fine_label_names")
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
