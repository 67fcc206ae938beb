"""The packed storage format of any sparse matrix: slices of 16 rows that have about the same number of survivors.

Survivors are the weights that pruning keeps. The rows are sorted by their number of survivors, and 16 of them are a
slice: the survivors of a slice are stored side by side, `values[step][lane]`, with their columns, and shorter rows are
padded with zeros. After sorting that is little padding even where the rows differ much (this is SELL-16-σ of Kreutzer
et al., 2014, with σ = all rows). The same arrays serve one vector and many: the lanes of a SIMD register are the rows
of a slice in the first case and vectors in the second (`cpu/unstructured.c`). The survivors of a row may be stored in
any order. A matrix that is packed on a CPU has one in which most steps read neighbouring columns (`cpu/slice_order.h`).

A column is stored in 16 bits. A matrix with more than 65,536 columns is divided into bands of so many, each with slices
of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import PomonaError, require
from ..masking import matrix_shape
from .cpu.backend import order_unstructured
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

SLICE_ROWS = 16  # rows of a slice, stored side by side
BAND_COLUMNS = 1 << 16  # columns that an index of 16 bits can address
INTEGERS = (torch.int16, torch.int64, torch.int32)  # of indices, starts and lanes
PACKED_AT_ONCE = 1 << 22  # entries of a matrix that are packed at a time, which bounds the memory for their places
NO_ROW = -1  # the row of a lane that is padding


@dataclass(frozen=True, eq=False)
class UnstructuredTensor(PackedTensor):
    """A packed matrix, or a packed convolution weight as out × (in · kh · kw), with survivors anywhere."""

    format_name = "unstructured"
    part_names = ("values", "indices", "starts", "lanes")

    values: Tensor  # steps × 16
    indices: Tensor  # steps × 16, int16: the column of each value in its band
    starts: Tensor  # bands · slices + 1, int64: the first step of each slice, and the number of steps
    lanes: Tensor  # bands · slices × 16, int32: the row of each lane of a slice
    shape: torch.Size

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", torch.Size(self.shape))
        validate_unstructured(self.values, self.indices, self.starts, self.lanes, *self.matrix)

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        return self.matrix

    @property
    def metadata(self) -> dict[str, Any]:
        """The shape and the name of the format."""
        return {"shape": list(self.shape), "format": self.format_name}

    @classmethod
    def from_parts(cls, parts: Sequence[Tensor], metadata: Mapping[str, Any]) -> UnstructuredTensor:
        values, indices, starts, lanes = parts
        return cls(values, indices, starts, lanes, torch.Size(metadata["shape"]))

    @classmethod
    @torch.no_grad()
    def from_dense(cls, weight: Tensor) -> UnstructuredTensor:
        """Return a weight in packed form; raise PomonaError for a dtype or a shape that cannot be packed."""
        require_packable(weight)
        matrix = weight.reshape(matrix_shape(weight.shape))
        bands = [pack_band(band) for band in matrix.split(BAND_COLUMNS, dim=1)]
        lengths = torch.cat([band[2] for band in bands])
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        values, indices, lanes = (torch.cat([band[part] for band in bands]) for part in (0, 1, 3))
        if weight.ndim == 2 and weight.device.type == "cpu":  # convolutions read one row after another
            order_unstructured(values, indices, starts, lanes)
        return cls(values, indices, starts, lanes, weight.shape)

    @staticmethod
    def unpack(values: Tensor, indices: Tensor, starts: Tensor, lanes: Tensor, rows: int, columns: int) -> Tensor:
        return unpack_unstructured(values, indices, starts, lanes, rows, columns)

    def verify(self) -> UnstructuredTensor:
        rows, columns = self.matrix
        starts, slices = self.starts, -(-rows // SLICE_ROWS)
        in_order = int(starts[0]) == 0 and int(starts[-1]) == len(self.values) and bool((starts.diff() >= 0).all())
        require(in_order, "the starts of the slices do not lead from 0 to the number of steps.")
        expected = torch.full((slices * SLICE_ROWS,), NO_ROW, dtype=torch.int32, device=self.device)
        expected[:rows] = torch.arange(rows, dtype=torch.int32)
        padding_first = expected.sort().values
        bands = self.lanes.view(-(-columns // BAND_COLUMNS), slices * SLICE_ROWS)
        each_once = (bands.sort(1).values == padding_first).all()
        require(bool(each_once), f"the lanes of a band are not the {rows} rows of the matrix.")
        row, column = locate_values(self.indices, starts, self.lanes, slices)
        require(bool((column < columns).all()), f"an index is outside the {columns} columns of the matrix.")
        stored = find_stored_values(self.values)
        require(bool((row[stored] >= 0).all()), "a value is outside the matrix.")
        positions = (row[stored] * columns + column[stored]).sort().values
        require(bool((positions.diff() > 0).all()), "two values have the same place.")
        return self

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.shape))
        return f"UnstructuredTensor({shape}, {self.values.numel():,} values, {self.dtype}, {self.nbytes:,} bytes)"


def pack_band(band: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return values, indices, the lengths of the slices and the rows of the lanes, of at most 65,536 columns."""
    rows, nonzero = band.shape[0], band != 0
    slices, counts = -(-rows // SLICE_ROWS), nonzero.sum(1)
    order = counts.argsort(descending=True, stable=True)
    lanes = torch.nn.functional.pad(order.int(), (0, slices * SLICE_ROWS - rows), value=NO_ROW).view(-1, SLICE_ROWS)
    lengths = counts[order[::SLICE_ROWS]]
    starts = lengths.cumsum(0) - lengths
    place = torch.empty_like(order)
    place[order] = torch.arange(rows, device=band.device)
    values = band.new_zeros(int(lengths.sum()), SLICE_ROWS)
    indices = torch.zeros(values.shape, dtype=torch.int16, device=band.device)
    at_once = max(1, PACKED_AT_ONCE // band.shape[1])
    for first in range(0, rows, at_once):
        row, column = nonzero[first : first + at_once].nonzero().unbind(1)
        before = counts[first : first + at_once].cumsum(0) - counts[first : first + at_once]
        rank, row = torch.arange(len(row), device=band.device) - before[row], row + first
        step, lane = starts[place[row] // SLICE_ROWS] + rank, place[row] % SLICE_ROWS
        values[step, lane] = band[row, column]
        indices[step, lane] = to_words(column)
    return values, indices, lengths, lanes


def locate_values(indices: Tensor, starts: Tensor, lanes: Tensor, slices: int) -> tuple[Tensor, Tensor]:
    """Return row and column of every stored value, in the shape of the indices. A row may be NO_ROW."""
    steps = torch.arange(indices.shape[0], device=indices.device)
    slice_of_step = torch.searchsorted(starts, steps, right=True).sub_(1).clamp_(0, len(lanes) - 1)
    band = (slice_of_step // slices).unsqueeze(1)
    return lanes.long()[slice_of_step], from_words(indices) + band * BAND_COLUMNS


def find_stored_values(values: Tensor) -> Tensor:
    """Return which values are no padding. They are compared as integers, so that −0.0 and NaN count."""
    return values.view(SAME_SIZE_INTEGER[values.dtype]) != 0


def unpack_unstructured(
    values: Tensor, indices: Tensor, starts: Tensor, lanes: Tensor, rows: int, columns: int
) -> Tensor:
    """Return the dense matrix, rows × columns, of the parts of a packed one; padding is written past its end."""
    dense = values.new_zeros(rows * columns + 1)
    if values.numel():
        row, column = locate_values(indices, starts, lanes, -(-rows // SLICE_ROWS))
        inside = find_stored_values(values) & (row >= 0) & (row < rows) & (column < columns)
        position = torch.where(inside, row * columns + column, rows * columns)
        dense.scatter_(0, position.flatten(), values.flatten())
    return dense[:-1].view(rows, columns)


def validate_unstructured(
    values: Tensor, indices: Tensor, starts: Tensor, lanes: Tensor, rows: int, columns: int
) -> None:
    """Raise PomonaError unless the tensors have the shapes and dtypes of a packed matrix of this size.

    Contents are not read: kernels limit what they read themselves, and `verify` checks a file.
    """
    if columns < 1 or rows < 0:
        raise PomonaError(f"a matrix of {rows}×{columns} cannot be packed.")
    slices = -(-rows // SLICE_ROWS) * -(-columns // BAND_COLUMNS)
    if values.dtype not in DTYPES or (indices.dtype, starts.dtype, lanes.dtype) != INTEGERS:
        require_value_dtype(values.dtype)
        raise PomonaError(
            f"unstructured values are of {dtype_names(DTYPES)}, indices of int16, starts of int64 and lanes of int32; "
            f"got {values.dtype}, {indices.dtype}, {starts.dtype} and {lanes.dtype}."
        )
    shapes = values.shape[1:], indices.shape, starts.shape, lanes.shape
    if values.ndim != 2 or shapes != ((SLICE_ROWS,), values.shape, (slices + 1,), (slices, SLICE_ROWS)):
        raise PomonaError(
            f"an unstructured matrix of {rows}×{columns} has values and indices of one shape, steps × {SLICE_ROWS}, "
            f"{slices + 1} starts and {slices} slices of lanes, got {tuple(values.shape)}, {tuple(indices.shape)}, "
            f"{tuple(starts.shape)} and {tuple(lanes.shape)}."
        )
    parts = (values, indices, starts, lanes)
    if not all(part.is_contiguous() and part.device == values.device for part in parts):
        raise PomonaError("the parts of an unstructured matrix must be contiguous and on one device.")
