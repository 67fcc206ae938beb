"""The packed storage format of any sparse matrix for a GPU, which takes the fewest bytes: gaps in place of columns.

Survivors are the weights that pruning keeps. In place of its column, a survivor has the number of columns between it
and the one before it in its row, in 2, 4, 6 or 8 bits, whatever takes the fewest bytes for the whole matrix. A longer
gap is bridged by zeros that are stored as survivors. At 50 % zeros a float16 survivor takes 2.4 bytes, at 90 % 2.8,
where CSR takes 6 (MACKO of Macko and Boža, 2025, has gaps of 4 bits).

The rows are sorted by their number of stored values, and 32 of them are a *slice*: one for each lane of a GPU's warp. A
slice has whole *parts*, each of 32 values of every row, which a warp loads at a time. A row needs the column at which
it starts in a part, in 16 bits: a warp can then work on any part by itself (`cuda/gap_gather.cu`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    from_words,
    require_packable,
    require_value_dtype,
    to_words,
)

LANES = 32  # rows of a slice, one for each lane of a warp
CHUNK = 16  # values of a lane whose gaps fill whole words
LOAD_VALUES = 8  # values of a lane that lie side by side
PART_CHUNKS = 2  # chunks of a part, which is what a warp loads at a time
GAP_BITS = (2, 4, 6, 8)
MAX_COLUMNS = 1 << 16  # a start takes 16 bits
INTEGERS = (torch.int32, torch.int16, torch.int32, torch.int32, torch.int32)  # of all parts but the values
NO_ROW = -1  # the row of a lane that is padding
PACKED_AT_ONCE = 1 << 22  # entries of a matrix that are packed at a time, which bounds the memory for their places


@dataclass(frozen=True, eq=False)
class GapTensor(PackedTensor):
    """A packed matrix, or a packed convolution weight as out × (in · kh · kw), with survivors anywhere."""

    format_name = "gaps"
    part_names = ("values", "gaps", "firsts", "starts", "owners", "lanes")

    values: Tensor  # parts × chunks × 2 × 32 × 8
    gaps: Tensor  # parts × chunks × words × 32, int32: the bits of a lane's 16 gaps, the lowest first
    firsts: Tensor  # parts × 32, int16: the column at which a lane starts
    starts: Tensor  # slices + 1, int32: the first part of each slice, and the number of parts
    owners: Tensor  # parts, int32: the slice of each part
    lanes: Tensor  # slices × 32, int32: the rows of a slice
    shape: torch.Size

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", torch.Size(self.shape))
        validate_gaps(self.values, self.gaps, self.firsts, self.starts, self.owners, self.lanes, *self.matrix)

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        return self.matrix

    @property
    def metadata(self) -> dict[str, Any]:
        """The shape and the name of the format."""
        return {"shape": list(self.shape), "format": self.format_name}

    @property
    def gap_bits(self) -> int:
        """The bits of a gap."""
        return self.gaps.shape[2] * 32 // CHUNK

    @classmethod
    def from_parts(cls, parts: Sequence[Tensor], metadata: Mapping[str, Any]) -> GapTensor:
        values, gaps, firsts, starts, owners, lanes = parts
        return cls(values, gaps, firsts, starts, owners, lanes, torch.Size(metadata["shape"]))

    @classmethod
    @torch.no_grad()
    def from_dense(cls, weight: Tensor, bits: int | None = None) -> GapTensor:
        """Return a weight in packed form, with gaps of so many bits, by default those that take the fewest bytes.

        Raise PomonaError for a dtype or a shape that cannot be packed.
        """
        require_packable(weight)
        matrix = weight.reshape(matrix_shape(weight.shape))
        columns = matrix.shape[1]
        require(columns <= MAX_COLUMNS, f"at most {MAX_COLUMNS:,} columns can be packed with gaps, got {columns:,}.")
        require(bits is None or bits in GAP_BITS, f"gaps have 2, 4, 6 or 8 bits, got {bits}.")
        widths = GAP_BITS if bits is None else (bits,)
        counts = torch.cat(
            [torch.stack([some.count_by_row(w) for w in widths]) for some in find_survivors(matrix)], dim=1
        )
        sizes = [int(stored) * (8 * weight.element_size() + w) for stored, w in zip(counts.sum(1), widths, strict=True)]
        best = sizes.index(min(sizes))
        return cls(*pack_rows(matrix, counts[best], widths[best]), weight.shape)

    @staticmethod
    def unpack(values: Tensor, gaps: Tensor, firsts: Tensor, starts: Tensor, owners: Tensor, lanes: Tensor, rows: int,
               columns: int) -> Tensor:  # fmt: skip
        return unpack_gaps(values, gaps, firsts, starts, owners, lanes, rows, columns)

    def verify(self) -> GapTensor:
        rows, columns = self.matrix
        starts, parts = self.starts.long(), len(self.values)
        in_order = int(starts[0]) == 0 and int(starts[-1]) == parts and bool((starts.diff() > 0).all())
        require(in_order, "the starts of the slices do not lead from 0 to the number of parts.")
        owners = torch.arange(len(starts) - 1, device=self.device).repeat_interleave(starts.diff())
        require(torch.equal(owners, self.owners.long()), "the owners of the parts are not the slices that have them.")
        expected = torch.full((self.lanes.numel(),), NO_ROW, dtype=torch.int32, device=self.device)
        expected[:rows] = torch.arange(rows, dtype=torch.int32)
        each_once = torch.equal(self.lanes.flatten().sort().values, expected.sort().values)
        require(each_once, f"the lanes are not the {rows} rows of the matrix.")
        row, column = locate_values(self.gaps, self.firsts, self.owners, self.lanes)
        stored = find_stored_values(self.values)
        require(bool((row[stored] >= 0).all()), "a value is outside the matrix.")
        require(bool((column[stored] < columns).all()), f"a value is outside the {columns} columns of the matrix.")
        positions = (row[stored] * columns + column[stored]).sort().values
        require(bool((positions.diff() > 0).all()), "two values have the same place.")
        return self

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.shape))
        stored = f"{self.values.numel():,} values, {self.gap_bits} bits a gap"
        return f"GapTensor({shape}, {stored}, {self.dtype}, {self.nbytes:,} bytes)"


class Survivors(NamedTuple):
    """The nonzeros of some rows of a matrix, row by row."""

    first_row: int
    rows: int
    row: Tensor  # of each, counted from the first row
    column: Tensor
    gap: Tensor  # columns between it and the one before it in its row
    value: Tensor

    def entries(self, bits: int) -> Tensor:
        """Return the number of values that are stored for each: itself, and zeros that bridge its gap."""
        return 1 + (self.gap >> bits)

    def count_by_row(self, bits: int) -> Tensor:
        """Return the number of values that are stored for each row."""
        counts = self.gap.new_zeros(self.rows)
        return counts.index_add_(0, self.row, self.entries(bits))


def find_survivors(matrix: Tensor) -> Iterator[Survivors]:
    """Yield the nonzeros of a matrix, for some rows at a time."""
    at_once = max(1, PACKED_AT_ONCE // matrix.shape[1])
    for first in range(0, max(1, len(matrix)), at_once):
        some = matrix[first : first + at_once]
        row, column = some.nonzero().unbind(1)
        before = pad(torch.where(row[1:] == row[:-1], column[:-1], -1), (1, 0), value=-1)[: len(row)]
        yield Survivors(first, len(some), row, column, column - before - 1, some[row, column])


def pack_rows(matrix: Tensor, counts: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the parts of a packed matrix whose rows have so many stored values, with gaps of so many bits."""
    (rows, columns), device, part_values = matrix.shape, matrix.device, PART_CHUNKS * CHUNK
    slices = -(-rows // LANES)
    order = counts.argsort(descending=True, stable=True)
    lanes = pad(order.int(), (0, slices * LANES - rows), value=NO_ROW).view(-1, LANES)
    lengths = (-(-counts[order[::LANES]] // part_values)).clamp(min=1)  # a kernel writes the rows of a part
    starts = pad(lengths.cumsum(0), (1, 0))
    owners = torch.arange(slices, device=device).repeat_interleave(lengths)
    parts = len(owners)
    require(parts * PART_CHUNKS < 1 << 31, f"a matrix of {rows}×{columns} has too many values for gaps.")
    place = torch.empty_like(order)
    place[order] = torch.arange(rows, device=device)
    values = matrix.new_zeros(parts * PART_CHUNKS, CHUNK // LOAD_VALUES, LANES, LOAD_VALUES)
    codes = torch.full((parts * PART_CHUNKS, CHUNK, LANES), (1 << bits) - 1, dtype=torch.uint8, device=device)
    firsts = torch.zeros(parts, LANES, dtype=torch.int16, device=device)
    for some in find_survivors(matrix):
        own = slice(some.first_row, some.first_row + some.rows)
        part_start, lane = starts[place[own] // LANES], place[own] % LANES
        last = some.entries(bits).cumsum(0) - 1  # the stored value of each survivor, counted over these rows
        row_start = counts[own].cumsum(0) - counts[own]
        entry = part_start[some.row] * part_values + last - row_start[some.row]
        chunk, slot, rest = entry // CHUNK, entry % CHUNK, some.gap & ((1 << bits) - 1)
        values[chunk, slot // LOAD_VALUES, lane[some.row], slot % LOAD_VALUES] = some.value
        codes[chunk, slot, lane[some.row]] = rest.to(torch.uint8)
        # A row starts in a part at its first survivor there, less the columns of its gap and of zeros that bridge it.
        lengths_here = lengths[place[own] // LANES]
        row = torch.arange(some.rows, device=device).repeat_interleave(lengths_here)
        part = torch.arange(len(row), device=device) - (lengths_here.cumsum(0) - lengths_here)[row]
        inside = part * part_values < counts[own][row]
        first_value = row_start[row] + part * part_values
        found = torch.searchsorted(last, first_value)[inside]
        start = torch.full_like(part, min(columns, MAX_COLUMNS - 1))
        start[inside] = (some.column - rest)[found] - (last[found] - first_value[inside] << bits)
        firsts[part_start[row] + part, lane[row]] = to_words(start)
    values, gaps = values.view(parts, PART_CHUNKS, *values.shape[1:]), pack_codes(codes, bits)
    return values, gaps.view(parts, PART_CHUNKS, bits * CHUNK // 32, LANES), firsts, starts.int(), owners.int(), lanes


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Return codes, chunks × 16 × 32, of so many bits in words of 32 bits, chunks × words × 32, the lowest first."""
    words = codes.new_zeros(len(codes), bits * CHUNK // 32 + 1, LANES, dtype=torch.int64)
    for slot in range(CHUNK):
        word, shift = divmod(slot * bits, 32)
        shifted = codes[:, slot].long() << shift
        words[:, word] |= shifted & 0xFFFFFFFF
        words[:, word + 1] |= shifted >> 32
    words = words[:, :-1]
    return (words - (words >> 31 << 32)).to(torch.int32).contiguous()


def unpack_codes(gaps: Tensor) -> Tensor:
    """Return the codes, … × 16 × 32, that `pack_codes` stored as … × words × 32."""
    bits = gaps.shape[-2] * 32 // CHUNK
    words = pad(gaps.long() & 0xFFFFFFFF, (0, 0, 0, 1))
    slots = (divmod(slot * bits, 32) for slot in range(CHUNK))
    mask = (1 << bits) - 1
    return torch.stack([(words[..., w, :] >> s | words[..., w + 1, :] << (32 - s)) & mask for w, s in slots], dim=-2)


def locate_values(gaps: Tensor, firsts: Tensor, owners: Tensor, lanes: Tensor) -> tuple[Tensor, Tensor]:
    """Return row and column of every stored value, in the shape of the values. A row may be NO_ROW."""
    parts, chunks, *_ = gaps.shape
    steps = unpack_codes(gaps).flatten(1, 2) + 1
    column = from_words(firsts).unsqueeze(1) + steps.cumsum(1) - 1
    column = column.view(parts, chunks, CHUNK // LOAD_VALUES, LOAD_VALUES, LANES).transpose(3, 4)
    row = lanes.long()[owners.long().clamp(0, max(0, len(lanes) - 1))].view(parts, 1, 1, LANES, 1)
    return row.expand_as(column), column


def find_stored_values(values: Tensor) -> Tensor:
    """Return which values are no padding. They are compared as integers, so that −0.0 and NaN count."""
    return values.view(SAME_SIZE_INTEGER[values.dtype]) != 0


def unpack_gaps(values: Tensor, gaps: Tensor, firsts: Tensor, starts: Tensor, owners: Tensor, lanes: Tensor, rows: int,
                columns: int) -> Tensor:  # fmt: skip
    """Return the dense matrix, rows × columns, of the parts of a packed one; padding is written past its end."""
    dense = values.new_zeros(rows * columns + 1)
    if values.numel():
        row, column = locate_values(gaps, firsts, owners, lanes)
        inside = find_stored_values(values) & (row >= 0) & (row < rows) & (column < columns)
        position = torch.where(inside, row * columns + column, rows * columns)
        dense.scatter_(0, position.flatten(), values.flatten())
    return dense[:-1].view(rows, columns)


def validate_gaps(values: Tensor, gaps: Tensor, firsts: Tensor, starts: Tensor, owners: Tensor, lanes: Tensor,
                  rows: int, columns: int) -> None:  # fmt: skip
    """Raise PomonaError unless the tensors have the shapes and dtypes of a packed matrix of this size.

    Contents are not read: kernels limit what they read themselves, and `verify` checks a file.
    """
    if not 1 <= columns <= MAX_COLUMNS or rows < 0:
        raise PomonaError(f"a matrix of {rows}×{columns} cannot be packed with gaps.")
    parts = (values, gaps, firsts, starts, owners, lanes)
    if values.dtype not in DTYPES or tuple(part.dtype for part in parts[1:]) != INTEGERS:
        require_value_dtype(values.dtype)
        raise PomonaError(
            f"values packed with gaps are of {dtype_names(DTYPES)}, firsts of int16 and all else of int32; "
            f"got {', '.join(str(part.dtype) for part in parts)}."
        )
    slices, count = -(-rows // LANES), len(values)
    expected = (count, PART_CHUNKS, CHUNK // LOAD_VALUES, LANES, LOAD_VALUES), (count, LANES), (slices + 1,), (count,)
    words = [(count, PART_CHUNKS, bits * CHUNK // 32, LANES) for bits in GAP_BITS]
    shapes = values.shape, firsts.shape, starts.shape, owners.shape, lanes.shape
    if shapes != (*expected, (slices, LANES)) or gaps.shape not in words:
        raise PomonaError(
            f"the parts of a matrix of {rows}×{columns} packed with gaps do not fit together: they have the shapes "
            f"{', '.join(str(tuple(part.shape)) for part in parts)}."
        )
    if not all(part.is_contiguous() and part.device == values.device for part in parts):
        raise PomonaError("the parts of a matrix packed with gaps must be contiguous and on one device.")
