"""The packed storage format of any sparse matrix for a GPU, which takes the fewest bytes: gaps in place of columns.

Survivors are the weights that pruning keeps. In place of its column, a survivor has the number of columns between it
and the one before it in its row, in 2, 4, 6 or 8 bits, whatever takes the fewest bytes for the whole matrix. A longer
gap is bridged by zeros that are stored as survivors. At 50 % zeros a float16 survivor takes 2.4 bytes, at 90 % 2.8,
where CSR takes 6 (MACKO of Macko and Boža, 2025, has gaps of 4 bits).

The rows are sorted by their number of stored values, and 16 of them are a *slice*. A *chunk* is 32 values of each row
of a slice, 16 for each of the 32 lanes of a GPU's warp, and a *part* of a slice is at most PART_CHUNKS chunks: lane i
has the first half of the values that row i has in a part, lane 16 + i the second half. A lane needs the column at which
it starts, in 16 bits, and so finds all its columns by itself (`cuda/gap_gather.cu`).
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
    to_words,
)

SLICE_ROWS, LANES = 16, 32
CHUNK = 16  # values of a lane in a chunk
LOAD_VALUES = 8  # values of a lane that lie side by side
ROW_CHUNK = CHUNK * LANES // SLICE_ROWS  # values of a row in a chunk
PART_CHUNKS = 2  # chunks of a part, which is what a warp loads at a time
GAP_BITS = (2, 4, 6, 8)
MAX_COLUMNS = 1 << 16  # a start takes 16 bits
INTEGERS = (torch.int32, torch.int16, torch.int32, torch.int32)  # of gaps, firsts, starts and lanes
NO_ROW = -1  # the row of a lane that is padding
PACKED_AT_ONCE = 1 << 22  # entries of a matrix that are packed at a time, which bounds the memory for their places


@dataclass(frozen=True, eq=False)
class GapTensor(PackedTensor):
    """A packed matrix, or a packed convolution weight as out × (in · kh · kw), with survivors anywhere."""

    format_name = "gaps"
    part_names = ("values", "gaps", "firsts", "starts", "lanes")

    values: Tensor  # chunks × 2 × 32 × 8
    gaps: Tensor  # chunks × words × 32, int32: the bits of a lane's 16 gaps, the lowest first
    firsts: Tensor  # parts × 32, int16: the column at which a lane starts; see `count_parts`
    starts: Tensor  # slices + 1, int32: the first chunk of each slice, and the number of chunks
    lanes: Tensor  # slices × 16, int32: the rows of a slice
    shape: torch.Size

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", torch.Size(self.shape))
        validate_gaps(self.values, self.gaps, self.firsts, self.starts, self.lanes, *self.matrix)

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
        return self.gaps.shape[1] * 32 // CHUNK

    @classmethod
    def from_parts(cls, parts: Sequence[Tensor], metadata: Mapping[str, Any]) -> GapTensor:
        values, gaps, firsts, starts, lanes = parts
        return cls(values, gaps, firsts, starts, lanes, torch.Size(metadata["shape"]))

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
        counts = torch.cat([torch.stack([some.count_by_row(w) for w in widths]) for some in find_survivors(matrix)], dim=1)
        sizes = [int(stored) * (8 * weight.element_size() + w) for stored, w in zip(counts.sum(1), widths, strict=True)]
        best = sizes.index(min(sizes))
        return cls(*pack_rows(matrix, counts[best], widths[best]), weight.shape)

    @staticmethod
    def unpack(values: Tensor, gaps: Tensor, firsts: Tensor, starts: Tensor, lanes: Tensor, rows: int, columns: int,
               ) -> Tensor:  # fmt: skip
        return unpack_gaps(values, gaps, firsts, starts, lanes, rows, columns)

    def verify(self) -> GapTensor:
        rows, columns = self.matrix
        starts = self.starts.long()
        in_order = int(starts[0]) == 0 and int(starts[-1]) == len(self.values) and bool((starts.diff() >= 0).all())
        require(in_order, "the starts of the slices do not lead from 0 to the number of chunks.")
        expected = torch.full((self.lanes.numel(),), NO_ROW, dtype=torch.int32, device=self.device)
        expected[:rows] = torch.arange(rows, dtype=torch.int32)
        each_once = torch.equal(self.lanes.flatten().sort().values, expected.sort().values)
        require(each_once, f"the lanes are not the {rows} rows of the matrix.")
        row, column = locate_values(*self.parts[1:])
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


def pack_rows(matrix: Tensor, counts: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the parts of a packed matrix whose rows have so many stored values, with gaps of so many bits."""
    (rows, columns), device = matrix.shape, matrix.device
    slices = -(-rows // SLICE_ROWS)
    order = counts.argsort(descending=True, stable=True)
    lanes = pad(order.int(), (0, slices * SLICE_ROWS - rows), value=NO_ROW).view(-1, SLICE_ROWS)
    lengths = -(-counts[order[::SLICE_ROWS]] // ROW_CHUNK)
    starts = pad(lengths.cumsum(0), (1, 0))
    chunks = int(starts[-1])
    require(chunks < 1 << 31, f"a matrix of {rows}×{columns} has too many values to be packed with gaps.")
    place = torch.empty_like(order)
    place[order] = torch.arange(rows, device=device)
    values = matrix.new_zeros(chunks, CHUNK // LOAD_VALUES, LANES, LOAD_VALUES)
    codes = torch.full((chunks, CHUNK, LANES), (1 << bits) - 1, dtype=torch.uint8, device=device)
    firsts = torch.zeros(count_parts(chunks, slices), LANES, dtype=torch.int16, device=device)
    for survivors in find_survivors(matrix):
        own = slice(survivors.first_row, survivors.first_row + survivors.rows)
        layout = RowLayout(place[own], starts, lengths)
        entries = survivors.entries(bits)
        last = entries.cumsum(0) - 1  # the stored value of each, counted over these rows
        row_start = counts[own].cumsum(0) - counts[own]
        chunk, lane, slot = layout.locate(survivors.row, last - row_start[survivors.row])
        values[chunk, slot // LOAD_VALUES, lane, slot % LOAD_VALUES] = survivors.value
        rest = survivors.gap & ((1 << bits) - 1)
        codes[chunk, slot, lane] = rest.to(torch.uint8)
        row, part, lane, entry = layout.list_lane_starts()
        entry = torch.minimum(entry, counts[own][row]) + row_start[row]
        found = torch.searchsorted(last, entry)  # the survivor at, or after the zeros at, the start of the lane
        inside = (found < len(last)) & (entry < row_start[row] + counts[own][row])
        found = found.clamp_(max=max(0, len(last) - 1))
        column = survivors.column - rest if len(last) else survivors.column
        start = column[found] - (last[found] - entry << bits) if len(last) else torch.zeros_like(entry)
        firsts[part, lane] = to_words(torch.where(inside, start, min(columns, MAX_COLUMNS - 1)))
    return values, pack_codes(codes, bits), firsts, starts.int(), lanes


class RowLayout(NamedTuple):
    """Where the stored values of some rows lie."""

    place: Tensor  # of each row in the order of the lanes
    starts: Tensor
    lengths: Tensor

    def locate(self, row: Tensor, entry: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return chunk, lane and slot of a row's stored value of this number."""
        place = self.place[row]
        owner = place // SLICE_ROWS
        part = entry // (PART_CHUNKS * ROW_CHUNK)
        run = CHUNK * (self.lengths[owner] - part * PART_CHUNKS).clamp(max=PART_CHUNKS)  # of a lane in this part
        inside = entry - part * (PART_CHUNKS * ROW_CHUNK)
        half, step = inside // run, inside % run
        chunk = self.starts[owner] + part * PART_CHUNKS + step // CHUNK
        return chunk, half * SLICE_ROWS + place % SLICE_ROWS, step % CHUNK

    def list_lane_starts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return row, part, lane and the number of the first stored value, for each lane of each part of the rows."""
        owner = self.place // SLICE_ROWS
        parts = -(-self.lengths[owner] // PART_CHUNKS)
        row = torch.arange(len(self.place), device=self.place.device).repeat_interleave(2 * parts)
        before = (2 * parts).cumsum(0) - 2 * parts
        number = torch.arange(len(row), device=row.device) - before[row]
        part, half, owner = number // 2, number % 2, owner[row]
        run = CHUNK * (self.lengths[owner] - part * PART_CHUNKS).clamp(max=PART_CHUNKS)
        entry = part * (PART_CHUNKS * ROW_CHUNK) + half * run
        lane = half * SLICE_ROWS + self.place[row] % SLICE_ROWS
        return row, self.starts[owner] // PART_CHUNKS + owner + part, lane, entry


def count_parts(chunks: int, slices: int) -> int:
    """Return the number of parts for which there is room.

    Part p of slice s has the number starts[s] // PART_CHUNKS + s + p, so that no table of parts is needed.
    """
    return chunks // PART_CHUNKS + slices


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
    """Return the codes, chunks × 16 × 32, that `pack_codes` stored."""
    bits = gaps.shape[1] * 32 // CHUNK
    words = pad(gaps.long() & 0xFFFFFFFF, (0, 0, 0, 1))
    slots = (divmod(slot * bits, 32) for slot in range(CHUNK))
    mask = (1 << bits) - 1
    return torch.stack([(words[:, w] >> s | words[:, w + 1] << (32 - s)) & mask for w, s in slots], dim=1)


def locate_values(gaps: Tensor, firsts: Tensor, starts: Tensor, lanes: Tensor) -> tuple[Tensor, Tensor]:
    """Return row and column of every stored value, in the shape of the values. A row may be NO_ROW."""
    chunks, slices, starts = len(gaps), len(lanes), starts.long()
    number = torch.arange(chunks, device=gaps.device)
    owner = torch.searchsorted(starts, number, right=True).sub_(1).clamp_(0, max(0, slices - 1))
    offset = number - starts[owner]
    part = (starts[owner] // PART_CHUNKS + owner + offset // PART_CHUNKS).clamp_(0, max(0, len(firsts) - 1))
    steps = unpack_codes(gaps) + 1
    columns = from_words(firsts)[part].unsqueeze(1) + steps.cumsum(1) - 1
    total = steps.sum(1)
    for back in range(1, PART_CHUNKS):  # what earlier chunks of the part advance
        earlier = (number - back).clamp(min=0)
        columns += torch.where(offset % PART_CHUNKS >= back, 1, 0).view(-1, 1, 1) * total[earlier].unsqueeze(1)
    columns = columns.view(chunks, CHUNK // LOAD_VALUES, LOAD_VALUES, LANES).transpose(2, 3)
    rows = lanes.long()[owner].repeat(1, LANES // SLICE_ROWS).view(chunks, 1, LANES, 1)
    return rows.expand_as(columns), columns


def find_stored_values(values: Tensor) -> Tensor:
    """Return which values are no padding. They are compared as integers, so that −0.0 and NaN count."""
    return values.view(SAME_SIZE_INTEGER[values.dtype]) != 0


def unpack_gaps(
    values: Tensor, gaps: Tensor, firsts: Tensor, starts: Tensor, lanes: Tensor, rows: int, columns: int
) -> Tensor:
    """Return the dense matrix, rows × columns, of the parts of a packed one; padding is written past its end."""
    dense = values.new_zeros(rows * columns + 1)
    if values.numel():
        row, column = locate_values(gaps, firsts, starts, lanes)
        inside = find_stored_values(values) & (row >= 0) & (row < rows) & (column < columns)
        position = torch.where(inside, row * columns + column, rows * columns)
        dense.scatter_(0, position.flatten(), torch.where(inside, values, 0).flatten())
    return dense[:-1].view(rows, columns)


def validate_gaps(
    values: Tensor, gaps: Tensor, firsts: Tensor, starts: Tensor, lanes: Tensor, rows: int, columns: int
) -> None:
    """Raise PomonaError unless the tensors have the shapes and dtypes of a packed matrix of this size.

    Contents are not read: kernels limit what they read themselves, and `verify` checks a file.
    """
    if not 1 <= columns <= MAX_COLUMNS or rows < 0:
        raise PomonaError(f"a matrix of {rows}×{columns} cannot be packed with gaps.")
    if values.dtype not in DTYPES or (gaps.dtype, firsts.dtype, starts.dtype, lanes.dtype) != INTEGERS:
        raise PomonaError(
            f"values packed with gaps are of {dtype_names(DTYPES)}, gaps, starts and lanes of int32 and firsts of "
            f"int16; got {values.dtype}, {gaps.dtype}, {starts.dtype}, {lanes.dtype} and {firsts.dtype}."
        )
    slices, chunks = -(-rows // SLICE_ROWS), len(values)
    expected = (chunks, CHUNK // LOAD_VALUES, LANES, LOAD_VALUES), (count_parts(chunks, slices), LANES)
    shapes = values.shape, firsts.shape, starts.shape, lanes.shape
    words = [(chunks, bits * CHUNK // 32, LANES) for bits in GAP_BITS]
    if shapes != (*expected, (slices + 1,), (slices, SLICE_ROWS)) or gaps.shape not in words:
        raise PomonaError(
            f"the parts of a matrix of {rows}×{columns} packed with gaps do not fit together: they have the shapes "
            f"{', '.join(str(tuple(part.shape)) for part in (values, gaps, firsts, starts, lanes))}."
        )
    parts = (values, gaps, firsts, starts, lanes)
    if not all(part.is_contiguous() and part.device == values.device for part in parts):
        raise PomonaError("the parts of a matrix packed with gaps must be contiguous and on one device.")
