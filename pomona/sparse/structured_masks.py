"""The packed forms of weights whose mask has a structure: two of every four weights, or whole blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from .block_shape import find_block_shape
from .blocks import BlockTensor
from .ops import block_product, two_of_four_product
from .packed_tensor import PackedTensor
from .two_of_four import TwoOfFourTensor, is_two_of_four

MIN_FILL = 0.9  # of the values stored for a 2:4 weight are nonzero, where the format is considered


def pack_structured(
    weights: Mapping[str, Tensor], formats: Collection[str], dtype: torch.dtype | None
) -> dict[str, Mapping[str, PackedTensor]]:
    """Return the packed forms of weights by format and parameter name, in those `formats` whose structure all have."""
    found: dict[str, Mapping[str, PackedTensor]] = {}
    devices = {weight.device.type for weight in weights.values()}
    has_two_of_four = TwoOfFourTensor.format_name in formats and devices <= two_of_four_product.BACKENDS.keys()
    if has_two_of_four and all(is_filled(weight) and is_two_of_four(weight) for weight in weights.values()):
        found[TwoOfFourTensor.format_name] = {
            leaf: TwoOfFourTensor.from_dense(weight).to(dtype or weight.dtype) for leaf, weight in weights.items()
        }
    if BlockTensor.format_name in formats and devices <= block_product.BACKENDS.keys():
        shapes = {leaf: find_block_shape(weight) for leaf, weight in weights.items()}
        if all(shapes.values()):
            found[BlockTensor.format_name] = {
                leaf: BlockTensor.from_dense(weights[leaf], *shape).to(dtype or weights[leaf].dtype)
                for leaf, shape in shapes.items()
                if shape is not None
            }
    return found


def is_filled(weight: Tensor) -> bool:
    """Return whether nearly half of all weights are nonzero, as many as the format 2:4 stores."""
    return int(weight.count_nonzero()) >= MIN_FILL * weight.numel() / 2
