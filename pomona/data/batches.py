"""Batches of a split, gathered, augmented and normalized on the device that holds the split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from pomona.errors import require

from . import keyed_random
from .augment import AUGMENTS, Augmentation
from .split import Split

Batch = tuple[torch.Tensor, torch.Tensor]


class Batches:
    """Batches whose order, crops and flips depend on (seed, epoch, position) alone.

    No state passes from batch to batch, so `epoch(e, start=k)` is the tail of `epoch(e)` bit for bit, on any device.
    `batch_size` is the global batch size: each of `world` ranks draws the same order and takes its own slice of every
    batch, so that all ranks together see the batches of a single process.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        seed: int = 0,
        augment: str | Augmentation | None = None,
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
        self._is_image = split.x.dim() == 4 and split.x.dtype == torch.uint8
        self._validate(channels_last)
        self._scale, self._shift = self._normalization(mean, std)

    def _validate(self, channels_last: bool) -> None:
        """Raise PomonaError for options that do not fit the split or each other."""
        rows = len(self.split)
        require(self.batch_size >= 1, f"batch_size must be 1 or more, got {self.batch_size}.")
        require(rows > 0, "a split without rows has no batches: give at least one row.")
        require(
            len(self) > 0,
            f"batch_size {self.batch_size} is more than the {rows} rows: lower it, or set drop_last=False.",
        )
        require(0 <= self.rank < self.world, f"rank must lie in 0 … {self.world - 1}, got {self.rank}.")
        require(
            self.batch_size % self.world == 0,
            f"batch_size {self.batch_size} does not divide among {self.world} ranks: use a multiple.",
        )
        require(
            self._is_image or (self.augment is None and not channels_last),
            f"augment and channels_last are for images (uint8, 4 axes), "
            f"this split holds {self.split.x.dtype} with {self.split.x.dim()} axes: leave them out.",
        )

    def _normalization(self, mean: Sequence[float] | None, std: Sequence[float] | None) -> Batch:
        """Return the scale and shift that turn raw values 0 … 255 into (x/255 − mean)/std."""
        device, shape = self.split.y.device, self.split.x.shape
        for given in (mean, std):
            require(
                given is None or (self._is_image and len(given) in (1, shape[1])),
                f"mean and std take one number for each of the image's channels, got {given} for {tuple(shape)}.",
            )
        require(min(std or [1.0]) > 0, f"std must be above 0, got {std}.")
        m = torch.tensor(mean or [0.0], dtype=torch.float64).view(-1, 1, 1)
        s = torch.tensor(std or [1.0], dtype=torch.float64).view(-1, 1, 1)
        return (1 / (255 * s)).float().to(device), (-m / s).float().to(device)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        full, rest = divmod(len(self.split), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the training batches of an epoch, beginning with batch `start`."""
        require(0 <= start <= len(self), f"start must lie in 0 … {len(self)} batches, got {start}.")
        rest = len(self.split) % self.batch_size
        require(
            self.drop_last or rest % self.world == 0,
            f"the last batch of {rest} does not divide among {self.world} ranks: set drop_last=True.",
        )
        return self._iterate_epoch(epoch, start)

    def _iterate_epoch(self, epoch: int, start: int) -> Iterator[Batch]:
        """Yield the batches of `epoch`, whose arguments are already validated."""
        order, params = (None if part is None else part.to(self.split.x.device) for part in self.draw_epoch(epoch))
        for k in range(start, len(self)):
            rows = self._rank_rows(k)
            yield self.gather_batch(order[rows], None if params is None else params[rows])  # type: ignore[index]

    def draw_epoch(self, epoch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the order of rows in an epoch and the augmentation parameters of each, both on the host."""
        count = len(self.split)
        order = keyed_random.permutation(count, self.seed, epoch, 0) if self.shuffle else np.arange(count)
        if self.augment is None:
            return torch.from_numpy(order), None
        u = keyed_random.uniform((count, self.augment.uniforms_per_image), self.seed, epoch, 1)
        return torch.from_numpy(order), torch.from_numpy(self.augment.draw_params(u, *self.split.x.shape[2:]))

    def gather_batch(self, rows: torch.Tensor, params: torch.Tensor | None) -> Batch:
        """Return the batch of the given rows, augmented with the given parameters."""
        images = self.split.x[rows]
        if self.augment is not None and params is not None:
            images = self.augment(images, params)
        return self._prepare_inputs(images), self.split.y[rows]

    def evaluate(self) -> Iterator[Batch]:
        """Yield every row once, in order and without augmentation, including the last partial batch."""
        for k in range(-(-len(self.split) // self.batch_size)):
            rows = self._rank_rows(k)
            yield self._prepare_inputs(self.split.x[rows]), self.split.y[rows]

    def _rank_rows(self, k: int) -> slice:
        """Return this rank's rows of global batch k; if they do not divide evenly, the first ranks take one more."""
        first = k * self.batch_size
        share, extra = divmod(min(self.batch_size, len(self.split) - first), self.world)
        start = first + self.rank * share + min(self.rank, extra)
        return slice(start, start + share + (self.rank < extra))

    def _prepare_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """Return model inputs: images normalized, floating-point features in the chosen dtype, tokens unchanged."""
        if self._is_image:
            x = torch.addcmul(self._shift, x.float(), self._scale)
        if x.is_floating_point():
            x = x.to(self.dtype, memory_format=self.layout)
        return x
