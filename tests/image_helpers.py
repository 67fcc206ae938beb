"""Helpers for tests of image folders: small pictures with structure, in the layout of ImageNet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


def save_picture(path: Path, seed: int, size: tuple[int, int] = (40, 30), **options) -> None:
    """Write a smooth random picture of (width, height) pixels."""
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    image.fromarray(coarse).resize(size, image.Resampling.BICUBIC).save(path, **options)


def make_image_folder(root: Path, train: int = 12, val: int = 6, classes: int = 3) -> Path:
    """Write a folder of JPEGs of many sizes, with so many images in each part, and return it."""
    for part, count in (("train", train), ("val", val)):
        for k in range(count):
            size = 24 + 5 * (k % 4), 20 + 7 * (k % 3)
            save_picture(root / part / f"n{k % classes:08}" / f"{part}_{k}.JPEG", 1000 * len(part) + k, size)
    return root
