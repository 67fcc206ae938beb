"""The packed form of a balanced matrix: the survivors of each block, and where in it they lie.

Survivors of 32 rows are stored side by side, `values[group][block][slot][row]`, so that the lanes of a
SIMD register or of a warp are rows: all read their values with one load, and all want their inputs
from one and the same block of x, small enough for a register permutation. Indices are words of 16 bits
with as many as fit: three of 5 bits up to blocks of 32, two of 8 up to 256, else one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import PomonaError, require
from ..masking import matrix_shape

LANES = 32  # rows side by side
WIDEST = 1 << 16  # a block that an index of 16 bits can address
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def index_bits(block: int) -> int:
    """How many bits an index takes."""
    return 5 if block <= 32 else 8 if block <= 256 else 16


@dataclass(frozen=True, eq=False)
class BalancedTensor:
    """A matrix, or a convolution's weight as out × (in · kh · kw), with the same count kept in every block.

    Blocks that hold fewer survivors are filled up with zeros, and so are columns and rows that are missing
    from the last block and the last 32 rows.
    """

    values: Tensor  # groups of rows × blocks × kept × 32
    indices: Tensor  # groups of rows × blocks × words × 32, int16
    shape: torch.Size
    block: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", torch.Size(self.shape))
        check(self.values, self.indices, *self.matrix, self.block)

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns."""
        return matrix_shape(self.shape)

    @property
    def kept(self) -> int:
        """How many of a block are stored."""
        return self.values.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of values and indices, all filling included."""
        return self.values.nbytes + self.indices.nbytes

    @classmethod
    @torch.no_grad()
    def from_dense(cls, weight: Tensor, block: int) -> BalancedTensor:
        """Pack a weight. As many are stored of every block as the fullest one has."""
        require(weight.dtype in DTYPES, f"only {names(DTYPES)} can be packed, got {weight.dtype}: convert it first.")
        require(
            weight.ndim >= 2 and weight.shape[1:].numel() > 0, f"a matrix is packed, got shape {tuple(weight.shape)}."
        )
        require(1 <= block <= WIDEST, f"a block is 1 to {WIDEST} columns wide, got {block}.")
        rows, columns = matrix_shape(weight.shape)
        padded = torch.nn.functional.pad(weight.reshape(rows, columns), (0, -columns % block, 0, -rows % LANES))
        blocks = padded.view(-1, LANES, padded.shape[1] // block, block)
        on = blocks != 0
        counts = on.sum(-1, keepdim=True)
        kept = max(1, int(counts.max())) if rows else 1
        # Survivors take the first slots in their order, zeros those that are left.
        slots = torch.where(on, on.cumsum(-1), counts + (~on).cumsum(-1)) - 1
        order = torch.empty_like(slots).scatter_(-1, slots, torch.arange(block, device=weight.device).expand_as(slots))
        index = order[..., :kept]
        values = blocks.gather(-1, index).permute(0, 2, 3, 1).contiguous()
        return cls(values, pack(index.permute(0, 2, 3, 1), block), weight.shape, block)

    def index(self) -> Tensor:
        """Where in its block each value lies: groups × blocks × kept × 32."""
        return unpack(self.indices, self.kept, self.block)

    def dense(self) -> Tensor:
        """The weight again, exactly; only a −0.0 that was left out has become 0.0."""
        return dense(self.values, self.indices, *self.matrix, self.block).view(self.shape)

    def to(self, *where: Any, **options: Any) -> BalancedTensor:
        """The same on another device, or with values of another kind."""
        values = self.values.to(*where, **options)
        return BalancedTensor(values, self.indices.to(values.device), self.shape, self.block)

    def linear(self, x: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
        """x Wᵀ + bias over the last dimension of x, as `torch.nn.functional.linear`."""
        rows, columns = self.matrix
        if x.ndim < 1 or x.shape[-1] != columns:
            raise PomonaError(
                f"the input has {tuple(x.shape)[-1:]} features where the packed weight has {columns} columns."
            )
        flat = x if x.ndim == 2 else x.reshape(-1, columns)
        y = ops.balanced(flat, self.values, self.indices, bias, rows, columns, self.block, relu)
        return y if x.ndim == 2 else y.view(*x.shape[:-1], rows)

    def verify(self) -> BalancedTensor:
        """Refuse contents that no weight is packed to: for what comes from a file."""
        rows, columns = self.matrix
        index = self.index()
        require(bool((index < self.block).all()), f"an index is outside its block of {self.block} columns.")
        twice = index.sort(2).values.diff(dim=2) == 0
        require(not twice.any(), "two values of a block have the same index.")
        first = torch.arange(index.shape[1], device=index.device).view(-1, 1, 1) * self.block
        row = torch.arange(index.shape[0] * LANES, device=index.device).view(-1, 1, 1, LANES)
        outside = (index + first >= columns) | (row >= rows)
        require(not (outside & (self.values.view(BITS[self.dtype]) != 0)).any(), "a value is outside the matrix.")
        return self

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.shape))
        return f"BalancedTensor({shape}, {self.kept} of {self.block}, {self.dtype}, {self.nbytes:,} bytes)"


def pack(index: Tensor, block: int) -> Tensor:
    """Words of 16 bits from the indices of each slot (…, slots, 32)."""
    bits = index_bits(block)
    per = 16 // bits
    filled = torch.nn.functional.pad(index, (0, 0, 0, -index.shape[-2] % per)).unflatten(-2, (-1, per))
    shifts = torch.arange(0, bits * per, bits, device=index.device).view(-1, 1)
    words = (filled << shifts).sum(-2)
    return (words - (words >> 15 << 16)).to(torch.int16).contiguous()  # the same 16 bits with a sign


def unpack(words: Tensor, kept: int, block: int) -> Tensor:
    """The inverse of `pack`."""
    bits = index_bits(block)
    shifts = torch.arange(0, 16 - bits + 1, bits, device=words.device).view(-1, 1)
    index = (words.long() & 0xFFFF).unsqueeze(-2) >> shifts & ((1 << bits) - 1)
    return index.flatten(-3, -2)[..., :kept, :]


def dense(values: Tensor, indices: Tensor, rows: int, columns: int, block: int) -> Tensor:
    """The matrix of a packed one."""
    groups, blocks, kept, _ = values.shape
    full = values.new_zeros(groups, blocks, block, LANES).scatter_(2, unpack(indices, kept, block), values)
    return full.permute(0, 3, 1, 2).reshape(groups * LANES, blocks * block)[:rows, :columns]


def check(values: Tensor, indices: Tensor, rows: int, columns: int, block: int) -> None:
    """Refuse tensors that do not belong to a matrix of this size."""
    check_sizes(values.shape, indices.shape, values.dtype, indices.dtype, rows, columns, block)
    check_places(values, indices)


def check_sizes(
    values: torch.Size,
    indices: torch.Size,
    dtype: torch.dtype,
    integers: torch.dtype,
    rows: int,
    columns: int,
    block: int,
) -> None:
    """The same for all that is known without the tensors themselves."""
    if not 1 <= block <= WIDEST or columns < 1:
        raise PomonaError(f"a matrix of {rows}×{columns} in blocks of {block} columns cannot be packed.")
    if len(values) != 4 or dtype not in DTYPES or integers != torch.int16:
        raise PomonaError(
            f"packed values are four-dimensional and of {names(DTYPES)}, indices of int16; "
            f"got {len(values)} dimensions of {dtype} and {integers}."
        )
    kept = values[2]
    groups, blocks, words = -(-rows // LANES), -(-columns // block), -(-kept // (16 // index_bits(block)))
    shapes = (groups, blocks, kept, LANES), (groups, blocks, words, LANES)
    if not 1 <= kept <= block or (values, indices) != shapes:
        raise PomonaError(
            f"a matrix of {rows}×{columns} in blocks of {block} has values {shapes[0]} and indices {shapes[1]}, "
            f"got {tuple(values)} and {tuple(indices)}."
        )


def check_places(values: Tensor, indices: Tensor) -> None:
    """Refuse tensors that a kernel cannot read."""
    if not (values.is_contiguous() and indices.is_contiguous() and values.device == indices.device):
        raise PomonaError("packed values and indices must be contiguous and on one device.")


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


from . import ops  # noqa: E402 - it needs what is above, and to look for it at every call takes long
