"""Images that stay on the disk: worker processes decode each batch while the one before it is trained on."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from pomona.errors import PomonaError, require

from . import keyed_random
from .augment import ResizedCrop
from .batches import Batch, Batches
from .image_files import EncodedImage, ImagePaths, import_pillow, import_simplejpeg, read_image_file
from .split import Split
from .worker_pool import WorkerPool, shared_array

EVALUATION_CROP = 7 / 8  # the side of an evaluated crop over the short side of its image: 224 of 256
MAX_CHUNK = 16  # images that a worker reads for one task
BUFFERED_BATCHES = 3  # at least
JPEG_FACTORS = (8, 4, 2)

Box = tuple[int, int, int, int]  # top, left, height, width
ChooseBox = Callable[[int, int], tuple[Box, bool]]  # from the height and width of an image; and whether it is flipped


@dataclass(frozen=True, eq=False)
class ImageStream(Split):
    """Images of one part in files: `x` has their shape and no values, `y` their classes."""

    paths: ImagePaths
    workers: int = 0  # processes that decode; 0: one for each core that this process may use

    @classmethod
    def from_paths(cls, paths: ImagePaths, classes: np.ndarray, size: int, workers: int) -> ImageStream:
        """Return the stream of images of a class each, as squares of a size."""
        x = torch.empty((len(paths), 3, size, size), dtype=torch.uint8, device="meta")
        return cls(x, torch.from_numpy(classes), paths, workers)

    def to(self, device: torch.device | str) -> ImageStream:
        return ImageStream(self.x, self.y.to(device), self.paths, self.workers)

    def take_rows(self, rows: np.ndarray) -> ImageStream:
        paths = ImagePaths.from_paths(self.paths.root, (self.paths[row] for row in rows))
        y = self.y[torch.from_numpy(rows).to(self.y.device)]
        return ImageStream(self.x[: len(rows)], y, paths, self.workers)

    def read(self, row: int, choose_box: ChooseBox) -> np.ndarray:
        """Return the chosen box of an image, scaled to (size, size, 3) bytes, and flipped left to right if chosen."""
        path = self.paths[row]
        image = EncodedImage(path, read_image_file(path))
        box, flip = choose_box(image.height, image.width)
        pixels = scale_box(image, box, int(self.x.shape[-1]))
        return pixels[:, ::-1] if flip else pixels

    def count_workers(self) -> int:
        """Return the number of processes that decode for this one."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.workers or max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def scale_box(image: EncodedImage, box: Box, size: int) -> np.ndarray:
    """Return a box of an image, scaled to (size, size, 3) bytes by an antialiasing bilinear filter.

    A JPEG whose box is several times as large as the result is decoded at a fraction of its size, at which the box is
    still twice as large as the result.
    """
    factor = next((f for f in JPEG_FACTORS if min(box[2:]) >= 2 * f * size), 1)
    pixels = image.decode(factor)
    top, left, height, width = box
    if pixels.shape[:2] != (image.height, image.width):
        down, across = pixels.shape[0] / image.height, pixels.shape[1] / image.width
        top, left, height, width = (round(v * s) for v, s in zip(box, (down, across, down, across), strict=True))
    part = torch.from_numpy(pixels[top : top + height, left : left + width]).permute(2, 0, 1)[None]
    scaled = F.interpolate(part, (size, size), mode="bilinear", antialias=True)
    return scaled[0].permute(1, 2, 0).numpy()


def center_box(height: int, width: int) -> tuple[Box, bool]:
    """Return the square at the center of an image, `EVALUATION_CROP` of its short side, which is not flipped."""
    side = max(1, round(EVALUATION_CROP * min(height, width)))
    return ((height - side) // 2, (width - side) // 2, side, side), False


def draw_box(augment: ResizedCrop, uniforms: np.ndarray) -> ChooseBox:
    """Return the function that chooses the box of one image by its row of random numbers."""

    def choose(height: int, width: int) -> tuple[Box, bool]:
        top, left, box_height, box_width, flip = map(int, augment.draw_params(uniforms[None], height, width)[0])
        return (top, left, box_height, box_width), bool(flip)

    return choose


class StreamedBatches(Batches):
    """Batches of an `ImageStream`, equal for every number of workers.

    `resized_crop` takes its boxes from the whole image, as ImageNet is usually trained on. Images that are evaluated,
    and those of other augmentations, are the squares of `center_box`.
    """

    split: ImageStream

    def __init__(self, split: ImageStream, batch_size: int, **options: Any) -> None:
        super().__init__(split, batch_size, **options)
        import_pillow()
        import_simplejpeg()
        self._whole_image = self.augment if isinstance(self.augment, ResizedCrop) else None  # crops it
        pad = 0 if self._whole_image is None else self._whole_image.pad
        require(pad == 0, f"images from the disk are cropped without padding, got pad={pad}: use resized_crop(pad=0).")
        self._copy_stream = torch.cuda.Stream(split.y.device) if split.y.is_cuda else None

    def gather_batch(self, rows: torch.Tensor, params: torch.Tensor | None) -> Batch:
        raise PomonaError("images from the disk are read in the order of an epoch only: set data.stream = false.")

    def evaluate(self) -> Iterator[Batch]:
        count = len(self.split)
        yield from self._read_batches(np.arange(count), range(-(-count // self.batch_size)), None)

    def _iterate_epoch(self, epoch: int, start: int) -> Iterator[Batch]:
        count = len(self.split)
        order = keyed_random.permutation(count, self.seed, epoch, 0) if self.shuffle else np.arange(count)
        yield from self._read_batches(order, range(start, len(self)), epoch)

    def _uniforms(self, epoch: int, rows: slice) -> np.ndarray:
        """Return the random numbers of some rows of an epoch: those that `Batches` draws for all rows at once."""
        assert self.augment is not None
        shape = rows.stop - rows.start, self.augment.uniforms_per_image
        return keyed_random.uniform(shape, self.seed, epoch, 1, start=rows.start)

    def _read_batches(self, order: np.ndarray, batches: range, epoch: int | None) -> Iterator[Batch]:
        """Yield the batches of the given numbers, from rows in the given order, augmented where there is an epoch.

        Workers fill buffers that this process shares with them. A buffer is free again once its batch was copied.
        """
        workers, most = self.split.count_workers(), -(-self.batch_size // self.world)
        chunk = min(MAX_CHUNK, -(-most // (2 * workers)))
        chunks = -(-most // chunk)  # of a full batch
        buffers = max(BUFFERED_BATCHES, -(-4 * workers * chunk // most))
        size = int(self.split.x.shape[-1])
        pixels = shared_array((buffers, most, size, size, 3), np.uint8)

        def task_rows(task: int) -> slice:
            rows, first = self._rank_rows(task // chunks), task % chunks * chunk
            return slice(rows.start + first, min(rows.start + first + chunk, rows.stop))

        def work(task: int) -> None:
            rows = task_rows(task)
            into = pixels[task // chunks % buffers, task % chunks * chunk :]
            boxes: Iterable[ChooseBox] = itertools.repeat(center_box)
            if epoch is not None and self._whole_image is not None:
                boxes = [draw_box(self._whole_image, drawn) for drawn in self._uniforms(epoch, rows)]
            for k, (row, box) in enumerate(zip(order[rows], boxes, strict=False)):
                into[k] = self.split.read(row, box)

        def describe(task: int) -> str:
            rows = order[task_rows(task)]
            return f"read {len(rows)} images, of which the first is {self.split.paths[rows[0]]}"

        with WorkerPool(workers, work, describe) as pool:
            pending: dict[int, int] = {}  # batch → tasks that are not done

            def submit(batch: int) -> None:
                rows = self._rank_rows(batch)
                pending[batch] = -(-(rows.stop - rows.start) // chunk)
                for task in range(batch * chunks, batch * chunks + pending[batch]):
                    pool.submit(task)

            for batch in batches[:buffers]:
                submit(batch)
            for batch in batches:
                while pending[batch]:
                    pending[pool.next_result() // chunks] -= 1
                del pending[batch]
                rows = self._rank_rows(batch)
                images = torch.from_numpy(pixels[batch % buffers, : rows.stop - rows.start])
                found = self._prepare_batch(images, order[rows], rows, epoch)
                if batch + buffers in batches:
                    submit(batch + buffers)
                elif not pending:
                    pool.close()  # before an evaluation starts workers of its own
                yield found

    def _prepare_batch(self, images: torch.Tensor, rows: np.ndarray, drawn: slice, epoch: int | None) -> Batch:
        """Return the model inputs and targets of a batch, on the device, from pixels in a buffer of the workers."""
        device = self.split.y.device
        images = images.permute(0, 3, 1, 2)
        if self.layout != torch.channels_last:
            images = images.contiguous()
        x = self._copy_to_device(images, device)
        if epoch is not None and self.augment is not None and self._whole_image is None:
            params = self.augment.draw_params(self._uniforms(epoch, drawn), *images.shape[2:])
            x = self.augment(x, torch.from_numpy(params).to(device))
        return self._prepare_inputs(x), self.split.y[torch.from_numpy(rows).to(device)]

    def _copy_to_device(self, images: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the images on a device; a GPU may still compute the step before, for which the copy does not wait."""
        if self._copy_stream is None:
            return images.to(device)
        with torch.cuda.stream(self._copy_stream):
            copied = images.to(device)
        copied.record_stream(torch.cuda.current_stream(device))
        return copied
