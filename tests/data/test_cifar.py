"""CIFAR in both layouts, intact and damaged; pickles are never executed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from pomona.data import load
from pomona.data.cifar import Cifar10, Cifar100
from pomona.data.sources import data_folders
from pomona.data.unpickle import unpickle
from pomona.errors import PomonaError

ROWS = 4
REAL_FOLDERS = [base / "cifar-10-batches-bin" for base in data_folders() if (base / "cifar-10-batches-bin").is_dir()]


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of four images instead of ten thousand."""
    for source in (Cifar10, Cifar100):
        monkeypatch.setattr(source, "rows_per_file", ROWS)
        monkeypatch.setattr(source, "test_rows", ROWS)


def make_contents(seed: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (ROWS, 3072), dtype=np.uint8), rng.integers(0, classes, ROWS, dtype=np.uint8)


def write_binary10(root: Path) -> Path:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for i, name in enumerate([*Cifar10.train_files, "test_batch"]):
        images, labels = make_contents(i, 10)
        (folder / f"{name}.bin").write_bytes(np.hstack([labels[:, None], images]).tobytes())
    (folder / "batches.meta.txt").write_text("airplane\nautomobile\n\n")
    return folder


class Python2Pickler:
    """Writes pickles as cPickle of Python 2 did at protocol 2, which Python 3 cannot."""

    def __init__(self) -> None:
        self.out, self.memo = bytearray(b"\x80\x02"), 0

    def memoize(self) -> None:
        self.out += b"q" + bytes([self.memo]) if self.memo < 256 else b"r" + self.memo.to_bytes(4, "little")
        self.memo += 1

    def write(self, value: object) -> None:
        if isinstance(value, (str, bytes)):
            raw = value.encode() if isinstance(value, str) else value
            self.out += b"U" + bytes([len(raw)]) if len(raw) < 256 else b"T" + len(raw).to_bytes(4, "little")
            self.out += raw
            self.memoize()
        elif isinstance(value, bool):
            self.out += b"\x88" if value else b"\x89"
        elif isinstance(value, int):
            self.out += b"K" + bytes([value]) if 0 <= value < 256 else b"J" + value.to_bytes(4, "little", signed=True)
        elif value is None:
            self.out += b"N"
        elif isinstance(value, list):
            self.out += b"]"
            self.memoize()
            self.write_sequence(value, b"e")
        elif isinstance(value, dict):
            self.out += b"}"
            self.memoize()
            self.write_sequence([v for pair in value.items() for v in pair], b"u")
        elif isinstance(value, tuple):
            self.write_sequence(value, b"t")
            self.memoize()
        elif isinstance(value, np.ndarray):
            self.write_array(value)
        else:
            raise TypeError(value)

    def write_sequence(self, values, end: bytes) -> None:
        self.out += b"("
        for v in values:
            self.write(v)
        self.out += end

    def write_array(self, value: np.ndarray) -> None:
        self.out += b"cnumpy.core.multiarray\n_reconstruct\n"
        self.memoize()
        self.out += b"cnumpy\nndarray\n"
        self.memoize()
        self.write((0,))
        self.write("b")
        self.out += b"\x87R("
        self.write(1)
        self.write(value.shape)
        self.out += b"cnumpy\ndtype\n"
        self.write("u1")
        self.out += b"K\x00K\x01\x87R("
        for v in (3, "|", None, None, None, -1, -1, 0):
            self.write(v)
        self.out += b"tb"
        self.write(bool(not value.flags.c_contiguous))
        self.write(value.tobytes("A"))
        self.out += b"tb"


def pickle_as_python2(value: dict) -> bytes:
    writer = Python2Pickler()
    writer.write(value)
    return bytes(writer.out + b".")


def write_python10(root: Path) -> Path:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for i, name in enumerate([*Cifar10.train_files, "test_batch"]):
        images, labels = make_contents(i, 10)
        files = [f"image_{k}.png" for k in range(ROWS)]
        value = {"batch_label": name, "labels": labels.tolist(), "data": images, "filenames": files}
        (folder / name).write_bytes(pickle_as_python2(value))
    # The class names were written at protocol 0.
    (folder / "batches.meta").write_bytes(
        b"(dp1\nS'num_cases_per_batch'\np2\nI10000\nsS'label_names'\np3\n(lp4\nS'airplane'\np5\naS'automobile'\np6\nas."
    )
    return folder


@pytest.mark.parametrize("write", [write_binary10, write_python10])
def test_cifar10_reads_both_layouts(tmp_path: Path, write):
    write(tmp_path)
    data = load("cifar10", root=tmp_path)
    assert data.train.x.shape == (5 * ROWS, 3, 32, 32)
    assert data.train.x.dtype == torch.uint8
    images, labels = make_contents(2, 10)
    third = slice(2 * ROWS, 3 * ROWS)
    assert torch.equal(data.train.x[third], torch.from_numpy(images).view(-1, 3, 32, 32))
    assert data.train.y[third].tolist() == labels.tolist()
    assert torch.equal(data.test.x.flatten(1), torch.from_numpy(make_contents(5, 10)[0]))
    assert data.labels == ("airplane", "automobile")
    assert (data.classes, data.augment, data.kind) == (10, "standard", "image")


@pytest.mark.parametrize("layout", ["cifar-100-binary", "cifar-100-python"])
def test_cifar100_takes_the_fine_label(tmp_path: Path, layout: str):
    folder = tmp_path / layout
    folder.mkdir()
    for i, name in enumerate(("train", "test")):
        images, fine = make_contents(i, 100)
        coarse = fine // 5
        if layout.endswith("binary"):
            raw = np.hstack([coarse[:, None], fine[:, None], images]).tobytes()
            (folder / f"{name}.bin").write_bytes(raw)
        else:
            value = {"data": images, "coarse_labels": coarse.tolist(), "fine_labels": fine.tolist()}
            (folder / name).write_bytes(pickle_as_python2(value))
    (folder / "fine_label_names.txt").write_text("apple\nworm\n")
    (folder / "meta").write_bytes(pickle_as_python2({"fine_label_names": ["apple", "worm"], "coarse_label_names": []}))
    data = load("cifar100", root=folder)  # the folder itself will do
    assert data.train.y.tolist() == make_contents(0, 100)[1].tolist()
    assert torch.equal(data.test.x.flatten(1), torch.from_numpy(make_contents(1, 100)[0]))
    assert data.labels == ("apple", "worm")


def test_error_names_a_truncated_batch(tmp_path: Path):
    path = write_binary10(tmp_path) / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-3073])
    with pytest.raises(PomonaError) as error:
        load("cifar10", root=tmp_path)
    text = str(error.value)
    assert str(path) in text
    assert "9219 bytes, expected 12292 (4 records of 3073)" in text
    assert f"remove {path.parent} and run `pomona data --download cifar10`" in text


def test_error_names_a_label_out_of_range(tmp_path: Path):
    path = write_binary10(tmp_path) / "test_batch.bin"
    raw = bytearray(path.read_bytes())
    raw[2 * 3073] = 10
    path.write_bytes(raw)
    with pytest.raises(PomonaError, match=r"test_batch.bin is damaged: label 10 in record 2, expected 0 to 9"):
        load("cifar10", root=tmp_path)


def test_error_names_a_missing_file(tmp_path: Path):
    (write_binary10(tmp_path) / "data_batch_4.bin").unlink()
    with pytest.raises(PomonaError, match=r"data_batch_4.bin cannot be read .* --download cifar10"):
        load("cifar10", root=tmp_path)


def test_error_names_a_python_batch_of_the_wrong_shape(tmp_path: Path):
    folder = write_python10(tmp_path)
    images, labels = make_contents(0, 10)
    (folder / "data_batch_1").write_bytes(pickle_as_python2({"data": images[1:], "labels": labels.tolist()}))
    with pytest.raises(
        PomonaError, match=r"data_batch_1 is damaged: 'data' of shape \(3, 3072\), expected \(4, 3072\)"
    ):
        load("cifar10", root=tmp_path)
    (folder / "data_batch_1").write_bytes(pickle_as_python2({"data": images, "labels": labels[1:].tolist()}))
    with pytest.raises(PomonaError, match="no list of 4 integers under 'labels'"):
        load("cifar10", root=tmp_path)


class Attack:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int):
    monkeypatch.chdir(tmp_path)
    folder = write_python10(tmp_path)
    (folder / "data_batch_1").write_bytes(pickle.dumps({"data": Attack()}, protocol))
    with pytest.raises(PomonaError, match=r"data_batch_1 is damaged: .*never imported|is not supported"):
        load("cifar10", root=tmp_path)
    assert not (tmp_path / "executed").exists()
    pickle.loads((folder / "data_batch_1").read_bytes())  # the same file does harm when unpickled
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("protocol", [0, 1, 2, 3])
def test_plain_values_of_any_older_protocol(protocol: int):
    value = {"a": [1, 300, 70000, -5], "b": {"c": ("x", None, True)}, "e": [], "f": ()}
    got = unpickle(pickle.dumps(value, protocol))
    if protocol < 2:  # written there as the numbers 01 and 00
        assert got["b"]["c"][2] in (True, 1)
    assert got == value


def test_arrays_in_fortran_order():
    array = np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3))
    np.testing.assert_array_equal(unpickle(pickle_as_python2({"data": array}))["data"], array)


def test_broken_pickles_are_refused():
    whole = pickle_as_python2({"data": np.zeros((2, 2), np.uint8), "labels": [1, 2], "name": "x"})
    pickle.loads(whole)
    for cut in range(len(whole)):
        with pytest.raises(ValueError, match=r".+"):
            unpickle(whole[:cut])
    for bad in (
        b"\x80\x02]e.",
        b"\x80\x02(u.",
        b"\x80\x02R.",
        b"\x80\x02h\x05.",
        b"\x80\x02}(K\x01u.",
        b"\x80\x02K\x01.",
    ):
        with pytest.raises(ValueError, match=r".+"):
            unpickle(bad)
    floats = whole.replace(b"u1", b"f4")
    with pytest.raises(ValueError, match="a call other than"):
        unpickle(floats)


@pytest.mark.parametrize(
    ("hostile", "reason"),
    [
        (b"\x80\x02})" + b"\x85" * 2_000_000 + b"K\x01s.", "a key that is not text"),  # hashing it crashed
        (b"\x80\x02})" + b"q\x00h\x00\x86" * 60 + b"K\x01s.", "a key that is not text"),  # hashing it never ended
        (b"\x80\x02}U\x04data]" + b"q\x00]h\x00ah\x00a" * 60 + b"s.", "a list in a list"),
        (b"\x80\x02cnumpy\ndtype\n)" + b"q\x00h\x00\x86" * 60 + b"\x85R.", "a call other than"),
    ],
    ids=["deep key", "repeated key", "repeated list", "repeated argument"],
)
def test_values_that_are_nested_or_repeated_without_end_are_refused(hostile: bytes, reason: str):
    with pytest.raises(ValueError, match=reason):
        unpickle(hostile)


def test_a_string_is_not_taken_for_a_global():
    forged = b"\x80\x02}(U\x04dataU\x05dtypeU\x02u1\x85Ru."
    with pytest.raises(ValueError, match="a call other than"):
        unpickle(forged)


@pytest.mark.skipif(not REAL_FOLDERS, reason="the real CIFAR-10 is not on this machine")
def test_the_real_cifar10(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Cifar10, "rows_per_file", 10_000)
    monkeypatch.setattr(Cifar10, "test_rows", 10_000)
    data = load("cifar10", root=REAL_FOLDERS[0], validation=5000)
    assert (len(data.train), len(data.valid), len(data.test)) == (45_000, 5000, 10_000)
    assert data.test.y.bincount().tolist() == [1000] * 10
    assert data.valid.y.bincount().tolist() == [500] * 10
    pixels = torch.cat([data.train.x, data.valid.x]).float().div_(255)
    np.testing.assert_allclose(pixels.mean((0, 2, 3)), data.mean, atol=1e-4)
    np.testing.assert_allclose(pixels.std((0, 2, 3)), data.std, atol=1e-4)
