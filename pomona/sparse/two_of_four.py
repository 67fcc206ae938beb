"""The packed storage format of a 2:4 matrix: two values of every four columns, and the place of each in two bits.

Rows are padded with zeros to whole blocks of 16 columns, which are four groups, and the matrix to whole groups of 32
rows. The values of 32 rows are stored side by side, `values[group][block][survivor][row]`, as those of a balanced
matrix are, and the eight places of a block take 16 bits: the same bits as in `weight_encodings.two_of_four`. The CPU's
kernel for balanced matrices multiplies it (`cpu/balanced.h`); a GPU multiplies a copy in the form of PyTorch's
semi-structured kernels (`cuda/semi_structured.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import PomonaError, require
from ..masking import matrix_shape
from .format import LANES
from .packed_tensor import (
    DTYPES,
    PackedTensor,
    dtype_names,
    from_words,
    require_packable,
    require_value_dtype,
    to_words,
)
from .weight_encodings.two_of_four import GROUP, KEPT, decode, encode

BLOCK = 16  # columns whose places are one word
BLOCK_GROUPS = BLOCK // GROUP
STORED = BLOCK_GROUPS * KEPT  # values of a block
PLACE_BITS = 2


@dataclass(frozen=True, eq=False)
class TwoOfFourTensor(PackedTensor):
    """A packed matrix, or a packed convolution weight as out × (in · kh · kw), with two of every four weights kept."""

    format_name = "2:4"
    part_names = ("values", "places")

    values: Tensor  # groups of rows × blocks × 8 × 32
    places: Tensor  # groups of rows × blocks × 32, int16: two bits for each value, the first in the lowest
    shape: torch.Size

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", torch.Size(self.shape))
        validate_two_of_four(self.values, self.places, *self.matrix)

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        return self.matrix

    @property
    def metadata(self) -> dict[str, Any]:
        """The shape and the name of the format."""
        return {"shape": list(self.shape), "format": self.format_name}

    @classmethod
    def from_parts(cls, parts: Sequence[Tensor], metadata: Mapping[str, Any]) -> TwoOfFourTensor:
        values, places = parts
        return cls(values, places, torch.Size(metadata["shape"]))

    @classmethod
    @torch.no_grad()
    def from_dense(cls, weight: Tensor) -> TwoOfFourTensor:
        """Return a weight in packed form.

        Raise PomonaError for a dtype or a shape that cannot be packed, and for three nonzeros of four weights.
        """
        require_packable(weight)
        rows, columns = matrix_shape(weight.shape)
        padded = pad(weight.reshape(rows, columns), (0, -columns % BLOCK, 0, -rows % LANES))
        parts = encode(padded) if rows else {"values": padded.view(0, KEPT), "places": padded.byte().flatten()}
        if parts is None:
            raise PomonaError("a 2:4 weight has at most two nonzeros of every four along a row: use another format.")
        sizes = padded.shape[0] // LANES, LANES, padded.shape[1] // BLOCK
        values = parts["values"].view(*sizes, STORED).permute(0, 2, 3, 1).contiguous()
        low, high = parts["places"].view(*sizes, 2).permute(0, 2, 1, 3).int().unbind(-1)
        return cls(values, to_words(low | high << 8), weight.shape)

    @staticmethod
    def unpack(values: Tensor, places: Tensor, rows: int, columns: int) -> Tensor:
        return unpack_two_of_four(values, places, rows, columns)

    def verify(self) -> TwoOfFourTensor:
        rows, columns = self.matrix
        groups, blocks = self.values.shape[:2]
        words = from_words(self.places).transpose(1, 2).reshape(groups * LANES, blocks)
        places = torch.stack((words & 0xFF, words >> 8), -1).to(torch.uint8).flatten()
        values = self.values.permute(0, 3, 1, 2).reshape(-1, KEPT)
        padded = decode({"values": values, "places": places}, torch.Size((groups * LANES, blocks * BLOCK)))
        inside = not bool((padded[rows:] != 0).any()) and not bool((padded[:, columns:] != 0).any())
        require(inside, f"a value is outside the matrix of {rows}×{columns}.")
        return self

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.shape))
        return f"TwoOfFourTensor({shape}, {self.dtype}, {self.nbytes:,} bytes)"


def is_two_of_four(weight: Tensor) -> bool:
    """Return whether at most two of every four weights along a row are nonzero."""
    rows, columns = matrix_shape(weight.shape)
    if rows == 0:
        return True
    kept = pad(weight.reshape(rows, columns) != 0, (0, -columns % GROUP)).view(rows, -1, GROUP)
    return int(kept.sum(2).max()) <= KEPT


def unpack_two_of_four(values: Tensor, places: Tensor, rows: int, columns: int) -> Tensor:
    """Return the dense matrix, rows × columns, of packed values and places."""
    groups, blocks = values.shape[:2]
    shifts = torch.arange(0, PLACE_BITS * STORED, PLACE_BITS, device=places.device).view(-1, 1)
    place = (from_words(places).unsqueeze(2) >> shifts & GROUP - 1).view(groups, blocks, BLOCK_GROUPS, KEPT, LANES)
    dense = values.new_zeros(groups, blocks, BLOCK_GROUPS, GROUP, LANES)
    dense = dense.scatter_(3, place, values.view(place.shape)).view(groups, blocks, BLOCK, LANES)
    return dense.permute(0, 3, 1, 2).reshape(groups * LANES, blocks * BLOCK)[:rows, :columns]


def validate_two_of_four(values: Tensor, places: Tensor, rows: int, columns: int) -> None:
    """Raise PomonaError unless the tensors have the shapes and dtypes of a packed matrix of this size.

    Contents are not read: kernels limit what they read themselves, and `verify` checks a file.
    """
    if columns < 1 or rows < 0:
        raise PomonaError(f"a matrix of {rows}×{columns} cannot be packed as 2:4.")
    if values.dtype not in DTYPES or places.dtype != torch.int16:
        require_value_dtype(values.dtype)
        raise PomonaError(
            f"2:4 values are of {dtype_names(DTYPES)} and places of int16, got {values.dtype} and {places.dtype}."
        )
    groups, blocks = -(-rows // LANES), -(-columns // BLOCK)
    shapes = (groups, blocks, STORED, LANES), (groups, blocks, LANES)
    if (values.shape, places.shape) != shapes:
        raise PomonaError(
            f"a 2:4 matrix of {rows}×{columns} has values {shapes[0]} and places {shapes[1]}, "
            f"got {tuple(values.shape)} and {tuple(places.shape)}."
        )
    if not (values.is_contiguous() and places.is_contiguous() and values.device == places.device):
        raise PomonaError("the values and places of a 2:4 matrix must be contiguous and on one device.")
