"""Covertype: which trees grow on a patch of forest, from 54 numbers in a CSV file."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from pomona.errors import require

from . import draws
from .dataset import Dataset
from .sources import SOURCES, Download, Source
from .split import Split

FILES = "covertype.csv", "covertype.csv.gz", "covtype.csv", "covtype.data", "covtype.data.gz"
FEATURES = 54


@SOURCES.register("covertype")
@dataclass(frozen=True)
class Covertype(Source):
    """54 features in [0, 1] and the class 1 to 7 in the last column, with a header or without.

    Features that leave [0, 1], as in the published file, are scaled to it column by column. The
    test rows are the same ones for everybody, with the classes in proportion.
    """

    test: float = 0.2  # share of the rows
    classes: ClassVar[int] = 7
    holds: ClassVar[str] = "581 012 rows of 54 features, or any part of them"
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
        table = self.table(path)
        x, labels = table[:, :FEATURES], table[:, FEATURES]
        bad = np.flatnonzero(~np.isin(labels, np.arange(1, 8)))
        if bad.size:
            raise self.damaged(path, f"class {labels[bad[0]]:g} in data row {bad[0] + 1}", "1 to 7")
        if not np.isfinite(x).all():
            raise self.damaged(path, "a feature that is no finite number", "numbers")
        y = labels.astype(np.int64) - 1
        train, test = draws.stratified(y, round(self.test * len(y)), 0)
        x = unit(x)
        return Dataset(
            self.name,
            Split.of(x[train], y[train]),
            Split.of(x[test], y[test]),
            classes=7,
            input_shape=(FEATURES,),
            kind="table",
        )

    def table(self, path: Path) -> np.ndarray:
        """The numbers of the file, one row a patch."""
        lines = self.text(path).splitlines()
        header = bool(lines) and lines[0][:1] not in "+-.0123456789"
        for number, line in enumerate(lines, 1):
            columns = line.count(",") + 1
            if columns != FEATURES + 1:
                raise self.damaged(path, f"{columns} columns in line {number}", f"{FEATURES + 1}")
        if len(lines) - header < 2:
            raise self.damaged(path, f"{len(lines) - header} rows", "2 or more")
        try:
            return np.loadtxt(lines[header:], np.float32, delimiter=",", ndmin=2)
        except ValueError as error:
            raise self.damaged(path, str(error).rstrip("."), "numbers") from error

    def text(self, path: Path) -> str:
        data = self.content(path)
        try:
            return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise self.damaged(path, str(error), "CSV text, plain or gzipped") from error


def unit(x: np.ndarray) -> np.ndarray:
    """Columns scaled to [0, 1], unless they all lie there already."""
    low, high = x.min(0), x.max(0)
    if low.min() >= 0 and high.max() <= 1:
        return x
    return (x - low) / np.where(high > low, high - low, 1)
