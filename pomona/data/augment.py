"""Random crops and flips of a whole batch at once, on the device that holds the images.

An augmentation has two parts. `draw_params` computes the parameters of every image of an epoch on the host, from random
numbers that depend on (seed, epoch) alone. Calling the augmentation applies the parameters of one batch to its images.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from pomona.errors import require
from pomona.registry import Registry


@dataclass(frozen=True)
class Augmentation:
    """Base of augmentations: first pad the raw images with zeros (black), before they are normalized."""

    pad: int = 4
    name: ClassVar[str]
    uniforms_per_image: ClassVar[int]  # how many uniform random numbers `draw_params` needs for an image

    def __post_init__(self) -> None:
        require(self.pad >= 0, f"pad must be 0 or more, got {self.pad}.")

    def draw_params(self, u: np.ndarray, height: int, width: int) -> np.ndarray:
        """Return one row of parameters per image, from random `u` in [0, 1) with `uniforms_per_image` columns."""
        raise NotImplementedError

    def __call__(self, images: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        """Apply rows of parameters to raw images (batch, channel, height, width); the size does not change."""
        raise NotImplementedError


AUGMENTS: Registry[Augmentation] = Registry("augmentation")


@AUGMENTS.register("standard")
@dataclass(frozen=True)
class Standard(Augmentation):
    """Pad, crop to the original size at a random position, and flip left to right with probability 1/2.

    The parameters of an image are (top, left, flip), in pixels of the padded image.
    """

    uniforms_per_image: ClassVar[int] = 3

    def draw_params(self, u: np.ndarray, height: int, width: int) -> np.ndarray:
        return (u * [2 * self.pad + 1, 2 * self.pad + 1, 2]).astype(np.int64)

    def __call__(self, images: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        height, width = images.shape[2:]
        top, left, flip = params[:, :, None].unbind(1)
        across = torch.arange(width, device=images.device)
        rows = top + torch.arange(height, device=images.device)
        columns = left + torch.where(flip > 0, width - 1 - across, across)
        source = rows[:, :, None] * (width + 2 * self.pad) + columns[:, None]
        padded = F.pad(images, [self.pad] * 4).flatten(2)
        return padded.gather(2, source.flatten(1)[:, None].expand(-1, images.shape[1], -1)).view_as(images)


@AUGMENTS.register("resized_crop")
@dataclass(frozen=True)
class ResizedCrop(Augmentation):
    """Pad, crop a box of random area and aspect ratio, resize it to the original size, flip with probability 1/2.

    Boxes are drawn as in torchvision's RandomResizedCrop: up to ten tries for a box that fits, with an area of 0.08 to
    1 of the image and an aspect ratio of 3/4 to 4/3. The parameters of an image are (top, left, height, width, flip).
    Resizing is bilinear, and the result is not rounded to integers.
    """

    tries: ClassVar[int] = 10
    area: ClassVar[tuple[float, float]] = (0.08, 1.0)
    ratio: ClassVar[tuple[float, float]] = (3 / 4, 4 / 3)
    uniforms_per_image: ClassVar[int] = 2 * tries + 3

    def draw_params(self, u: np.ndarray, height: int, width: int) -> np.ndarray:
        full = np.array([height + 2 * self.pad, width + 2 * self.pad])
        (min_area, max_area), (min_ratio, max_ratio) = self.area, self.ratio
        area = full.prod() * (min_area + (max_area - min_area) * u[:, : self.tries])
        ratio = np.exp(math.log(min_ratio) + math.log(max_ratio / min_ratio) * u[:, self.tries : 2 * self.tries])
        size = np.rint(np.sqrt([area / ratio, area * ratio]))  # (2, image, try): heights, widths
        fits = np.all((size >= 1) & (size <= full[:, None, None]), axis=0)
        size = np.take_along_axis(size, fits.argmax(1)[None, :, None], 2)[..., 0]
        largest = np.minimum(full, np.rint([full[1] / min_ratio, full[0] * max_ratio]))
        size = np.where(fits.any(1), size, largest[:, None])
        corner = np.floor(u[:, -3:-1].T * (full[:, None] - size + 1))
        return np.stack([*corner, *size, u[:, -1] < 0.5], 1).astype(np.float32)

    def __call__(self, images: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        padded = F.pad(images.float(), [self.pad] * 4)
        top, left, box_height, box_width, flip = params[:, :, None].unbind(1)
        y = _grid_coordinates(images.shape[2], padded.shape[2], top, box_height)
        x = _grid_coordinates(images.shape[3], padded.shape[3], left, box_width)
        x = torch.where(flip > 0, x.flip(1), x)
        height, width = y.shape[1], x.shape[1]
        grid = torch.stack([x[:, None].expand(-1, height, -1), y[:, :, None].expand(-1, -1, width)], -1)
        return F.grid_sample(padded, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _grid_coordinates(out: int, full: int, start: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """Return the coordinates on one axis, in grid_sample's [−1, 1], at which a box is read to fill `out` pixels.

    The image has `full` pixels on the axis; the box has `length` from `start`. Coordinates are clamped to the pixel
    centres of the box, so that no pixel outside the box contributes.
    """
    centre = (torch.arange(out, device=start.device) + 0.5) * length / out - 0.5
    return (2 * (start + torch.minimum(centre.clamp(min=0), length - 1)) + 1) / full - 1
