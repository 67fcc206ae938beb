"""Covertype: the type of forest cover on a patch of land, from 54 features in a CSV file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from pomona import untrusted
from pomona.errors import require

from . import keyed_random
from .dataset import Dataset
from .sources import SOURCES, Download, Source
from .split import Split

FILES = "covertype.csv", "covertype.csv.gz", "covtype.csv", "covtype.data", "covtype.data.gz"
FEATURES = 54
MAX_BYTES = 1 << 30  # of the text; the published one has 75 MB


@SOURCES.register("covertype")
@dataclass(frozen=True)
class Covertype(Source):
    """54 features in [0, 1] and a class from 1 to 7 in the last column, with or without a header.

    If there are features outside [0, 1], as in the published file, every column is scaled to [0, 1]. The test rows
    are always the same, with the classes in proportion.
    """

    test: float = 0.2  # the fraction of the rows that is the test set
    classes: ClassVar[int] = 7
    contents: ClassVar[str] = "581 012 rows of 54 features, or any part of them"
    licence: ClassVar[str] = "CC BY 4.0"
    citation: ClassVar[str] = "Blackard, Covertype, UCI Machine Learning Repository, 1998"
    folders: ClassVar[tuple[str, ...]] = ("covertype",)
    downloads: ClassVar[dict[str, tuple[Download, ...]]] = {
        "covertype": (
            Download(
                "https://ndownloader.figshare.com/files/5976039",
                "sha256:614360d0257557dd1792834a85a1cdebfadc3c4f30b011d56afee7ffb5b15771",
                "covtype.data.gz",
            ),
        )
    }

    def __post_init__(self) -> None:
        require(0 < self.test < 1, f"test must lie between 0 and 1, got {self.test}.")

    def read(self, folder: Path) -> Dataset:
        path = next((folder / f for f in FILES if (folder / f).exists()), folder / FILES[0])
        rows = self.read_rows(path)
        x, labels = rows[:, :FEATURES], rows[:, FEATURES]
        bad = np.flatnonzero(~np.isin(labels, np.arange(1, 8)))
        if bad.size:
            raise self.damaged_error(path, f"class {labels[bad[0]]:g} in data row {bad[0] + 1}", "1 to 7")
        if not np.isfinite(x).all():
            raise self.damaged_error(path, "a feature that is not a finite number", "numbers")
        y = labels.astype(np.int64) - 1
        train, test = keyed_random.stratified_split(y, round(self.test * len(y)), 0)
        features = scale_to_unit_range(x)
        return Dataset(
            self.name,
            Split.from_arrays(features[train], y[train]),
            Split.from_arrays(features[test], y[test]),
            classes=7,
            input_shape=(FEATURES,),
            kind="table",
            fitted="the range of each feature" if features is not x else "",
        )

    def read_rows(self, path: Path) -> np.ndarray:
        """Read the numbers of the file, one row for each patch of land."""
        lines = self.read_text(path).splitlines()
        header = bool(lines) and lines[0][:1] not in "+-.0123456789"
        for number, line in enumerate(lines, 1):
            columns = line.count(",") + 1
            if columns != FEATURES + 1:
                raise self.damaged_error(path, f"{columns} columns in line {number}", f"{FEATURES + 1}")
        if len(lines) - header < 2:
            raise self.damaged_error(path, f"{len(lines) - header} rows", "2 or more")
        with self.parsing(path, "numbers"):
            return np.loadtxt(lines[header:], np.float32, delimiter=",", ndmin=2)

    def read_text(self, path: Path) -> str:
        """Return the text of the file, decompressed if it is gzipped."""
        data = self.read_bytes(path)
        with self.parsing(path, "CSV text, plain or gzipped"):
            compressed = path.suffix == ".gz"
            return (untrusted.inflate(data, MAX_BYTES, untrusted.GZIP) if compressed else data).decode()


def scale_to_unit_range(x: np.ndarray) -> np.ndarray:
    """Return the columns scaled to [0, 1], or unchanged if all values are in [0, 1] already."""
    low, high = x.min(0), x.max(0)
    if low.min() >= 0 and high.max() <= 1:
        return x
    return (x - low) / np.where(high > low, high - low, 1)
