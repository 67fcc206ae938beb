"""The packed storage format of a balanced matrix: the survivors of each block, and their positions in it.

Survivors are the weights that pruning keeps: the nonzero values of a block. Every block stores the same number.

The values of 32 rows are stored side by side, `values[group][block][survivor][row]`, so that the lanes of a SIMD
register or of a warp are rows: all lanes read their values with one load, and all need inputs from the same block of
x, which is small enough for a register permutation. Indices are stored in words of 16 bits, as many as fit: three of
5 bits for blocks of up to 32 columns, two of 8 bits up to 256, else one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import PomonaError, require
from ..masking import matrix_shape
from .packed_tensor import (
    DTYPE_CODES,
    DTYPES,
    SAME_SIZE_INTEGER,
    PackedTensor,
    dtype_names,
    from_words,
    require_packable,
    require_value_dtype,
    to_words,
)

__all__ = ["DTYPES", "DTYPE_CODES", "LANES", "MAX_BLOCK", "WORD_BITS", "BalancedTensor"]

LANES = 32  # rows of a group, stored side by side
WORD_BITS = 16  # of a word that holds indices
MAX_BLOCK = 1 << WORD_BITS  # columns that an index of one word can address


def index_bits(block: int) -> int:
    """Return the number of bits that an index into a block of this width takes."""
    return 5 if block <= 32 else 8 if block <= 256 else WORD_BITS


@dataclass(frozen=True, eq=False)
class BalancedTensor(PackedTensor):
    """A packed matrix, or a packed convolution weight as out × (in · kh · kw), with the same count kept in every block.

    Blocks that hold fewer nonzeros are padded with zeros, and so are the last block and the last group of 32 rows.
    """

    format_name = "balanced"
    part_names: ClassVar[tuple[str, ...]] = ("values", "indices")

    values: Tensor  # groups of rows × blocks × kept × 32
    indices: Tensor  # groups of rows × blocks × words × 32, int16
    shape: torch.Size
    block: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", torch.Size(self.shape))
        validate_packed(self.values, self.indices, *self.matrix, self.block)

    @property
    def kept(self) -> int:
        """The number of values stored for each block."""
        return self.values.shape[2]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of rows and columns, and the width of a block."""
        return (*self.matrix, self.block)

    @property
    def metadata(self) -> dict[str, Any]:
        """The shape and the width of a block."""
        return {"shape": list(self.shape), "block": self.block}

    @classmethod
    def from_parts(cls, parts: Sequence[Tensor], metadata: Mapping[str, Any]) -> BalancedTensor:
        values, indices = parts
        return cls(values, indices, torch.Size(metadata["shape"]), metadata["block"])

    @classmethod
    @torch.no_grad()
    def from_dense(cls, weight: Tensor, block: int) -> BalancedTensor:
        """Return a weight in packed form, with as many values stored for every block as the fullest block has.

        Raise PomonaError for a dtype or a shape that cannot be packed, and for a block outside 1 to 65536 columns.
        """
        require_packable(weight)
        require(1 <= block <= MAX_BLOCK, f"a block is 1 to {MAX_BLOCK} columns wide, got {block}.")
        rows, columns = matrix_shape(weight.shape)
        padded = torch.nn.functional.pad(weight.reshape(rows, columns), (0, -columns % block, 0, -rows % LANES))
        blocks = padded.view(-1, LANES, padded.shape[1] // block, block)
        nonzero = blocks != 0
        counts = nonzero.sum(-1, keepdim=True)
        kept = max(1, int(counts.max())) if rows else 1
        # Nonzeros take the first places in their order, zeros the remaining ones.
        ranks = torch.where(nonzero, nonzero.cumsum(-1), counts + (~nonzero).cumsum(-1)) - 1
        order = torch.empty_like(ranks).scatter_(-1, ranks, torch.arange(block, device=weight.device).expand_as(ranks))
        index = order[..., :kept]
        values = blocks.gather(-1, index).permute(0, 2, 3, 1).contiguous()
        return cls(values, pack_indices(index.permute(0, 2, 3, 1), block), weight.shape, block)

    def index(self) -> Tensor:
        """Return the column of each value in its block: groups × blocks × kept × 32."""
        return unpack_indices(self.indices, self.kept, self.block)

    @staticmethod
    def unpack(values: Tensor, indices: Tensor, rows: int, columns: int, block: int) -> Tensor:
        return unpack_matrix(values, indices, rows, columns, block)

    def find_stored_values(self) -> Tensor:
        """Return which values are no padding. They are compared as integers, so that −0.0 and NaN count."""
        return self.values.view(SAME_SIZE_INTEGER[self.dtype]) != 0

    def verify(self) -> BalancedTensor:
        rows, columns = self.matrix
        index = self.index()
        require(bool((index < self.block).all()), f"an index is outside its block of {self.block} columns.")
        repeated = index.sort(2).values.diff(dim=2) == 0
        require(not repeated.any(), "two values of a block have the same index.")
        first = torch.arange(index.shape[1], device=index.device).view(-1, 1, 1) * self.block
        row = torch.arange(index.shape[0] * LANES, device=index.device).view(-1, 1, 1, LANES)
        outside = (index + first >= columns) | (row >= rows)
        require(not (outside & self.find_stored_values()).any(), "a value is outside the matrix.")
        return self

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.shape))
        return f"BalancedTensor({shape}, {self.kept} of {self.block}, {self.dtype}, {self.nbytes:,} bytes)"


def pack_indices(index: Tensor, block: int) -> Tensor:
    """Return the words of 16 bits that hold the indices of each survivor (…, survivors, 32)."""
    bits = index_bits(block)
    per_word = WORD_BITS // bits
    padded = torch.nn.functional.pad(index, (0, 0, 0, -index.shape[-2] % per_word)).unflatten(-2, (-1, per_word))
    shifts = torch.arange(0, bits * per_word, bits, device=index.device).view(-1, 1)
    words = (padded << shifts).sum(-2)
    return to_words(words)


def unpack_indices(words: Tensor, kept: int, block: int) -> Tensor:
    """Return the indices (…, kept, 32) that `pack_indices` stored in these words."""
    bits = index_bits(block)
    shifts = torch.arange(0, WORD_BITS - bits + 1, bits, device=words.device).view(-1, 1)
    index = from_words(words).unsqueeze(-2) >> shifts & ((1 << bits) - 1)
    return index.flatten(-3, -2)[..., :kept, :]


def unpack_matrix(values: Tensor, indices: Tensor, rows: int, columns: int, block: int) -> Tensor:
    """Return the dense matrix, rows × columns, of packed values and indices."""
    groups, blocks, kept, _ = values.shape
    dense = values.new_zeros(groups, blocks, block, LANES).scatter_(2, unpack_indices(indices, kept, block), values)
    return dense.permute(0, 3, 1, 2).reshape(groups * LANES, blocks * block)[:rows, :columns]


def validate_packed(values: Tensor, indices: Tensor, rows: int, columns: int, block: int) -> None:
    """Raise PomonaError unless the tensors are those of a packed matrix of this size."""
    validate_packed_shapes(values.shape, indices.shape, values.dtype, indices.dtype, rows, columns, block)
    validate_packed_memory(values, indices)


def validate_packed_shapes(values: torch.Size, indices: torch.Size, dtype: torch.dtype, index_dtype: torch.dtype,
                           rows: int, columns: int, block: int) -> None:  # fmt: skip
    """Raise PomonaError unless these shapes and dtypes are those of a packed matrix of this size."""
    if not 1 <= block <= MAX_BLOCK or columns < 1:
        raise PomonaError(f"a matrix of {rows}×{columns} in blocks of {block} columns cannot be packed.")
    if len(values) != 4 or dtype not in DTYPES or index_dtype != torch.int16:
        require_value_dtype(dtype)
        raise PomonaError(
            f"packed values are four-dimensional and of {dtype_names(DTYPES)}, indices of int16; "
            f"got {len(values)} dimensions of {dtype} and {index_dtype}."
        )
    kept = values[2]
    groups, blocks, words = -(-rows // LANES), -(-columns // block), -(-kept // (WORD_BITS // index_bits(block)))
    shapes = (groups, blocks, kept, LANES), (groups, blocks, words, LANES)
    if not 1 <= kept <= block or (values, indices) != shapes:
        raise PomonaError(
            f"a matrix of {rows}×{columns} in blocks of {block} has values {shapes[0]} and indices {shapes[1]}, "
            f"got {tuple(values)} and {tuple(indices)}."
        )


def validate_packed_memory(values: Tensor, indices: Tensor) -> None:
    """Raise PomonaError unless a kernel can read the tensors: contiguous, and on one device."""
    if not (values.is_contiguous() and indices.is_contiguous() and values.device == indices.device):
        raise PomonaError("packed values and indices must be contiguous and on one device.")
