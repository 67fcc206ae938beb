"""The reader of image folders."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest

from pomona.data import load
from pomona.errors import PomonaError


def save_image(path: Path, color: tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> None:
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.new("RGB", size, color).save(path)


def test_image_folders(tmp_path: Path):
    for part in ("train", "val"):
        save_image(tmp_path / part / "cat" / "a.png", (10, 20, 30))
        save_image(tmp_path / part / "dog" / "b.PNG", (40, 50, 60), (12, 6))
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    data = load("imagefolder", root=tmp_path, size=4)
    assert data.labels == ("cat", "dog")
    assert data.train.x.shape == (2, 3, 4, 4)
    assert data.train.x[:, :, 0, 0].tolist() == [[10, 20, 30], [40, 50, 60]]
    assert data.test.y.tolist() == [0, 1]
    assert data.valid is None
    save_image(tmp_path / "test" / "dog" / "c.jpg", (0, 0, 0))
    three = load("imagefolder", root=tmp_path, size=4)
    assert len(three.valid) == 2
    assert three.test.y.tolist() == [1]
    with pytest.raises(PomonaError, match="'imagefolder' has its own validation part, so validation must be 0, got 1"):
        load("imagefolder", root=tmp_path, size=4, validation=1)


def test_invalid_image_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_image(tmp_path / "train" / "cat" / "a.png", (0, 0, 0))
    with pytest.raises(PomonaError, match="no 'val' or 'test' folder"):
        load("imagefolder", root=tmp_path)
    save_image(tmp_path / "val" / "cow" / "a.png", (0, 0, 0))
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
