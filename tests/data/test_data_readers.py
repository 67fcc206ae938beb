"""The other readers, on small files in the exact formats."""

from __future__ import annotations

import builtins
import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from pomona.data import load
from pomona.data.imdb import Imdb, tokenize
from pomona.errors import PomonaError

# --- digits


def test_digits_need_no_file_and_never_change():
    data = load("digits")
    assert (len(data.train), len(data.test), data.classes, data.input_shape) == (1347, 450, 10, (1, 8, 8))
    assert data.train.x.dtype == torch.uint8
    assert data.train.x.max() == 255
    assert all(44 <= n <= 46 for n in data.test.y.bincount())
    rows = {row.tobytes() for row in torch.cat([data.train.x, data.test.x]).numpy()}
    assert len(rows) == 1797
    assert data.test.y[:12].tolist() == [1, 2, 3, 1, 3, 5, 0, 1, 5, 5, 0, 8]
    pixels = data.train.x.double() / 255
    assert data.mean[0] == pytest.approx(pixels.mean().item())
    x, _ = next(data.batches(1347).epoch(0))
    assert abs(x.mean().item()) < 1e-5
    assert x.std().item() == pytest.approx(1, abs=1e-3)


# --- IDX


def idx(array: np.ndarray) -> bytes:
    return (0x800 + array.ndim).to_bytes(4, "big") + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def write_mnist(folder: Path, zipped: bool = False) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    arrays = {}
    for part, rows in (("train", 6), ("t10k", 3)):
        arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (rows, 5, 4), dtype=np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = rng.integers(0, 10, rows, dtype=np.uint8)
    for name, array in arrays.items():
        raw = idx(array)
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
    ("file", "raw", "words"),
    [
        ("train-images-idx3-ubyte", b"\0\0\x08\x01" + bytes(12), "magic number 00000801, expected 00000803"),
        ("train-images-idx3-ubyte", b"", "magic number missing, expected 00000803"),
        ("t10k-images-idx3-ubyte", idx(np.zeros((3, 5, 4), np.uint8))[:-1], r"75 bytes, expected 76 for \(3, 5, 4\)"),
        ("t10k-labels-idx1-ubyte", idx(np.array([1, 2, 10], np.uint8)), "label 10, expected 0 to 9"),
        ("t10k-labels-idx1-ubyte", idx(np.array([1, 2], np.uint8)), "2 labels, expected 3, one for each image"),
    ],
)
def test_damaged_idx_files(tmp_path: Path, file: str, raw: bytes, words: str):
    write_mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / file).write_bytes(raw)
    with pytest.raises(PomonaError, match=f"{file} is damaged: {words}; remove .* --download mnist"):
        load("mnist", root=tmp_path)


def test_a_truncated_gzip_is_named(tmp_path: Path):
    write_mnist(tmp_path / "mnist", zipped=True)
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(PomonaError, match=r"train-images-idx3-ubyte.gz is damaged: .*expected a complete gzip file"):
        load("mnist", root=tmp_path)


# --- image folders


def paint(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> None:
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.new("RGB", size, colour).save(path)


def test_image_folders(tmp_path: Path):
    for part in ("train", "val"):
        paint(tmp_path / part / "cat" / "a.png", (10, 20, 30))
        paint(tmp_path / part / "dog" / "b.PNG", (40, 50, 60), (12, 6))
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    data = load("imagefolder", root=tmp_path, size=4)
    assert data.labels == ("cat", "dog")
    assert data.train.x.shape == (2, 3, 4, 4)
    assert data.train.x[:, :, 0, 0].tolist() == [[10, 20, 30], [40, 50, 60]]
    assert data.test.y.tolist() == [0, 1]
    assert data.valid is None
    paint(tmp_path / "test" / "dog" / "c.jpg", (0, 0, 0))
    three = load("imagefolder", root=tmp_path, size=4)
    assert len(three.valid) == 2
    assert three.test.y.tolist() == [1]
    with pytest.raises(PomonaError, match="'imagefolder' has its own validation part, so validation must be 0, got 1"):
        load("imagefolder", root=tmp_path, size=4, validation=1)


def test_bad_image_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paint(tmp_path / "train" / "cat" / "a.png", (0, 0, 0))
    with pytest.raises(PomonaError, match="no 'val' or 'test' folder"):
        load("imagefolder", root=tmp_path)
    paint(tmp_path / "val" / "cow" / "a.png", (0, 0, 0))
    with pytest.raises(PomonaError, match="has the class 'cow', which 'train' does not have"):
        load("imagefolder", root=tmp_path)
    (tmp_path / "val" / "cow").rename(tmp_path / "val" / "cat")
    (tmp_path / "val" / "cat" / "b.jpg").write_bytes(b"not an image")
    with pytest.raises(
        PomonaError, match=r"b.jpg is damaged: .*expected a readable image; replace it by an intact copy"
    ):
        load("imagefolder", root=tmp_path)
    real = builtins.__import__

    def without_pillow(name: str, *rest, **more):
        if name == "PIL":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_pillow)
    with pytest.raises(PomonaError, match=r"need Pillow: run `pip install pomona\[images\]`"):
        load("imagefolder", root=tmp_path)


# --- aclImdb


@pytest.fixture
def reviews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Imdb, "reviews", 1)
    texts = {
        "train/neg": "Bad, BAD film!<br /><br />Don't see it",
        "train/pos": "A good film. Bad? no; film!",
        "test/neg": "bad bad zebra",
        "test/pos": "",
    }
    for part, text in texts.items():
        folder = tmp_path / "aclImdb" / part
        folder.mkdir(parents=True)
        (folder / "0_1.txt").write_text(text)
    return tmp_path


def test_reviews_become_ids(reviews: Path):
    assert tokenize("Don't<br />go—élan_2x") == ["don", "t", "go", "élan", "x"]
    # bad 3, film 3, then one each, in alphabetical order: a, don, …
    data = load("imdb", root=reviews, words=4, maxlen=5)
    assert (data.vocab, data.classes, data.input_shape, data.kind) == (6, 2, (5,), "tokens")
    assert data.train.x.tolist() == [[3, 5, 1, 1, 1], [1, 3, 2, 1, 3]]
    assert data.train.y.tolist() == [0, 1]
    assert data.test.x.tolist() == [[0, 0, 2, 2, 1], [0, 0, 0, 0, 0]]
    other = load("imdb(keep='first', pad='right')", root=reviews, words=4, maxlen=5)
    assert other.train.x.tolist() == [[2, 2, 3, 5, 1], [4, 1, 3, 2, 1]]
    assert other.test.x.tolist() == [[2, 2, 1, 0, 0], [0, 0, 0, 0, 0]]


def test_missing_reviews_are_counted(reviews: Path):
    (reviews / "aclImdb" / "test" / "pos" / "0_1.txt").unlink()
    with pytest.raises(PomonaError, match=r"test/pos is damaged: 0 reviews, expected 1; remove \S+/aclImdb and run"):
        load("imdb", root=reviews)
    with pytest.raises(PomonaError, match="keep must be 'first' or 'last', got 'middle'"):
        load("imdb", root=reviews, keep="middle")


# --- Covertype


def write_covertype(folder: Path, scale: float = 1, header: bool = True) -> np.ndarray:
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    table = np.hstack([rng.random((70, 54)).round(3) * scale, (np.arange(70) % 7 + 1)[:, None]])
    lines = [",".join(f"{v:g}" for v in row) for row in table]
    if header:
        lines.insert(0, ",".join([f"Feature{i}" for i in range(54)] + ["Cover_Type"]))
    (folder / "covertype.csv").write_text("\n".join(lines) + "\n")
    return table


@pytest.mark.parametrize("header", [True, False])
def test_covertype(tmp_path: Path, header: bool):
    table = write_covertype(tmp_path / "covertype", header=header)
    data = load("covertype", root=tmp_path)
    assert (len(data.train), len(data.test), data.kind) == (56, 14, "table")
    assert data.test.y.bincount().tolist() == [2] * 7
    got = {tuple(row) for row in torch.cat([data.train.x, data.test.x]).numpy()}
    assert got == {tuple(row) for row in table[:, :54].astype(np.float32)}
    again = load("covertype", root=tmp_path, seed=9)
    assert torch.equal(data.test.x, again.test.x)
    assert next(data.batches(8, seed=1).epoch(0))[0].shape == (8, 54)


def test_covertype_as_published_is_scaled(tmp_path: Path):
    write_covertype(tmp_path / "covertype", scale=300, header=False)
    path = tmp_path / "covertype" / "covertype.csv"
    (tmp_path / "covertype" / "covtype.data.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    data = load("covertype", root=tmp_path)
    x = torch.cat([data.train.x, data.test.x])
    assert x.amin(0).tolist() == [0] * 54
    assert x.amax(0).tolist() == [1] * 54


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (",".join(["0"] * 54), "54 columns in line 3, expected 55"),
        (",".join(["0"] * 54 + ["8"]), "class 8 in data row 2, expected 1 to 7"),
        (",".join(["0"] * 53 + ["fir", "1"]), "could not convert string 'fir'"),
        (",".join(["nan"] * 54 + ["1"]), "not a finite number"),
    ],
)
def test_damaged_covertype(tmp_path: Path, line: str, words: str):
    write_covertype(tmp_path / "covertype")
    path = tmp_path / "covertype" / "covertype.csv"
    lines = path.read_text().splitlines()
    lines[2] = line
    path.write_text("\n".join(lines))
    with pytest.raises(PomonaError, match=rf"covertype.csv is damaged: .*{words}.*--download covertype"):
        load("covertype", root=tmp_path)


# --- text


def test_text_is_cut_in_order_and_shifted(tmp_path: Path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "input.txt").write_text("abcdefghij" * 10)
    data = load("text", root=tmp_path, length=4, valid=0.2, test=0.1)
    assert (data.vocab, data.classes, data.input_shape, data.labels) == (10, 10, (4,), tuple("abcdefghij"))
    assert [len(data.part(p)) for p in ("train", "valid", "test")] == [69, 19, 9]
    assert data.train.x[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert torch.equal(data.train.y, (data.train.x + 1) % 10)
    x, y = next(data.batches(3, seed=1).epoch(0))
    assert x.shape == (3, 4)
    assert torch.equal(y, (x + 1) % 10)
    first, second = list(data.batches(2, carry=True).epoch(0))[:2]
    assert second[0][:, 0].tolist() == first[1][:, -1].tolist()


def test_text_in_words_and_in_parts(tmp_path: Path):
    (tmp_path / "text").mkdir()
    for part, text in (("train", "the cat\nthe dog\n"), ("valid", "a cat\n"), ("test", "a dog\n")):
        (tmp_path / "text" / f"ptb.{part}.txt").write_text(text)
    data = load("text", root=tmp_path, unit="word", length=2)
    assert data.labels == ("<eos>", "a", "cat", "dog", "the")
    assert data.train.x.tolist() == [4, 2, 0, 4, 3]
    assert data.test.y.tolist() == [3, 0]
    (tmp_path / "text" / "ptb.valid.txt").unlink()
    with pytest.raises(PomonaError, match=r"valid.txt cannot be read"):
        load("text", root=tmp_path, unit="word", length=2)


def test_bad_text(tmp_path: Path):
    folder = tmp_path / "tinyshakespeare"
    folder.mkdir()
    with pytest.raises(PomonaError, match=r"input.txt cannot be read .*--download shakespeare"):
        load("shakespeare", root=tmp_path)
    (folder / "input.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(PomonaError, match="expected UTF-8 text"):
        load("shakespeare", root=tmp_path)
    (folder / "input.txt").write_text("too short")
    with pytest.raises(PomonaError, match="the train part .* has 8 tokens, a window of length 64"):
        load("shakespeare", root=tmp_path)
    with pytest.raises(PomonaError, match="unit must be 'char' or 'word', got 'byte'"):
        load("shakespeare", root=tmp_path, unit="byte")
