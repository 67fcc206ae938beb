"""Files of masks: safetensors with eight entries a byte, and the shapes as metadata.

Masks cannot be read off a model's zeros: a weight that is kept, or has just been regrown, may be zero too.
"""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
import torch

from ..errors import PomonaError
from ..untrusted import parse_json, read_tensors
from .mask_bits import pack_bits, unpack_bits
from .method import Masks


def encode_masks(masks: Masks) -> bytes:
    """Return the contents of a masks file."""
    bits = {name: pack_bits(mask).cpu() for name, mask in masks.items()}
    shapes = {name: list(mask.shape) for name, mask in masks.items()}
    return safetensors.torch.save(bits, {"shapes": json.dumps(shapes)})


def read_masks(path: Path) -> Masks:
    """Return the masks of a file; raise PomonaError if it is damaged."""
    try:
        metadata, bits = read_tensors(path)
        shapes = parse_json(metadata["shapes"])
        return {name: unpack_bits(bits[name], torch.Size(shape)) for name, shape in shapes.items()}
    except Exception as error:  # a hostile file can make anything fail, and must do no more than that
        raise PomonaError(f"'{path}' is damaged, or not a file of masks.") from error
