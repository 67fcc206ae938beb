"""The packed forms of weights in blocks of equal counts: the width of the blocks, and values as floats or codes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..masking import matrix_shape
from .format import MAX_BLOCK, WORD_BITS, BalancedTensor, index_bits
from .packed_tensor import PackedTensor
from .quantized import QuantizedBalancedTensor

MIN_SPARSITY = 0.3  # with fewer zeros, packing gains nothing
SAMPLED_ROWS = 256  # rows from which `find_block` judges a weight
CANDIDATE_BLOCKS = (*range(2, 129), *(2**power for power in range(8, 17)))
# The time of one stored value relative to blocks of 32 columns, for blocks of at most this many columns.
RELATIVE_TIMES = ((32, 1.0), (64, 1.3), (128, 1.7), (MAX_BLOCK, 3.0))
MIN_BALANCED_FILL = 0.9  # of the values stored for balanced weights are nonzero, where the mask is balanced


def is_balanced(weight: Tensor, packed: PackedTensor) -> bool:
    """Return whether nearly all values that are stored for a weight's blocks are nonzero."""
    assert isinstance(packed, BalancedTensor)
    stored = weight.shape[0] * packed.values.shape[1] * packed.kept
    return int(weight.count_nonzero()) >= MIN_BALANCED_FILL * stored


def pack_balanced(
    weights: Mapping[str, Tensor], block: int | None, dtype: torch.dtype | None, bits: int | None = None
) -> dict[str, BalancedTensor]:
    """Return the balanced forms of the weights that gain by it, by parameter name; as codes where `bits` are given."""
    packed_weights: dict[str, BalancedTensor] = {}
    for leaf, weight in weights.items():
        width = find_block(weight, bits) if block is None else block
        if bits is None:
            packed = BalancedTensor.from_dense(weight, width).to(dtype or weight.dtype)
        else:
            packed = QuantizedBalancedTensor.from_dense(weight.float(), width, f"int{bits}")
        # Where the blocks differ in count, the fullest one decides how many values are stored for each.
        if packed.values[:1, :, :, 0].numel() <= (1 - MIN_SPARSITY) * packed.matrix[1]:
            packed_weights[leaf] = packed
    return packed_weights


def find_block(weight: Tensor, bits: int | None = None) -> int:
    """Return the block width that takes the fewest bytes and the fastest kernel, judged by a sample of the rows.

    `bits` are those of a stored value, by default as many as the weight has.
    """
    rows, columns = matrix_shape(weight.shape)
    value_bytes = weight.element_size() if bits is None else bits / 8
    flat = weight.reshape(rows, columns)
    sample = flat[torch.linspace(0, rows - 1, min(rows, SAMPLED_ROWS), device=weight.device).long()] != 0
    total = torch.nn.functional.pad(sample.int().cumsum(1), (1, 0))

    def cost(width: int) -> float:
        edges = torch.arange(0, columns + width, width, device=weight.device).clamp_(max=columns)
        kept = max(1, int(total[:, edges].diff(dim=1).max()))
        words = math.ceil(kept / (WORD_BITS // index_bits(width)))
        relative = next(time for limit, time in RELATIVE_TIMES if width <= limit)
        return math.ceil(columns / width) * (kept * value_bytes + 2 * words) * relative

    return min((w for w in CANDIDATE_BLOCKS if w <= max(2, columns)), key=lambda w: (cost(w), abs(w - 32)))
