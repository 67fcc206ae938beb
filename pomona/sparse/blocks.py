"""The packed storage format of a matrix whose mask is made of whole blocks: rows of dense blocks of height × width.

A *block row* is `height` rows of the matrix. Its blocks with a nonzero lie one after another, each as [row][column],
with the number of their block column. The matrix is padded with zeros to whole blocks. There is one index for a block,
and nothing is gathered: a block times a piece of x is a small dense product (`cpu/blocks.c`, `cuda/triton_blocks.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import PomonaError, require
from ..masking import matrix_shape
from .packed_tensor import (
    DTYPES,
    SAME_SIZE_INTEGER,
    PackedTensor,
    dtype_names,
    require_packable,
    require_value_dtype,
)

MAX_SIDE = 1 << 12  # rows or columns of a block
INDEX_LIMIT = 1 << 31  # of blocks, which 32 bits count


@dataclass(frozen=True, eq=False)
class BlockTensor(PackedTensor):
    """A packed matrix, or a packed convolution weight as out × (in · kh · kw), of dense blocks."""

    format_name = "blocks"
    part_names = ("values", "block_columns", "starts")

    values: Tensor  # blocks × height × width
    block_columns: Tensor  # blocks, int32: the block column of each
    starts: Tensor  # block rows + 1, int32: the first block of each block row, and the number of blocks
    shape: torch.Size

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", torch.Size(self.shape))
        validate_blocks(self.values, self.block_columns, self.starts, *self.sizes)

    @property
    def height(self) -> int:
        """The rows of a block."""
        return self.values.shape[1]

    @property
    def width(self) -> int:
        """The columns of a block."""
        return self.values.shape[2]

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        return self.matrix

    @property
    def metadata(self) -> dict[str, Any]:
        """The shape and the name of the format."""
        return {"shape": list(self.shape), "format": self.format_name}

    @classmethod
    def from_parts(cls, parts: Sequence[Tensor], metadata: Mapping[str, Any]) -> BlockTensor:
        values, block_columns, starts = parts
        return cls(values, block_columns, starts, torch.Size(metadata["shape"]))

    @classmethod
    @torch.no_grad()
    def from_dense(cls, weight: Tensor, height: int, width: int) -> BlockTensor:
        """Return a weight in packed form, in blocks of height × width.

        Raise PomonaError for a dtype or a shape that cannot be packed, and for blocks without or with too many rows or
        columns.
        """
        require_packable(weight)
        fits = 1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE
        require(fits, f"a block has 1 to {MAX_SIDE} rows and columns, got {height}×{width}.")
        tiles = divide_into_blocks(weight.reshape(matrix_shape(weight.shape)), height, width)
        kept = (tiles != 0).flatten(2).any(2)
        count = int(kept.sum())
        require(count < INDEX_LIMIT, f"a matrix is packed in fewer than 2³¹ blocks, got {count:,}.")
        starts = pad(kept.sum(1).cumsum(0), (1, 0)).int()
        return cls(tiles[kept].contiguous(), kept.nonzero()[:, 1].int(), starts, weight.shape)

    @staticmethod
    def unpack(values: Tensor, block_columns: Tensor, starts: Tensor, rows: int, columns: int) -> Tensor:
        return unpack_blocks(values, block_columns, starts, rows, columns)

    def verify(self) -> BlockTensor:
        rows, columns = self.matrix
        across, starts = -(-columns // self.width), self.starts
        in_order = int(starts[0]) == 0 and int(starts[-1]) == len(self.values) and bool((starts.diff() >= 0).all())
        require(in_order, "the starts of the block rows do not lead from 0 to the number of blocks.")
        inside = bool(((self.block_columns >= 0) & (self.block_columns < across)).all())
        require(inside, f"a block is outside the {across} block columns of the matrix.")
        block_row = torch.repeat_interleave(torch.arange(len(starts) - 1, device=self.device), starts.diff().long())
        place = block_row * across + self.block_columns
        require(bool((place.diff() > 0).all()), "the blocks of a block row do not increase in their columns.")
        # Compared as integers, so that −0.0 and NaN count.
        stored = self.values.view(SAME_SIZE_INTEGER[self.dtype]) != 0
        row = block_row.view(-1, 1, 1) * self.height + torch.arange(self.height, device=self.device).view(-1, 1)
        column = self.block_columns.view(-1, 1, 1) * self.width + torch.arange(self.width, device=self.device)
        outside = (row >= rows) | (column >= columns)
        require(not bool((stored & outside).any()), "a value is outside the matrix.")
        return self

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.shape))
        blocks = f"{len(self.values):,} blocks of {self.height}×{self.width}"
        return f"BlockTensor({shape}, {blocks}, {self.dtype}, {self.nbytes:,} bytes)"


def divide_into_blocks(matrix: Tensor, height: int, width: int) -> Tensor:
    """Return a matrix, padded with zeros, as block rows × block columns × height × width."""
    rows, columns = matrix.shape
    padded = pad(matrix, (0, -columns % width, 0, -rows % height))
    return padded.view(-1, height, padded.shape[1] // width, width).transpose(1, 2)


def unpack_blocks(values: Tensor, block_columns: Tensor, starts: Tensor, rows: int, columns: int) -> Tensor:
    """Return the dense matrix, rows × columns, of the parts of a packed one."""
    _, height, width = values.shape
    down, across = len(starts) - 1, -(-columns // width)
    blocks = torch.arange(len(values), device=values.device)
    row = torch.searchsorted(starts, blocks, right=True).sub_(1).clamp_(0, max(0, down - 1))
    dense = values.new_zeros(down, height, across, width)
    dense[row, :, block_columns.long().clamp(0, across - 1)] = values
    return dense.view(down * height, across * width)[:rows, :columns].contiguous()


def validate_blocks(values: Tensor, block_columns: Tensor, starts: Tensor, rows: int, columns: int) -> None:
    """Raise PomonaError unless the tensors have the shapes and dtypes of a packed matrix of this size.

    Contents are not read: kernels limit what they read themselves, and `verify` checks a file.
    """
    if columns < 1 or rows < 0:
        raise PomonaError(f"a matrix of {rows}×{columns} cannot be packed in blocks.")
    if values.dtype not in DTYPES or (block_columns.dtype, starts.dtype) != (torch.int32, torch.int32):
        require_value_dtype(values.dtype)
        raise PomonaError(
            f"values in blocks are of {dtype_names(DTYPES)}, block columns and starts of int32; "
            f"got {values.dtype}, {block_columns.dtype} and {starts.dtype}."
        )
    sides = values.shape[1:]
    fits = values.ndim == 3 and all(1 <= side <= MAX_SIDE for side in sides) and block_columns.shape == values.shape[:1]
    if not fits or starts.shape != (math.ceil(rows / sides[0]) + 1,):
        raise PomonaError(
            f"the parts of a matrix of {rows}×{columns} packed in blocks do not fit together: they have the "
            f"shapes {', '.join(str(tuple(part.shape)) for part in (values, block_columns, starts))}."
        )
    if not all(part.is_contiguous() and part.device == values.device for part in (values, block_columns, starts)):
        raise PomonaError("the parts of a matrix packed in blocks must be contiguous and on one device.")
