"""Crops and flips against hand-worked images and slow loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pomona.data import AUGMENTS, ResizedCrop, Standard
from pomona.data.draws import uniform
from pomona.errors import PomonaError


def test_a_crop_worked_by_hand():
    image = torch.arange(1, 17, dtype=torch.uint8).view(1, 1, 4, 4)
    augment = Standard(pad=1)
    kept = augment(image, torch.tensor([[1, 1, 0]]))
    assert torch.equal(kept, image)
    # From the upper left corner of the padded image: the first row and column are black.
    corner = augment(image, torch.tensor([[0, 0, 0]]))
    assert corner[0, 0].tolist() == [[0, 0, 0, 0], [0, 1, 2, 3], [0, 5, 6, 7], [0, 9, 10, 11]]
    # One down, one to the right, then mirrored.
    flipped = augment(image, torch.tensor([[2, 2, 1]]))
    assert flipped[0, 0].tolist() == [[0, 8, 7, 6], [0, 12, 11, 10], [0, 16, 15, 14], [0, 0, 0, 0]]


def slow_standard(images: np.ndarray, plan: np.ndarray, pad: int) -> np.ndarray:
    out = np.zeros_like(images)
    count, channels, height, width = images.shape
    for n in range(count):
        top, left, flip = plan[n]
        for c in range(channels):
            for i in range(height):
                for j in range(width):
                    y, x = top + i - pad, left + (width - 1 - j if flip else j) - pad
                    if 0 <= y < height and 0 <= x < width:
                        out[n, c, i, j] = images[n, c, y, x]
    return out


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 5), st.integers(1, 5), st.integers(1, 6), st.integers(0, 1000))
def test_standard_is_a_loop_over_pixels(pad: int, height: int, width: int, seed: int):
    images = np.random.default_rng(seed).integers(1, 256, (6, 2, height, width), dtype=np.uint8)
    augment = Standard(pad=pad)
    plan = augment.plan(uniform((6, augment.draws), seed), height, width)
    got = augment(torch.from_numpy(images), torch.from_numpy(plan))
    np.testing.assert_array_equal(got.numpy(), slow_standard(images, plan, pad))


def test_standard_draws_every_place_and_both_sides_equally():
    plan = Standard(pad=4).plan(uniform((40_000, 3), 7), 32, 32)
    for column, values in enumerate((9, 9, 2)):
        share = np.bincount(plan[:, column], minlength=values) / len(plan)
        assert len(share) == values
        np.testing.assert_allclose(share, 1 / values, atol=0.01)
    assert abs(np.corrcoef(plan.T) - np.eye(3)).max() < 0.02


def slow_resized(image: torch.Tensor, row: np.ndarray, pad: int) -> torch.Tensor:
    """Pad, slice and `F.interpolate`: torchvision's steps for a tensor."""
    top, left, tall, wide = (int(v) for v in row[:4])
    box = F.pad(image.float(), [pad] * 4)[None, :, top : top + tall, left : left + wide]
    out = F.interpolate(box, image.shape[1:], mode="bilinear", align_corners=False)[0]
    return out.flip(2) if row[4] else out


@pytest.mark.parametrize("pad", [0, 4])
def test_resized_crop_is_slice_and_interpolate(pad: int):
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (40, 3, 10, 12), dtype=np.uint8))
    augment = ResizedCrop(pad=pad)
    plan = augment.plan(uniform((40, augment.draws), 3), 10, 12)
    got = augment(images, torch.from_numpy(plan))
    want = torch.stack([slow_resized(i, p, pad) for i, p in zip(images, plan, strict=True)])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-2)  # of 255; the grid is float32


def slow_boxes(u: np.ndarray, height: int, width: int) -> list[tuple[float, ...]]:
    """torchvision's RandomResizedCrop.get_params, told its random numbers."""
    boxes = []
    for row in u:
        for t in range(10):
            area = height * width * (0.08 + 0.92 * row[t])
            ratio = (3 / 4) * (16 / 9) ** row[10 + t]
            w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
            if 0 < w <= width and 0 < h <= height:
                break
        else:
            w, h = min(width, round(height * 4 / 3)), min(height, round(width / (3 / 4)))
        boxes.append((int(row[20] * (height - h + 1)), int(row[21] * (width - w + 1)), h, w, row[22] < 0.5))
    return boxes


@pytest.mark.parametrize(("height", "width"), [(40, 40), (12, 40)])
def test_boxes_are_torchvisions(height: int, width: int):
    u = uniform((3000, ResizedCrop.draws), 5)
    u[:50, :10] = 1 - 1e-9  # the largest area, with the flattest ratio: no try fits, fall back
    u[:50, 10:20] = 0
    plan = ResizedCrop(pad=0).plan(u, height, width)
    np.testing.assert_array_equal(plan, np.array(slow_boxes(u, height, width), dtype=np.float32))


def test_augmentations_have_names_and_options():
    assert AUGMENTS.resolve("standard") == Standard(pad=4)
    assert AUGMENTS.resolve("resized_crop(pad=0)") == ResizedCrop(pad=0)
    with pytest.raises(PomonaError, match="did you mean 'standard'"):
        AUGMENTS.resolve("standart")
    with pytest.raises(PomonaError, match="pad must be 0 or more, got -1"):
        Standard(pad=-1)
