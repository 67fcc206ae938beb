"""The readers of data files, for the fuzz: valid files, small copies of the formats, and what reads them."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
from fuzz_case import Parser, file_parser
from fuzz_mutations import mutate_bytes

from pomona.data import SOURCES, fetch
from pomona.data.cifar import PIXELS
from pomona.errors import PomonaError


def make_data_parsers() -> list[Parser]:
    """Return the parsers of data files."""
    images = b"\0\0\x08\x03" + np.array([3, 4, 4], ">u4").tobytes() + bytes(range(48))
    labels = b"\0\0\x08\x01" + np.array([3], ">u4").tobytes() + bytes([1, 2, 3])
    bomb = gzip.compress(b"\0\0\x08\x03" + np.array([2**16, 2**8, 2**4], ">u4").tobytes() + bytes(1 << 24), mtime=0)
    idx = [images, labels, gzip.compress(images, mtime=0), gzip.compress(labels, mtime=0)]
    rows = "\n".join(",".join([str(k % 7)] * 54 + [str(k % 7 + 1)]) for k in range(20)).encode()
    texts = [b"the quick brown fox jumps over the lazy dog\n" * 30, ("æ§€😀 " * 200).encode()]
    pickles = [pickle.dumps({"data": np.zeros((3, PIXELS), np.uint8), "labels": [1, 2, 3]}, 3)]
    pictures = [make_picture(form) for form in ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM")]
    archive = make_archive()
    source = SOURCES["mnist"]()

    def parse_idx(data: bytes, folder: Path) -> None:
        for name in ("a", "a.gz"):
            (folder / name).unlink(missing_ok=True)
        path = folder / ("a.gz" if data[:2] == b"\x1f\x8b" else "a")
        path.write_bytes(data)
        error: PomonaError | None = None
        for axes in (3, 1):
            try:
                source.read_array(folder, "a", axes)
                return
            except PomonaError as refusal:
                error = refusal
        assert error is not None
        raise error

    def read_archive(path: Path) -> None:
        place = path.parent / "set"
        place.mkdir(exist_ok=True)
        fetch._unpack(path, place)

    def read_cifar(path: Path) -> None:
        SOURCES["cifar10"]().read_python(path, 3)

    def read_records(path: Path) -> None:
        SOURCES["cifar10"]().read_binary(path, 2)

    def read_text(path: Path) -> None:
        for unit in ("char", "word"):
            SOURCES["text"](length=4, unit=unit).read(path.parent)

    def read_rows(path: Path) -> None:
        SOURCES["covertype"]().read(path.parent)

    def read_picture(path: Path) -> None:
        SOURCES["imagefolder"](size=8).read_image(path)

    records = b"".join(bytes([k]) + bytes(PIXELS) for k in range(2))
    return [
        Parser("idx", 6, idx, lambda draw: mutate_bytes(draw, draw.choice([*idx, bomb]), idx), parse_idx),
        file_parser("cifar pickle", 8, pickles, "batch", read_cifar),
        file_parser("cifar records", 2, [records], "batch.bin", read_records),
        file_parser("covertype", 3, [rows], "covertype.csv", read_rows),
        file_parser("text", 4, texts, "input.txt", read_text),
        file_parser("image", 8, pictures, "image.png", read_picture),
        file_parser("archive", 2, [archive], "set.tar.gz", read_archive),
    ]


def make_picture(form: str) -> bytes:
    """Return a small image in a format; the bytes of a PNG where Pillow is missing or cannot write it."""
    try:
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(np.arange(768, dtype=np.uint8).reshape(16, 16, 3)).save(file, form)
        return file.getvalue()
    except (ImportError, OSError, KeyError):
        return b"\x89PNG\r\n\x1a\n" + bytes(64)


def make_archive() -> bytes:
    """Return a tar archive with a folder and a file in it."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name in ("set/a.txt", "set/b.txt"):
            member = tarfile.TarInfo(name)
            member.size = 5
            tar.addfile(member, io.BytesIO(b"hello"))
    return file.getvalue()
