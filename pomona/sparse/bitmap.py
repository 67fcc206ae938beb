"""The packed storage format of any sparse matrix for a GPU's tensor cores: a bit for each weight, and the survivors.

Survivors are the weights that pruning keeps. A bit for each weight says whether it is one, and their values lie one
after another: at 50 % zeros a float16 survivor takes 2.25 bytes, at 90 % 3.25. No row and no block is padded.

A *slab* is 64 rows, and a *step* 64 columns of it. A warp multiplies a step as four *tiles* of 16 rows, and each of its
lanes expands the weights that it passes to the tensor cores (`cuda/bitmap_tiles.cu`): lane 4g + t has the columns
16t + 4s + j of the rows 8g + 2·tile + h, as bit 8s + 4h + j of one word for each tile. The values of a step are
ordered by tile, h, s, lane and j.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import PomonaError, require
from ..masking import matrix_shape
from .packed_tensor import DTYPES, PackedTensor, dtype_names, require_packable, require_value_dtype

SLAB_ROWS, STEP_COLUMNS = 64, 64
STEP_ENTRIES = SLAB_ROWS * STEP_COLUMNS
LANES, TILES = 32, 4
ALIGNMENT = 8  # values that a thread loads at a time: their number is a multiple of it
# Rows as g, tile and h, and columns as t, s and j.
ROW_SIZES, COLUMN_SIZES = (8, TILES, 2), (4, 4, 4)
SLABS_AT_ONCE = 8  # slabs of a matrix that are packed at a time, which bounds the memory for their places


@dataclass(frozen=True, eq=False)
class BitmapTensor(PackedTensor):
    """A packed matrix, or a packed convolution weight as out × (in · kh · kw), with survivors anywhere."""

    format_name = "bitmap"
    part_names = ("values", "words", "starts")

    values: Tensor  # all of them, and zeros up to a multiple of ALIGNMENT
    words: Tensor  # slabs × steps × 32 × 4, int32: the bits of each lane and tile
    starts: Tensor  # slabs · steps + 1, int32: the place of the first value of each step, and the number of values
    shape: torch.Size
    most: int  # values of a step, at most

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", torch.Size(self.shape))
        validate_bitmap(self.values, self.words, self.starts, *self.sizes)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of rows and columns, and the most values of a step."""
        return *self.matrix, self.most

    @property
    def metadata(self) -> dict[str, Any]:
        """The shape, the most values of a step, and the name of the format."""
        return {"shape": list(self.shape), "most": self.most, "format": self.format_name}

    @classmethod
    def from_parts(cls, parts: Sequence[Tensor], metadata: Mapping[str, Any]) -> BitmapTensor:
        values, words, starts = parts
        return cls(values, words, starts, torch.Size(metadata["shape"]), metadata["most"])

    @classmethod
    @torch.no_grad()
    def from_dense(cls, weight: Tensor) -> BitmapTensor:
        """Return a weight in packed form; raise PomonaError for a dtype or a shape that cannot be packed."""
        require_packable(weight)
        matrix = weight.reshape(matrix_shape(weight.shape))
        values, words, counts = [], [], []
        for entries in arrange_slabs(matrix):
            kept = entries != 0
            values.append(entries[kept])
            words.append(pack_bits(kept))
            counts.append(kept.flatten(1).sum(1))
        count = torch.cat(counts) if counts else torch.zeros(0, dtype=torch.int64, device=weight.device)
        total = sum(map(len, values))
        require(total < 1 << 31, f"a bitmap packs fewer than 2³¹ survivors, got {total:,}.")
        flat = pad(torch.cat(values) if values else matrix.flatten(), (0, -total % ALIGNMENT))
        starts = pad(count.cumsum(0), (1, 0)).int()
        slabs, steps = count_steps(*matrix.shape)
        packed = torch.cat(words) if words else starts.new_zeros(0)
        most = int(count.max()) if len(count) else 0
        return cls(flat, packed.view(slabs, steps, LANES, TILES), starts, weight.shape, most)

    @staticmethod
    def unpack(values: Tensor, words: Tensor, starts: Tensor, rows: int, columns: int, most: int) -> Tensor:
        return unpack_bitmap(values, words, starts, rows, columns, most)

    def verify(self) -> BitmapTensor:
        kept = unpack_bits(self.words)
        counts = kept.flatten(1).sum(1)
        expected = pad(counts.cumsum(0), (1, 0))
        require(torch.equal(self.starts.long(), expected), "the starts of the steps do not match the bits.")
        most = int(counts.max()) if len(counts) else 0
        require(most == self.most, f"a step has {most} values and not {self.most}.")
        stored = int(expected[-1])
        fits = len(self.values) == stored + -stored % ALIGNMENT
        require(fits, f"the bits are those of {stored} values, and there are {len(self.values)}.")
        rows, columns = self.matrix
        slabs, steps = count_steps(rows, columns)
        dense = restore_order(kept.reshape(slabs, steps, STEP_ENTRIES))
        inside = not bool(dense[rows:].any()) and not bool(dense[:, columns:].any())
        require(inside, f"a bit is outside the matrix of {rows}×{columns}.")
        return self

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.shape))
        return f"BitmapTensor({shape}, {len(self.values):,} values, {self.dtype}, {self.nbytes:,} bytes)"


def count_steps(rows: int, columns: int) -> tuple[int, int]:
    """Return the numbers of slabs of a matrix and of steps of a slab."""
    return -(-rows // SLAB_ROWS), -(-columns // STEP_COLUMNS)


def arrange_slabs(matrix: Tensor) -> Iterator[Tensor]:
    """Yield the entries of some slabs, steps × tile × h × s × lane × j, in the order of their values."""
    rows, columns = matrix.shape
    steps = count_steps(rows, columns)[1]
    for first in range(0, rows, SLABS_AT_ONCE * SLAB_ROWS):
        some = matrix[first : first + SLABS_AT_ONCE * SLAB_ROWS]
        some = pad(some, (0, steps * STEP_COLUMNS - columns, 0, -len(some) % SLAB_ROWS))
        divided = some.view(-1, *ROW_SIZES, steps, *COLUMN_SIZES)  # slab g tile h step t s j
        ordered = divided.permute(0, 4, 2, 3, 6, 1, 5, 7)
        yield ordered.reshape(-1, TILES, 2, 4, LANES, 4)


def restore_order(entries: Tensor) -> Tensor:
    """Return the dense matrix, rows and columns padded, of slabs × steps × entries in the order of their values."""
    slabs, steps, _ = entries.shape
    divided = entries.view(slabs, steps, TILES, 2, 4, 8, 4, 4)  # slab step tile h s g t j
    return divided.permute(0, 5, 2, 3, 1, 6, 4, 7).reshape(slabs * SLAB_ROWS, steps * STEP_COLUMNS)


def pack_bits(kept: Tensor) -> Tensor:
    """Return the words, steps × lane × tile, of the entries steps × tile × h × s × lane × j that are kept."""
    bits = torch.arange(32, device=kept.device).view(4, 2, 4)  # s h j
    ordered = kept.permute(0, 4, 1, 3, 2, 5)  # step lane tile s h j
    words = (ordered << bits).flatten(3).sum(3)
    return (words - (words >> 31 << 32)).int()


def unpack_bits(words: Tensor) -> Tensor:
    """Return which entries are kept, steps × tile × h × s × lane × j, of the words that `pack_bits` returns."""
    bits = torch.arange(32, device=words.device, dtype=torch.int32).view(4, 2, 4)
    kept = (words.view(-1, LANES, TILES, 1, 1, 1) >> bits & 1).bool()
    return kept.permute(0, 2, 4, 3, 1, 5)


def unpack_bitmap(values: Tensor, words: Tensor, starts: Tensor, rows: int, columns: int, most: int) -> Tensor:
    """Return the dense matrix, rows × columns, of the parts of a packed one."""
    slabs, steps = count_steps(rows, columns)
    kept = unpack_bits(words).reshape(slabs, steps, STEP_ENTRIES)
    place = (kept.flatten().cumsum(0) - 1).clamp_(0, max(0, len(values) - 1))
    dense = torch.where(kept.flatten(), values[place], 0) if len(values) else values.new_zeros(kept.numel())
    return restore_order(dense.view(kept.shape))[:rows, :columns].contiguous()


def validate_bitmap(values: Tensor, words: Tensor, starts: Tensor, rows: int, columns: int, most: int) -> None:
    """Raise PomonaError unless the tensors have the shapes and dtypes of a packed matrix of this size.

    Contents are not read: kernels limit what they read themselves, and `verify` checks a file.
    """
    if columns < 1 or rows < 0 or not 0 <= most <= STEP_ENTRIES:
        raise PomonaError(f"a matrix of {rows}×{columns} with {most} values of a step cannot be packed with bitmaps.")
    if values.dtype not in DTYPES or words.dtype != torch.int32 or starts.dtype != torch.int32:
        require_value_dtype(values.dtype)
        raise PomonaError(
            f"values packed with bitmaps are of {dtype_names(DTYPES)}, words and starts of int32; "
            f"got {values.dtype}, {words.dtype} and {starts.dtype}."
        )
    slabs, steps = count_steps(rows, columns)
    shapes = words.shape == (slabs, steps, LANES, TILES) and starts.shape == (slabs * steps + 1,)
    if not shapes or values.ndim != 1 or len(values) % ALIGNMENT:
        raise PomonaError(
            f"the parts of a matrix of {rows}×{columns} packed with bitmaps do not fit together: they have the shapes "
            f"{', '.join(str(tuple(part.shape)) for part in (values, words, starts))}."
        )
    parts = values, words, starts
    if not all(part.is_contiguous() and part.device == values.device for part in parts):
        raise PomonaError("the parts of a matrix packed with bitmaps must be contiguous and on one device.")
