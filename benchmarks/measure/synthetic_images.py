"""Make a folder of JPEGs in the layout of ImageNet, with about its sizes and bytes per image.

The images are crops of random textures whose detail falls off with frequency as in photographs, with some noise.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image

# (width, height) and share of images; ImageNet's mean is about 470 × 390 pixels and 108 kB.
SIZES = (((500, 375), 0.6), ((375, 500), 0.2), ((500, 333), 0.1), ((640, 480), 0.05), ((300, 225), 0.05))
TEXTURE_SIDE, TEXTURES = 1400, 6
NOISE = 12.0  # the standard deviation of the pixel noise, which sets the bytes per image
QUALITY = 92


@cache
def make_texture(seed: int) -> np.ndarray:
    """Return a square texture as (side, side, 3) floats: the sum of smooth noise at six scales."""
    rng, total = np.random.default_rng(seed), np.zeros((TEXTURE_SIDE, TEXTURE_SIDE, 3), np.float32)
    for scale in (2, 4, 8, 16, 32, 64):
        coarse = rng.normal(size=(TEXTURE_SIDE // scale + 2, TEXTURE_SIDE // scale + 2, 3)).astype(np.float32)
        for channel in range(3):
            layer = Image.fromarray(coarse[..., channel]).resize((TEXTURE_SIDE,) * 2, Image.Resampling.BICUBIC)
            total[..., channel] += np.asarray(layer) * scale**0.8
    return (total - total.mean()) / total.std() * 48 + 120


def write_image(root: Path, part: str, classes: int, index: int) -> None:
    """Write one image of a part; it depends on the part and the index alone."""
    path = root / part / f"n{index % classes:08}" / f"{part}_{index:08}.JPEG"
    if path.exists():
        return
    rng = np.random.default_rng([len(part), index])
    width, height = SIZES[rng.choice(len(SIZES), p=[share for _, share in SIZES])][0]
    top, left = rng.integers(TEXTURE_SIDE - height), rng.integers(TEXTURE_SIDE - width)
    crop = make_texture(index % TEXTURES)[top : top + height, left : left + width]
    pixels = crop * rng.uniform(0.7, 1.1, 3) + rng.normal(0, NOISE, crop.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=QUALITY)


def make_folder(root: Path, train: int, val: int, classes: int = 100) -> Path:
    """Write so many training and validation images, unless they are there, and return the folder."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for part, count in (("train", train), ("val", val)):
            write = partial(write_image, root, part, min(classes, val))
            list(pool.map(write, range(count), chunksize=50))
    return root
