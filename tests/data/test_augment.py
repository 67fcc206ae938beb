"""Crops and flips against images worked out by hand and against slow loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pomona.data import AUGMENTS, ResizedCrop, Standard
from pomona.data.keyed_random import uniform
from pomona.errors import PomonaError


def test_crop_worked_out_by_hand():
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


def standard_in_a_loop(images: np.ndarray, params: np.ndarray, pad: int) -> np.ndarray:
    out = np.zeros_like(images)
    count, channels, height, width = images.shape
    for n in range(count):
        top, left, flip = params[n]
        for c in range(channels):
            for i in range(height):
                for j in range(width):
                    y, x = top + i - pad, left + (width - 1 - j if flip else j) - pad
                    if 0 <= y < height and 0 <= x < width:
                        out[n, c, i, j] = images[n, c, y, x]
    return out


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 5), st.integers(1, 5), st.integers(1, 6), st.integers(0, 1000))
def test_standard_equals_a_loop_over_pixels(pad: int, height: int, width: int, seed: int):
    images = np.random.default_rng(seed).integers(1, 256, (6, 2, height, width), dtype=np.uint8)
    augment = Standard(pad=pad)
    params = augment.draw_params(uniform((6, augment.uniforms_per_image), seed), height, width)
    got = augment(torch.from_numpy(images), torch.from_numpy(params))
    np.testing.assert_array_equal(got.numpy(), standard_in_a_loop(images, params, pad))


def test_standard_draws_every_position_and_flip_equally():
    params = Standard(pad=4).draw_params(uniform((40_000, 3), 7), 32, 32)
    for column, values in enumerate((9, 9, 2)):
        share = np.bincount(params[:, column], minlength=values) / len(params)
        assert len(share) == values
        np.testing.assert_allclose(share, 1 / values, atol=0.01)
    assert abs(np.corrcoef(params.T) - np.eye(3)).max() < 0.02


def crop_and_interpolate(image: torch.Tensor, row: np.ndarray, pad: int) -> torch.Tensor:
    """Pad, slice and `F.interpolate`: torchvision's steps for a tensor."""
    top, left, tall, wide = (int(v) for v in row[:4])
    box = F.pad(image.float(), [pad] * 4)[None, :, top : top + tall, left : left + wide]
    out = F.interpolate(box, image.shape[1:], mode="bilinear", align_corners=False)[0]
    return out.flip(2) if row[4] else out


@pytest.mark.parametrize("pad", [0, 4])
def test_resized_crop_equals_slice_and_interpolate(pad: int):
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (40, 3, 10, 12), dtype=np.uint8))
    augment = ResizedCrop(pad=pad)
    params = augment.draw_params(uniform((40, augment.uniforms_per_image), 3), 10, 12)
    got = augment(images, torch.from_numpy(params))
    want = torch.stack([crop_and_interpolate(i, p, pad) for i, p in zip(images, params, strict=True)])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-2)  # of 255; the grid is float32


def torchvision_boxes(u: np.ndarray, height: int, width: int) -> list[tuple[float, ...]]:
    """Return the boxes of torchvision's RandomResizedCrop.get_params for given random numbers."""
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
def test_boxes_are_those_of_torchvision(height: int, width: int):
    u = uniform((3000, ResizedCrop.uniforms_per_image), 5)
    u[:50, :10] = 1 - 1e-9  # the largest area, with the flattest ratio: no try fits, fall back
    u[:50, 10:20] = 0
    params = ResizedCrop(pad=0).draw_params(u, height, width)
    np.testing.assert_array_equal(params, np.array(torchvision_boxes(u, height, width), dtype=np.float32))


def test_augmentations_are_resolved_by_name():
    assert AUGMENTS.resolve("standard") == Standard(pad=4)
    assert AUGMENTS.resolve("resized_crop(pad=0)") == ResizedCrop(pad=0)
    with pytest.raises(PomonaError, match="did you mean 'standard'"):
        AUGMENTS.resolve("standart")
    with pytest.raises(PomonaError, match="pad must be 0 or more, got -1"):
        Standard(pad=-1)
