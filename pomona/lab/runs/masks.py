"""The masks that a run found, in a file beside its model.

The zeros of the model do not tell them: a weight that was kept, or has just grown, may be zero too.
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

from . import checkpoint

FILE = "masks.safetensors"


def save(folder: Path, masks: Masks) -> None:
    """Write masks as bits, eight entries a byte, with their shapes."""
    bits = {name: pack_bits(mask).cpu() for name, mask in masks.items()}
    shapes = {name: list(mask.shape) for name, mask in masks.items()}
    checkpoint.replace(folder / FILE, safetensors.torch.save(bits, {"shapes": json.dumps(shapes)}))


def load(folder: Path) -> Masks:
    """The masks of a finished run."""
    path = folder / FILE
    if not path.is_file():
        raise PomonaError(f"'{folder}' holds no masks ({FILE}): give a finished run of a method that prunes.")
    try:
        with safe_open(path, "pt") as file:
            shapes = json.loads(file.metadata()["shapes"])
            return {name: unpack_bits(file.get_tensor(name), torch.Size(shape)) for name, shape in shapes.items()}
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise PomonaError(f"'{path}' is damaged: train the run again.") from error


def sparsities(masks: Masks) -> dict[str, float]:
    """The pruned fraction of each tensor."""
    return {name: 1 - int(mask.sum()) / mask.numel() for name, mask in masks.items()}
