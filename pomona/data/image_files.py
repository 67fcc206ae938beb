"""Image files on the disk: finding them, reading one whole, and decoding it to pixels. Needs Pillow.

JPEGs are decoded by simplejpeg where it is installed, in half of Pillow's time and to the same pixels.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from pomona.errors import PomonaError, require
from pomona.untrusted import read_bytes

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff", ".gif"}
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF", "GIF")  # of Pillow; others start programs or are rarely tested
MAX_FILE_BYTES = 2**28
MAX_PIXELS = 2**30 // 12  # of one image; Pillow's own limit too
JPEG_START = b"\xff\xd8\xff"


def import_pillow() -> ModuleType:
    """Return Pillow's module Image; raise PomonaError where it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise PomonaError("image folders need Pillow: run `pip install pomona[images]`.") from error
    return Image


@functools.cache
def import_simplejpeg() -> ModuleType | None:
    """Return the module simplejpeg, or None where it is not installed."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def list_images(folder: Path) -> list[Path]:
    """Return the image files in a folder and those below it, sorted; no files if there is no such folder.

    Raises PomonaError for something that has the name of an image and is no file, such as a named pipe.
    """
    return sorted(map(Path, _walk(folder))) if folder.is_dir() else []


def _walk(folder: Path | str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path)
            elif os.path.splitext(entry.name)[1].lower() in SUFFIXES:
                require(entry.is_file(), f"{entry.path} is not a regular file, as an image must be: remove it.")
                yield entry.path


class ImagePaths:
    """The paths of many images below one folder, as bytes in two arrays.

    A list of a million paths is copied page by page into every worker that counts references to them; arrays are not.
    """

    def __init__(self, root: Path, text: np.ndarray, ends: np.ndarray) -> None:
        self.root, self.text, self.ends = root, text, ends

    @classmethod
    def from_paths(cls, root: Path, paths: Iterable[Path]) -> ImagePaths:
        """Return the paths, which must lie below `root`."""
        names = [os.fsencode(path.relative_to(root)) for path in paths]
        ends = np.cumsum([len(name) for name in names], dtype=np.int64)
        return cls(root, np.frombuffer(b"".join(names), np.uint8), ends)

    @classmethod
    def join(cls, parts: Sequence[ImagePaths]) -> ImagePaths:
        """Return the paths of all parts, which have one root, one part after another."""
        starts = np.cumsum([0, *(len(part.text) for part in parts[:-1])])
        ends = [part.ends + start for part, start in zip(parts, starts, strict=True)]
        return cls(parts[0].root, np.concatenate([part.text for part in parts]), np.concatenate(ends))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> Path:
        start = int(self.ends[row - 1]) if row else 0
        return self.root / os.fsdecode(self.text[start : int(self.ends[row])].tobytes())


def read_image_file(path: Path) -> bytes:
    """Return the bytes of an image file; raise PomonaError unless it is a regular file of a sensible size."""
    try:
        return read_bytes(path, MAX_FILE_BYTES)
    except OSError as error:
        raise PomonaError(f"{path} cannot be read ({error.strerror}): replace it with an intact copy.") from error


class EncodedImage:
    """An image file in memory whose size is known and whose pixels are not decoded yet."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self.data = path, data
        self.jpeg = import_simplejpeg() if data.startswith(JPEG_START) else None
        if self.jpeg is not None:
            try:
                self.height, self.width, *_ = self.jpeg.decode_jpeg_header(data)
            except ValueError:
                self.jpeg = None
        if self.jpeg is None:
            self.width, self.height = self._open_with_pillow().size
        require(
            self.width * self.height <= MAX_PIXELS,
            f"{path} has {self.width:,} × {self.height:,} pixels, and an image may have {MAX_PIXELS:,} in all: "
            "make it smaller.",
        )

    def decode(self, factor: int = 1) -> np.ndarray:
        """Return the pixels as (height, width, 3) bytes, RGB.

        A JPEG is decoded at 1/`factor` (1, 2, 4 or 8) of its size, rounded up, in less time.
        """
        if self.jpeg is not None:
            least = {"min_height": -(-self.height // factor), "min_width": -(-self.width // factor)}
            try:
                pixels: np.ndarray = self.jpeg.decode_jpeg(self.data, "RGB", **(least if factor > 1 else {}))
                return pixels
            except ValueError:  # a variant that it does not know, or damage: Pillow knows better
                self.jpeg = None
        image = self._open_with_pillow()
        if factor > 1:
            image.draft("RGB", (max(1, self.width // factor), max(1, self.height // factor)))
        try:
            return np.array(image.convert("RGB"))
        except Exception as error:  # decoders raise errors of many classes on damaged data
            raise damaged_image_error(self.path, error) from error

    def _open_with_pillow(self) -> Any:
        pillow = import_pillow()
        try:
            return pillow.open(io.BytesIO(self.data), formats=FORMATS)
        except Exception as error:  # readers of headers raise errors of many classes on damaged data
            raise damaged_image_error(self.path, error) from error


def damaged_image_error(path: Path, error: Exception) -> PomonaError:
    """Return the error for an image that cannot be decoded."""
    reason = " ".join(str(error).replace("<_io.BytesIO object at", "<").split()).rstrip(".") or type(error).__name__
    return PomonaError(f"{path} is damaged: {reason}, expected a readable image; replace it with an intact copy.")
