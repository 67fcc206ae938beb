"""Image folders: train/<class>/*.jpg, and the same layout under val or test. Needs Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from pomona.errors import require

from .dataset import IMAGENET, Dataset
from .image_files import SUFFIXES, EncodedImage, ImagePaths, import_pillow, list_images, read_image_file
from .image_stream import ImageStream
from .sources import SOURCES, Source
from .split import Split

MEMORY_LIMIT = 2**33  # bytes of pixels up to which images are held in memory


@SOURCES.register("imagefolder")
@dataclass(frozen=True)
class ImageFolder(Source):
    """The user's own images, or those of ImageNet.

    If there are folders `val` and `test`, `val` is the validation part; if there is one of them, it is the test part.
    Images of 3·size² bytes that take at most 8 GiB in all are read once and held on the device: the short side is
    scaled to `size`, and the image is cropped at the center. Others stay on the disk, and worker processes decode each
    batch: for training, crops of the whole image; for evaluation, its center, after the short side is scaled to 8/7 of
    `size`.
    """

    size: int = 64  # pixels per side
    stream: bool | None = None  # whether images stay on the disk; by default where they take more than 8 GiB
    workers: int = 0  # processes that decode images from the disk; 0 is one for each core
    licence: ClassVar[str] = "yours"
    citation: ClassVar[str] = "yours"
    folders: ClassVar[tuple[str, ...]] = ("imagefolder", ".")
    marker: ClassVar[str] = "train"
    instructions: ClassVar[str] = "put images into imagefolder/train/<class>/ and imagefolder/val/<class>/"

    def __post_init__(self) -> None:
        require(self.size >= 1, f"size must be 1 pixel or more, got {self.size}.")
        require(self.workers >= 0, f"workers must be 0 or more, got {self.workers}.")

    def read(self, folder: Path) -> Dataset:
        import_pillow()
        labels = sorted(p.name for p in (folder / "train").iterdir() if p.is_dir())
        require(bool(labels), f"{folder / 'train'} holds no folders: add one for each class.")
        found = {p: find_images(folder, p, labels) for p in ("train", "val", "test") if (folder / p).is_dir()}
        require(len(found) > 1, f"{folder} holds no 'val' or 'test' folder: add one, laid out like 'train'.")
        images = sum(len(paths) for paths, _ in found.values())
        stream = images * 3 * self.size**2 > MEMORY_LIMIT if self.stream is None else self.stream
        parts = {name: self.make_split(*files, stream) for name, files in found.items()}
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

    def make_split(self, paths: ImagePaths, classes: np.ndarray, stream: bool) -> Split:
        """Return the images of one part, from the disk or in memory."""
        if stream:
            return ImageStream.from_paths(paths, classes, self.size, self.workers)
        with ThreadPoolExecutor() as pool:  # decoding releases the interpreter lock
            pixels = list(pool.map(self.read_image, map(paths.__getitem__, range(len(paths)))))
        return Split.from_arrays(np.stack(pixels), classes)

    def read_image(self, path: Path) -> np.ndarray:
        """Read one image as (channel, height, width) bytes, scaled and cropped to a square."""
        from PIL import Image, ImageOps

        image = Image.fromarray(EncodedImage(path, read_image_file(path)).decode())
        square = ImageOps.fit(image, (self.size, self.size), Image.Resampling.BILINEAR)
        return np.asarray(square).transpose(2, 0, 1)


def find_images(root: Path, part: str, labels: Sequence[str]) -> tuple[ImagePaths, np.ndarray]:
    """Return the images in the class folders of one part, in the order of their names, and the class of each."""
    folder = root / part
    extra = sorted({p.name for p in folder.iterdir() if p.is_dir()} - set(labels))
    require(
        not extra,
        f"{folder} has the class '{', '.join(extra)}', which 'train' does not have: rename or remove it.",
    )
    found = [ImagePaths.from_paths(root, list_images(folder / label)) for label in labels]
    counts = [len(paths) for paths in found]
    require(sum(counts) > 0, f"{folder} holds no images ({', '.join(sorted(SUFFIXES))}).")
    return ImagePaths.join(found), np.repeat(np.arange(len(labels)), counts)
