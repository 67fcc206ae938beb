"""Data sets of the papers: readers of their standard files, and batches assembled on the compute device.

data = pomona.data.load("cifar10", device="cuda", validation=5000)
batches = data.batches(128, seed=1)
for x, y in batches.epoch(0):
    ...
for x, y in data.batches(1000, part="test").evaluate():
    ...
"""

from __future__ import annotations

from . import cifar, covertype, digits, idx, image_folder, imdb, text  # noqa: F401  (importing them registers them)
from .augment import AUGMENTS, ResizedCrop, Standard
from .batches import Batches
from .dataset import IMAGENET, Dataset
from .fetch import download
from .image_stream import ImageStream, StreamedBatches
from .sources import SOURCES, CatalogEntry, Source, catalog, describe_source, load, locate
from .split import Split, cut_windows

__all__ = [
    "AUGMENTS",
    "IMAGENET",
    "SOURCES",
    "Batches",
    "CatalogEntry",
    "Dataset",
    "ImageStream",
    "ResizedCrop",
    "Source",
    "Split",
    "Standard",
    "StreamedBatches",
    "catalog",
    "cut_windows",
    "describe_source",
    "download",
    "load",
    "locate",
]
