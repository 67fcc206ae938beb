"""Random crops and flips of a whole batch at once, on the device that holds the images.

Each augmentation has two halves: `plan` draws what happens to every image of an epoch, on the host,
from numbers that depend on (seed, epoch) alone; calling it applies one batch's rows of the plan.
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
class Augment:
    """An augmentation that first pads with black, as is the custom: raw zeros, before normalising."""

    pad: int = 4
    name: ClassVar[str]
    draws: ClassVar[int]  # uniform numbers an image needs

    def __post_init__(self) -> None:
        require(self.pad >= 0, f"pad must be 0 or more, got {self.pad}.")

    def plan(self, u: np.ndarray, height: int, width: int) -> np.ndarray:
        """What happens to each image, one row an image, from u in [0, 1) of `draws` columns."""
        raise NotImplementedError

    def __call__(self, images: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
        """Apply rows of the plan to (batch, channel, height, width) raw images; the size is kept."""
        raise NotImplementedError


AUGMENTS: Registry[Augment] = Registry("augmentation")


@AUGMENTS.register("standard")
@dataclass(frozen=True)
class Standard(Augment):
    """Pad, crop back to size at a random place, flip left to right half the time.

    A plan row is (top, left, flip), counted in the padded image.
    """

    draws: ClassVar[int] = 3

    def plan(self, u: np.ndarray, height: int, width: int) -> np.ndarray:
        return (u * [2 * self.pad + 1, 2 * self.pad + 1, 2]).astype(np.int64)

    def __call__(self, images: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
        height, width = images.shape[2:]
        top, left, flip = plan[:, :, None].unbind(1)
        across = torch.arange(width, device=images.device)
        rows = top + torch.arange(height, device=images.device)
        columns = left + torch.where(flip > 0, width - 1 - across, across)
        source = rows[:, :, None] * (width + 2 * self.pad) + columns[:, None]
        padded = F.pad(images, [self.pad] * 4).flatten(2)
        return padded.gather(2, source.flatten(1)[:, None].expand(-1, images.shape[1], -1)).view_as(images)


@AUGMENTS.register("resized_crop")
@dataclass(frozen=True)
class ResizedCrop(Augment):
    """Pad, cut a box of random area and shape, scale it back to size (bilinear), flip half the time.

    Boxes are drawn as torchvision's RandomResizedCrop draws them: up to ten tries for a box that
    fits, with area 0.08 to 1 of the image and ratio 3/4 to 4/3. A plan row is (top, left, height,
    width, flip). The result is not rounded to whole grey levels.
    """

    tries: ClassVar[int] = 10
    area: ClassVar[tuple[float, float]] = (0.08, 1.0)
    ratio: ClassVar[tuple[float, float]] = (3 / 4, 4 / 3)
    draws: ClassVar[int] = 2 * tries + 3

    def plan(self, u: np.ndarray, height: int, width: int) -> np.ndarray:
        full = np.array([height + 2 * self.pad, width + 2 * self.pad])
        (small, large), (flat, wide) = self.area, self.ratio
        area = full.prod() * (small + (large - small) * u[:, : self.tries])
        ratio = np.exp(math.log(flat) + math.log(wide / flat) * u[:, self.tries : 2 * self.tries])
        size = np.rint(np.sqrt([area / ratio, area * ratio]))  # (2, image, try): heights, widths
        fits = np.all((size >= 1) & (size <= full[:, None, None]), axis=0)
        size = np.take_along_axis(size, fits.argmax(1)[None, :, None], 2)[..., 0]
        largest = np.minimum(full, np.rint([full[1] / flat, full[0] * wide]))
        size = np.where(fits.any(1), size, largest[:, None])
        corner = np.floor(u[:, -3:-1].T * (full[:, None] - size + 1))
        return np.stack([*corner, *size, u[:, -1] < 0.5], 1).astype(np.float32)

    def __call__(self, images: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
        padded = F.pad(images.float(), [self.pad] * 4)
        top, left, tall, wide, flip = plan[:, :, None].unbind(1)
        y = _sample(images.shape[2], padded.shape[2], top, tall)
        x = _sample(images.shape[3], padded.shape[3], left, wide)
        x = torch.where(flip > 0, x.flip(1), x)
        height, width = y.shape[1], x.shape[1]
        grid = torch.stack([x[:, None].expand(-1, height, -1), y[:, :, None].expand(-1, -1, width)], -1)
        return F.grid_sample(padded, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _sample(out: int, full: int, start: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """Where on one axis of `full` pixels a box is read to fill `out` pixels, in grid_sample's [−1, 1].

    Kept within the box's own pixel centres, so that nothing from outside the box shines in.
    """
    centre = (torch.arange(out, device=start.device) + 0.5) * length / out - 0.5
    return (2 * (start + torch.minimum(centre.clamp(min=0), length - 1)) + 1) / full - 1
