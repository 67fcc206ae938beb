"""Readers of MNIST and Fashion-MNIST on small files in the exact format."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from pomona.data import load
from pomona.errors import PomonaError


def to_idx(array: np.ndarray) -> bytes:
    return (0x800 + array.ndim).to_bytes(4, "big") + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def write_mnist(folder: Path, zipped: bool = False) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    arrays = {}
    for part, rows in (("train", 6), ("t10k", 3)):
        arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (rows, 5, 4), dtype=np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = rng.integers(0, 10, rows, dtype=np.uint8)
    for name, array in arrays.items():
        raw = to_idx(array)
        path = folder / (f"{name}.gz" if zipped else name)
        path.write_bytes(gzip.compress(raw) if zipped else raw)
    return arrays


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST/raw"), ("fashion_mnist", "fashion_mnist")])
def test_idx_files(tmp_path: Path, name: str, folder: str, zipped: bool):
    arrays = write_mnist(tmp_path / folder, zipped)
    data = load(name, root=tmp_path)
    assert data.input_shape == (1, 5, 4)
    np.testing.assert_array_equal(data.train.x[:, 0], arrays["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(data.test.y, arrays["t10k-labels-idx1-ubyte"])
    assert len(data.labels) == 10


@pytest.mark.parametrize(
    ("file", "raw", "message"),
    [
        ("train-images-idx3-ubyte", b"\0\0\x08\x01" + bytes(12), "magic number 00000801, expected 00000803"),
        ("train-images-idx3-ubyte", b"", "magic number missing, expected 00000803"),
        (
            "t10k-images-idx3-ubyte",
            to_idx(np.zeros((3, 5, 4), np.uint8))[:-1],
            r"75 bytes, expected 76 for \(3, 5, 4\)",
        ),
        ("t10k-labels-idx1-ubyte", to_idx(np.array([1, 2, 10], np.uint8)), "label 10, expected 0 to 9"),
        ("t10k-labels-idx1-ubyte", to_idx(np.array([1, 2], np.uint8)), "2 labels, expected 3, one for each image"),
    ],
)
def test_damaged_idx_files(tmp_path: Path, file: str, raw: bytes, message: str):
    write_mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / file).write_bytes(raw)
    with pytest.raises(PomonaError, match=f"{file} is damaged: {message}; remove .* --download mnist"):
        load("mnist", root=tmp_path)


def test_a_gzip_file_is_unpacked_no_further_than_its_first_bytes_announce(tmp_path: Path):
    write_mnist(tmp_path / "mnist", zipped=True)
    file = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    file.write_bytes(gzip.compress(to_idx(np.zeros((6, 5, 4), np.uint8)) + bytes(50_000_000)))
    with pytest.raises(PomonaError, match="more than the 136 bytes that are read, expected a complete gzip file"):
        load("mnist", root=tmp_path)
    huge = b"\0\0\x08\x03" + np.array([2**16, 2**10, 2**7], ">u4").tobytes()  # 8 GiB
    file.write_bytes(gzip.compress(huge + bytes(1000)))
    with pytest.raises(PomonaError, match=r"1016 bytes, expected 8589934608 for \(65536, 1024, 128\)"):
        load("mnist", root=tmp_path)


def test_error_names_a_truncated_gzip(tmp_path: Path):
    write_mnist(tmp_path / "mnist", zipped=True)
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(PomonaError, match=r"train-images-idx3-ubyte.gz is damaged: .*expected a complete gzip file"):
        load("mnist", root=tmp_path)
