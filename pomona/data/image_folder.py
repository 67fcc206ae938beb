"""Image folders: train/<class>/*.jpg, and the same layout under val or test. Needs Pillow."""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from pomona.errors import PomonaError, require

from .dataset import IMAGENET, Dataset
from .sources import SOURCES, Source
from .split import Split

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff", ".gif"}
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF", "GIF")  # others start programs or are rarely tested


@SOURCES.register("imagefolder")
@dataclass(frozen=True)
class ImageFolder(Source):
    """The user's own images, all of which are held on the device at once, 3·size² bytes each.

    If there are folders `val` and `test`, `val` is the validation part; if there is one of them, it is the test part.
    """

    size: int = 64  # pixels per side: the short side is scaled to it, and the image is cropped at the center
    licence: ClassVar[str] = "yours"
    citation: ClassVar[str] = "yours"
    folders: ClassVar[tuple[str, ...]] = ("imagefolder", ".")
    marker: ClassVar[str] = "train"
    instructions: ClassVar[str] = "put images into imagefolder/train/<class>/ and imagefolder/val/<class>/"

    def __post_init__(self) -> None:
        require(self.size >= 1, f"size must be 1 pixel or more, got {self.size}.")

    def read(self, folder: Path) -> Dataset:
        labels = sorted(p.name for p in (folder / "train").iterdir() if p.is_dir())
        require(bool(labels), f"{folder / 'train'} holds no folders: add one for each class.")
        parts = {p: self.read_split(folder / p, labels) for p in ("train", "val", "test") if (folder / p).is_dir()}
        require(len(parts) > 1, f"{folder} holds no 'val' or 'test' folder: add one, laid out like 'train'.")
        return Dataset(
            self.name,
            parts["train"],
            parts.get("test") or parts["val"],
            classes=len(labels),
            input_shape=(3, self.size, self.size),
            mean=IMAGENET[0],
            std=IMAGENET[1],
            augment="resized_crop(pad=0)",
            valid=parts.get("val") if "test" in parts else None,
            labels=tuple(labels),
        )

    def read_split(self, folder: Path, labels: Sequence[str]) -> Split:
        """Read every image in the class folders of one part, in the order of their names."""
        extra = sorted({p.name for p in folder.iterdir() if p.is_dir()} - set(labels))
        require(
            not extra,
            f"{folder} has the class '{', '.join(extra)}', which 'train' does not have: rename or remove it.",
        )
        found = [(path, y) for y, label in enumerate(labels) for path in _list_images(folder / label)]
        require(bool(found), f"{folder} holds no images ({', '.join(sorted(SUFFIXES))}).")
        with ThreadPoolExecutor() as pool:  # decoding releases the interpreter lock
            pixels = list(pool.map(self.read_image, [path for path, _ in found]))
        return Split.from_arrays(np.stack(pixels), np.array([y for _, y in found]))

    def read_image(self, path: Path) -> np.ndarray:
        """Read one image as (channel, height, width) bytes, scaled and cropped to a square."""
        try:
            from PIL import Image, ImageOps
        except ImportError as error:
            raise PomonaError("image folders need Pillow: run `pip install pomona[images]`.") from error
        content = io.BytesIO(self.read_bytes(path))
        with self.parsing(path, "a readable image"), Image.open(content, formats=FORMATS) as image:
            square = ImageOps.fit(image.convert("RGB"), (self.size, self.size), Image.Resampling.BILINEAR)
            return np.asarray(square).transpose(2, 0, 1)


def _list_images(folder: Path) -> list[Path]:
    """Return the image files under a folder, sorted, or an empty list if there is no such folder."""
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES) if folder.is_dir() else []
