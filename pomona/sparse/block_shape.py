"""The shape of the blocks of which a mask is made."""

from __future__ import annotations

from torch import Tensor

from ..masking import matrix_shape
from .blocks import divide_into_blocks

SIDES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 25, 32, 48, 49, 64)  # rows or columns of a block that are tried
MIN_WEIGHTS = 4  # of a block: with fewer, an index for each weight is as short
MIN_FILL = 0.9  # of the values stored for blocks are nonzero, where the mask is made of them
MAX_STORED = 0.7  # of the matrix: with fewer zeros, packing gains nothing
SAMPLED_ROWS = 192  # and columns, from which the shape is judged at first
SAMPLED_COLUMNS = 1024
INDEX_BYTES = 4


def find_block_shape(weight: Tensor) -> tuple[int, int] | None:
    """Return height and width of the blocks that store a weight in the fewest bytes; None where it has no blocks.

    A few rows tell which heights and widths are possible, so that this takes little time where there are no blocks.
    """
    matrix = weight.reshape(matrix_shape(weight.shape))
    rows, columns = matrix.shape
    sample = matrix[:SAMPLED_ROWS] != 0
    if not sample.any():  # the rows from the middle on may have more
        sample = matrix[rows // 2 // SAMPLED_ROWS * SAMPLED_ROWS :][:SAMPLED_ROWS] != 0
    wide, high = sample[: SAMPLED_ROWS // 4], sample[:, :SAMPLED_COLUMNS]
    widths = [width for width in SIDES if width <= columns and has_blocks(wide, 1, width)]
    heights = [height for height in SIDES if height <= rows and has_blocks(high, height, 1)]
    shapes = [(h, w) for h in heights for w in widths if h * w >= MIN_WEIGHTS and has_blocks(sample, h, w)]
    if not shapes:
        return None
    height, width = min(shapes, key=lambda shape: stored_bytes(sample, weight.element_size(), *shape))
    nonzero = matrix != 0
    stored = count_blocks(nonzero, height, width) * height * width
    is_whole = int(nonzero.sum()) >= MIN_FILL * stored and stored <= MAX_STORED * nonzero.numel()
    return (height, width) if is_whole else None


def has_blocks(nonzero: Tensor, height: int, width: int) -> bool:
    """Return whether nearly all weights of the blocks that hold a nonzero are nonzero."""
    return int(nonzero.sum()) >= MIN_FILL * count_blocks(nonzero, height, width) * height * width


def count_blocks(nonzero: Tensor, height: int, width: int) -> int:
    """Return the number of blocks of a mask that hold a nonzero."""
    tiles = divide_into_blocks(nonzero, height, width)
    kept = tiles.any(3).any(2) if height > 1 else tiles.any(3)
    return int(kept.sum())


def stored_bytes(nonzero: Tensor, value_bytes: int, height: int, width: int) -> int:
    """Return the bytes of the blocks that hold a nonzero, and of their indices."""
    return count_blocks(nonzero, height, width) * (height * width * value_bytes + INDEX_BYTES)
