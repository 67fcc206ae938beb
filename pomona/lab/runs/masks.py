"""The masks of a run, in a file beside its model.

They cannot be read off the model's zeros: a weight that is kept, or has just been regrown, may be zero too.
"""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from pomona.core.mask_bits import pack_bits, unpack_bits
from pomona.core.method import Masks
from pomona.errors import PomonaError

from .durable_files import replace_file
from .folder import MASKS_FILE


def save(folder: Path, masks: Masks) -> None:
    """Write masks to the masks file of a run's folder."""
    replace_file(folder / MASKS_FILE, encode(masks))


def encode(masks: Masks) -> bytes:
    """Return the contents of a masks file: bits, eight entries a byte, with the shapes as metadata."""
    bits = {name: pack_bits(mask).cpu() for name, mask in masks.items()}
    shapes = {name: list(mask.shape) for name, mask in masks.items()}
    return safetensors.torch.save(bits, {"shapes": json.dumps(shapes)})


def load(folder: Path) -> Masks:
    """Return the masks of a finished run; raise PomonaError if there are none or the file is damaged."""
    path = folder / MASKS_FILE
    if not path.is_file():
        raise PomonaError(f"'{folder}' holds no masks ({MASKS_FILE}): give a finished run of a method that prunes.")
    try:
        with safe_open(path, "pt") as file:
            shapes = json.loads(file.metadata()["shapes"])
            return {name: unpack_bits(file.get_tensor(name), torch.Size(shape)) for name, shape in shapes.items()}
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise PomonaError(f"'{path}' is damaged: train the run again.") from error


def layer_sparsities(masks: Masks) -> dict[str, float]:
    """Return the pruned fraction of each tensor."""
    return {name: 1 - int(mask.sum()) / mask.numel() for name, mask in masks.items()}
