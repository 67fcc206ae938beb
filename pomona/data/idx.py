"""MNIST and Fashion-MNIST: IDX files, plain or gzipped."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from pomona import untrusted

from .dataset import Dataset
from .sources import SOURCES, Download, Source
from .split import Split

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
MAX_BYTES = 1 << 30  # of an array; the largest published ones have about half of that


def published_files(url: str, *checksums: str) -> tuple[Download, ...]:
    """Return the four files that are published under a URL, with their MD5 checksums."""
    return tuple(Download(f"{url}/{f}.gz", f"md5:{c}") for f, c in zip(FILES, checksums, strict=True))


@dataclass(frozen=True)
class Idx(Source):
    """Base of data sets with ten classes of gray images in four IDX files."""

    classes: ClassVar[int] = 10
    training_rows: ClassVar[int | None] = 60_000
    contents: ClassVar[str] = "60 000 + 10 000 gray images of 28×28"
    mean: ClassVar[float]
    std: ClassVar[float]
    labels: ClassVar[tuple[str, ...]] = tuple("0123456789")

    def read(self, folder: Path) -> Dataset:
        train, test = self.read_split(folder, *FILES[:2]), self.read_split(folder, *FILES[2:])
        return Dataset(
            self.name,
            train,
            test,
            classes=self.classes,
            input_shape=tuple(train.x.shape[1:]),
            mean=(self.mean,),
            std=(self.std,),
            labels=self.labels,
        )

    def read_split(self, folder: Path, images: str, labels: str) -> Split:
        """Read the images and labels of one part from two files."""
        x, _ = self.read_array(folder, images, axes=3)
        y, path = self.read_array(folder, labels, axes=1)
        if len(x) != len(y):
            raise self.damaged_error(path, f"{len(y)} labels", f"{len(x)}, one for each image")
        if y.max(initial=0) >= self.classes:
            raise self.damaged_error(path, f"label {y.max()}", f"0 to {self.classes - 1}")
        return Split.from_arrays(x[:, None], y)

    def read_array(self, folder: Path, name: str, axes: int) -> tuple[np.ndarray, Path]:
        """Read an IDX file: a magic number, a big-endian 32-bit length for each axis, then the bytes."""
        path = folder / name
        data = self.read_bytes(path) if path.exists() else self.read_gzip(folder / f"{name}.gz", axes)
        magic, start = 0x800 + axes, 4 + 4 * axes
        if len(data) < start or int.from_bytes(data[:4], "big") != magic:
            raise self.damaged_error(path, f"magic number {data[:4].hex() or 'missing'}", f"{magic:08x}")
        shape = tuple(int(n) for n in np.frombuffer(data, ">u4", axes, 4))
        if len(data) != start + math.prod(shape):
            raise self.damaged_error(path, f"{len(data)} bytes", f"{start + math.prod(shape)} for {shape}")
        with self.parsing(path, f"an array of shape {shape}"):
            return np.frombuffer(data, np.uint8, offset=start).reshape(shape), path

    def read_gzip(self, path: Path, axes: int) -> bytes:
        """Return the decompressed bytes of a gzip file, no more of them than its first bytes announce."""
        data = self.read_bytes(path)
        with self.parsing(path, "a complete gzip file"):
            head = zlib.decompressobj(untrusted.GZIP).decompress(data, 4 + 4 * axes)
            announced = len(head) + math.prod(int(n) for n in np.frombuffer(head[4:], ">u4"))
            return untrusted.inflate(data, min(announced, MAX_BYTES), untrusted.GZIP)


@SOURCES.register("mnist")
@dataclass(frozen=True)
class Mnist(Idx):
    """Handwritten digits."""

    licence: ClassVar[str] = "CC BY-SA 3.0"
    citation: ClassVar[str] = "LeCun, Cortes and Burges, The MNIST Database, 1998"
    folders: ClassVar[tuple[str, ...]] = ("MNIST/raw", "mnist")
    mean: ClassVar[float] = 0.1307
    std: ClassVar[float] = 0.3081
    downloads: ClassVar[dict[str, tuple[Download, ...]]] = {
        "mnist": published_files(
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        )
    }


@SOURCES.register("fashion_mnist")
@dataclass(frozen=True)
class FashionMnist(Idx):
    """Images of clothing in the format of MNIST."""

    licence: ClassVar[str] = "MIT"
    citation: ClassVar[str] = "Xiao, Rasul and Vollgraf, Fashion-MNIST, arXiv:1708.07747, 2017"
    folders: ClassVar[tuple[str, ...]] = ("FashionMNIST/raw", "fashion_mnist")
    mean: ClassVar[float] = 0.2860
    std: ClassVar[float] = 0.3530
    labels: ClassVar[tuple[str, ...]] = (
        *("t-shirt", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "boot"),
    )
    downloads: ClassVar[dict[str, tuple[Download, ...]]] = {
        "fashion_mnist": published_files(
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        )
    }
