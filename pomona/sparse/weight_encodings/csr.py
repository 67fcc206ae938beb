"""Compressed sparse rows: torch's crow_indices, col_indices and values, with the smallest integers that hold them.

A weight is the matrix out × (in · kh · kw). The values of row r are values[crow[r]:crow[r + 1]], in columns
col[crow[r]:crow[r + 1]], which increase.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...errors import require
from ...masking import matrix_shape

INDEX_TYPES = (torch.uint8, torch.uint16, torch.int32, torch.int64)  # the smallest that holds all indices is used


def encode(weight: Tensor) -> dict[str, Tensor]:
    """Return row pointers, columns and values of a weight's nonzeros. A −0.0 becomes 0.0."""
    matrix = weight.reshape(matrix_shape(weight.shape))
    nonzero = matrix != 0
    crow = torch.nn.functional.pad(nonzero.sum(1).cumsum(0), (1, 0))
    return {
        "crow": to_smallest_integers(crow, int(crow[-1])),
        "col": to_smallest_integers(nonzero.nonzero()[:, 1], matrix.shape[1] - 1),
        "values": matrix[nonzero],
    }


def decode(parts: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
    """Return the dense weight; raise PomonaError for indices that are not those of such a matrix."""
    rows, columns = matrix_shape(shape)
    crow, col, values = parts["crow"].long(), parts["col"].long(), parts["values"]
    require(crow.shape == (rows + 1,) and col.shape == values.shape == (len(values),), "CSR parts have wrong sizes.")
    counts = crow.diff()
    in_order = int(crow[0]) == 0 and int(crow[-1]) == len(values) and bool((counts >= 0).all())
    require(in_order, "the row pointers of a CSR weight do not lead from 0 to the number of its values.")
    inside = bool(((col >= 0) & (col < columns)).all())
    require(inside, f"a column of a CSR weight is outside its {columns} columns.")
    positions = torch.repeat_interleave(torch.arange(rows), counts) * columns + col
    require(bool((positions.diff() > 0).all()), "the columns of a CSR weight do not increase along a row.")
    dense = values.new_zeros(rows * columns)
    dense[positions] = values
    return dense.view(shape)


def to_smallest_integers(indices: Tensor, largest: int) -> Tensor:
    """Return indices of at most `largest` in the smallest of the index types."""
    return indices.to(next(dtype for dtype in INDEX_TYPES if largest <= torch.iinfo(dtype).max))
