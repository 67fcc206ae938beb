"""The masks of a run, in a file beside its model."""

from __future__ import annotations

from pathlib import Path

from pomona.core.mask_file import encode_masks, read_masks
from pomona.core.method import Masks
from pomona.errors import require

from .durable_files import replace_file
from .folder import MASKS_FILE


def save(folder: Path, masks: Masks) -> None:
    """Write masks to the masks file of a run's folder."""
    replace_file(folder / MASKS_FILE, encode_masks(masks))


def load(folder: Path) -> Masks:
    """Return the masks of a finished run; raise PomonaError if there are none or the file is damaged."""
    path = folder / MASKS_FILE
    require(path.is_file(), f"'{folder}' holds no masks ({MASKS_FILE}): give a finished run of a method that prunes.")
    return read_masks(path)


def layer_sparsities(masks: Masks) -> dict[str, float]:
    """Return the pruned fraction of each tensor."""
    return {name: 1 - int(mask.sum()) / mask.numel() for name, mask in masks.items()}
