"""Batches of a split, gathered, augmented and normalised on the device that holds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from pomona.errors import require

from . import draws
from .augment import AUGMENTS, Augment
from .split import Split

Batch = tuple[torch.Tensor, torch.Tensor]


class Batches:
    """Batches whose order, crops and flips are a pure function of (seed, epoch, position).

    Nothing is carried from batch to batch, so `epoch(e, start=k)` is the tail of `epoch(e)` bit for
    bit, on any device. `batch_size` is the global one: each of `world` ranks draws the same order
    and takes its own slice of every batch, so together they see what one process would.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        seed: int = 0,
        augment: str | Augment | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.split, self.batch_size, self.seed = split, batch_size, seed
        self.shuffle, self.drop_last = shuffle, drop_last
        self.dtype, self.rank, self.world = dtype, rank, world
        self.layout = torch.channels_last if channels_last else torch.preserve_format
        self.augment = None if augment is None else AUGMENTS.resolve(augment)
        self._image = split.x.dim() == 4 and split.x.dtype == torch.uint8
        self._check(channels_last)
        self._scale, self._shift = self._affine(mean, std)

    def _check(self, channels_last: bool) -> None:
        rows = len(self.split)
        require(self.batch_size >= 1, f"batch_size must be 1 or more, got {self.batch_size}.")
        require(rows > 0, "a split without rows gives no batches.")
        require(
            len(self) > 0,
            f"batch_size {self.batch_size} is more than the {rows} rows: lower it or keep the last.",
        )
        require(0 <= self.rank < self.world, f"rank must lie in 0 … {self.world - 1}, got {self.rank}.")
        require(
            self.batch_size % self.world == 0,
            f"batch_size {self.batch_size} does not divide among {self.world} ranks: take a multiple.",
        )
        require(
            self._image or (self.augment is None and not channels_last),
            f"augment and channels_last are for images (uint8, 4 axes), "
            f"this split holds {self.split.x.dtype} with {self.split.x.dim()} axes: leave them out.",
        )

    def _affine(self, mean: Sequence[float] | None, std: Sequence[float] | None) -> Batch:
        """What turns raw 0 … 255 into (x/255 − mean)/std."""
        device, shape = self.split.x.device, self.split.x.shape
        for given in (mean, std):
            require(
                given is None or (self._image and len(given) in (1, shape[1])),
                f"mean and std take one number for each of the image's channels, got {given} for {tuple(shape)}.",
            )
        require(min(std or [1.0]) > 0, f"std must be above 0, got {std}.")
        m = torch.tensor(mean or [0.0], dtype=torch.float64).view(-1, 1, 1)
        s = torch.tensor(std or [1.0], dtype=torch.float64).view(-1, 1, 1)
        return (1 / (255 * s)).float().to(device), (-m / s).float().to(device)

    def __len__(self) -> int:
        """Batches in an epoch."""
        full, rest = divmod(len(self.split), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The training batches of an epoch, from batch `start` on."""
        require(0 <= start <= len(self), f"start must lie in 0 … {len(self)} batches, got {start}.")
        rest = len(self.split) % self.batch_size
        require(
            self.drop_last or rest % self.world == 0,
            f"the last batch of {rest} does not divide among {self.world} ranks: set drop_last=True.",
        )
        return self._epoch(epoch, start)

    def _epoch(self, epoch: int, start: int) -> Iterator[Batch]:
        order, plan = (None if part is None else part.to(self.split.x.device) for part in self.draw(epoch))
        for k in range(start, len(self)):
            rows = self._slice(k)
            yield self.gather(order[rows], None if plan is None else plan[rows])  # type: ignore[index]

    def draw(self, epoch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """An epoch's order of rows, and what the augmentation does to each; both on the host."""
        count = len(self.split)
        order = draws.permutation(count, self.seed, epoch, 0) if self.shuffle else np.arange(count)
        if self.augment is None:
            return torch.from_numpy(order), None
        u = draws.uniform((count, self.augment.draws), self.seed, epoch, 1)
        return torch.from_numpy(order), torch.from_numpy(self.augment.plan(u, *self.split.x.shape[2:]))

    def gather(self, rows: torch.Tensor, plan: torch.Tensor | None) -> Batch:
        """The batch of these rows, augmented as planned."""
        images = self.split.x[rows]
        if self.augment is not None and plan is not None:
            images = self.augment(images, plan)
        return self._ready(images), self.split.y[rows]

    def evaluate(self) -> Iterator[Batch]:
        """Every row once, in order, without augmentation, the last batch included."""
        for k in range(-(-len(self.split) // self.batch_size)):
            rows = self._slice(k)
            yield self._ready(self.split.x[rows]), self.split.y[rows]

    def _slice(self, k: int) -> slice:
        """This rank's rows of global batch k; the first ranks take one more where it is uneven."""
        first = k * self.batch_size
        share, extra = divmod(min(self.batch_size, len(self.split) - first), self.world)
        start = first + self.rank * share + min(self.rank, extra)
        return slice(start, start + share + (self.rank < extra))

    def _ready(self, x: torch.Tensor) -> torch.Tensor:
        """Images normalised, tables in the asked dtype, tokens as they are."""
        if self._image:
            x = torch.addcmul(self._shift, x.float(), self._scale)
        if x.is_floating_point():
            x = x.to(self.dtype, memory_format=self.layout)
        return x
