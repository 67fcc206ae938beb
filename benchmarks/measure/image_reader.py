"""Measure the reader of image folders: images per second, memory over an epoch, and resuming.

    python benchmarks/measure/image_reader.py [--images 20000] [--folder FOLDER] [--json FILE]

JPEGs in the layout of ImageNet are written to the folder unless they are there. The readers take turns on the same
images: random resized crops of 224 × 224 pixels, flips and normalization, in batches of 256.

loader         torch's DataLoader as ImageNet is usually read: each worker decodes, crops and normalizes with Pillow
loader_bytes   the same, but the workers send bytes, and whole batches are normalized
stream_pillow  pomona's stream without simplejpeg
stream         pomona's stream with simplejpeg, where it is installed

Memory is the proportional set size of this process and all below it, which counts shared pages once.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from interleaved_timing import time_in_turns
from PIL import Image
from record_file import write_record
from synthetic_images import make_folder
from torch.utils.data import DataLoader

from pomona.data import IMAGENET, Dataset, image_files, image_stream, load
from pomona.data.augment import ResizedCrop

SIZE, BATCH = 224, 256
MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in IMAGENET)
SIMPLEJPEG = image_files.import_simplejpeg


class PillowImages(torch.utils.data.Dataset):
    """The images of a folder as torchvision reads them: decoded, cropped, scaled and flipped with Pillow."""

    def __init__(self, paths: image_files.ImagePaths, classes: torch.Tensor, normalize: bool) -> None:
        self.paths, self.classes, self.normalize = paths, classes, normalize

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        with open(self.paths[row], "rb") as file:
            image = Image.open(file).convert("RGB")
        uniforms = torch.rand(1, ResizedCrop.uniforms_per_image).numpy()
        top, left, height, width, flip = ResizedCrop(pad=0).draw_params(uniforms, image.height, image.width)[0]
        box = (left, top, left + width, top + height)
        image = image.crop(box).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        if flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        if self.normalize:
            return (pixels.float() / 255 - MEAN) / STD, int(self.classes[row])
        return pixels.contiguous(), int(self.classes[row])


def read_with_loader(data: Dataset, workers: int, normalize: bool) -> None:
    """Read one epoch with torch's DataLoader."""
    images = PillowImages(data.train.paths, data.train.y, normalize)  # type: ignore[attr-defined]
    for pixels, _ in DataLoader(images, BATCH, shuffle=True, num_workers=workers):
        if not normalize:
            (pixels.float() / 255 - MEAN) / STD


def read_with_stream(data: Dataset, with_simplejpeg: bool) -> None:
    """Read one epoch with the stream of pomona."""
    image_files.import_simplejpeg = image_stream.import_simplejpeg = SIMPLEJPEG if with_simplejpeg else lambda: None  # type: ignore[assignment]
    for _ in data.batches(BATCH, seed=0).epoch(0):
        pass


def processor_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def measure_speed(data: Dataset, workers: int, turns: int) -> dict[str, dict[str, Any]]:
    """Return the images per second of every reader: the median and each turn, and the processor time for an image.

    Processor time hardly depends on what else the machine does.
    """
    readers: dict[str, Callable[[], None]] = {
        "loader": lambda: read_with_loader(data, workers, normalize=True),
        "loader_bytes": lambda: read_with_loader(data, workers, normalize=False),
        "stream_pillow": lambda: read_with_stream(data, with_simplejpeg=False),
    }
    if SIMPLEJPEG() is not None:
        readers["stream"] = lambda: read_with_stream(data, with_simplejpeg=True)
    used: dict[str, list[float]] = {name: [] for name in readers}

    def timed(name: str) -> Callable[[], None]:
        def read() -> None:
            start = processor_seconds()
            readers[name]()
            used[name].append((processor_seconds() - start) / len(data.train))

        return read

    seconds = time_in_turns({name: timed(name) for name in readers}, turns, len(data.train), "cpu")
    speeds = {name: [1 / value for value in values] for name, values in seconds.items()}
    return {
        name: {
            "median": statistics.median(values),
            "turns": values,
            "processor_ms_per_image": 1000 * statistics.median(used[name][1:]),
        }
        for name, values in speeds.items()
    }


def read_memory() -> int:
    """Return the bytes of this process and all processes below it; a page that several share counts once."""
    total, processes = 0, [os.getpid()]
    while processes:
        process = processes.pop()
        try:
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
            total += 1024 * next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
            for thread in Path(f"/proc/{process}/task").iterdir():
                processes += map(int, (thread / "children").read_text().split())
        except (OSError, StopIteration):  # it has ended
            continue
    return total


def measure_memory(data: Dataset, epochs: int, interval: float) -> dict[str, Any]:
    """Return the memory while some epochs are read, and the largest of the last epoch over that of the first."""
    stopped, samples, epoch = threading.Event(), [], 0

    def sample() -> None:
        while not stopped.wait(interval):
            samples.append((epoch, read_memory()))

    before = read_memory()
    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        for epoch in range(epochs):  # the sampler reads it
            for _ in data.batches(BATCH, seed=1).epoch(epoch):
                pass
    finally:
        stopped.set()
        sampler.join()
    most = [max((used for at, used in samples if at == e), default=0) for e in range(epochs)]
    return {
        "before": before,
        "most_in_each_epoch": most,
        "growth": most[-1] / most[0] if most[0] else None,
        "samples": [used for _, used in samples],
    }


def hash_batches(batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> list[str]:
    """Return a hash of the inputs and targets of each batch."""
    return [hashlib.sha256(x.numpy().tobytes() + y.numpy().tobytes()).hexdigest() for x, y in batches]


def measure_resume(folder: Path, workers: int) -> dict[str, Any]:
    """Return how many batches are the same when an epoch is taken up in its middle with other numbers of workers."""
    whole = hash_batches(read_part(folder, workers).batches(BATCH, seed=2).epoch(1))
    start, others = len(whole) // 2, sorted({1, workers + 1, 2 * workers + 1})
    tails = {n: hash_batches(read_part(folder, n).batches(BATCH, seed=2).epoch(1, start)) for n in others}
    same = {n: sum(a == b for a, b in zip(tail, whole[start:], strict=True)) for n, tail in tails.items()}
    return {"batches": len(whole), "start": start, "workers": workers, "same_with_workers": same}


def read_part(folder: Path, workers: int) -> Dataset:
    """Return the streamed data set of a folder."""
    return load("imagefolder", root=folder, size=SIZE, stream=True, workers=workers)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure everything, print it and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3, help="read while memory is measured")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two samples of the memory")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        start = time.perf_counter()
        folder = make_folder(given.folder or Path(temporary), given.images, max(2, given.images // 25))
        sizes = [path.stat().st_size for path in (folder / "train").glob("*/*")]
        print(f"{len(sizes)} images, {np.mean(sizes) / 1e3:.0f} kB each, in {time.perf_counter() - start:.0f} s")
        start = time.perf_counter()
        data = read_part(folder, given.workers)
        results: dict[str, Any] = {
            "images": len(data.train),
            "bytes_per_image": float(np.mean(sizes)),
            "workers": given.workers,
            "batch": BATCH,
            "seconds_to_list": time.perf_counter() - start,
        }
        results["images_per_second"] = measure_speed(data, given.workers, given.turns)
        for name, speed in results["images_per_second"].items():
            print(f"{name:14} {speed['median']:8.0f} images/s, {speed['processor_ms_per_image']:.2f} ms of a core each")
        results["memory"] = measure_memory(data, given.epochs, given.interval)
        print(f"memory         {[round(used / 1e6) for used in results['memory']['most_in_each_epoch']]} MB, by epoch")
        results["resume"] = measure_resume(folder, given.workers)
        print(f"resume         {results['resume']}")
    write_record(given.json, **results)
    return results


if __name__ == "__main__":
    main()
