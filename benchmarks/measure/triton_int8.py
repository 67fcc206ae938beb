"""Products with a dense matrix of int8 codes in Triton: a peer for a few vectors."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MIN_TILE = 16  # vectors that the tensor cores multiply at least


def multiply_int8(x: Tensor, codes: Tensor, scales: Tensor, rows_each: int, columns_each: int, warps: int) -> Tensor:
    """Return x Wᵀ for codes of int8 with a scale for each row."""
    (n, columns), rows = x.shape, len(codes)
    y = x.new_empty(n, rows)
    tile = 1 if n == 1 else max(MIN_TILE, triton.next_power_of_2(n))
    grid = (triton.cdiv(rows, rows_each),)
    options = {
        "WIDTH": columns,
        "ROWS": rows_each,
        "COLUMNS": columns_each,
        "TILE": tile,
        "num_warps": warps,
        "num_stages": 4,
    }
    _multiply_rows[grid](x, codes, scales, y, n, rows, x.stride(0), **options)
    return y


@triton.jit
def _multiply_rows(
    x, codes, scales, y, n, rows, pitch,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows of the matrix by all vectors, TILE at most."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_exists = row < rows
    base = row.to(tl.int64) * WIDTH
    inside = tl.arange(0, COLUMNS)
    if TILE == 1:
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, WIDTH, COLUMNS):
            column = first + inside
            valid = column < WIDTH
            weight = tl.load(codes + base[:, None] + column[None, :], row_exists[:, None] & valid[None, :], 0)
            vector = tl.load(x + column, valid, 0).to(tl.float32)
            sums += weight.to(tl.float32) * vector[None, :]
        total = tl.sum(sums, 1) * tl.load(scales + row, row_exists, 0)
        tl.store(y + row, total.to(y.dtype.element_ty), row_exists)
    else:
        vectors = tl.arange(0, TILE)
        products = tl.zeros([ROWS, TILE], tl.float32)
        for first in range(0, WIDTH, COLUMNS):
            column = first + inside
            valid = column < WIDTH
            weight = tl.load(codes + base[:, None] + column[None, :], row_exists[:, None] & valid[None, :], 0)
            given = tl.load(x + vectors[None, :] * pitch + column[:, None], (vectors < n)[None, :] & valid[:, None], 0)
            products += tl.dot(weight.to(given.dtype), given)
        scaled = products * tl.load(scales + row, row_exists, 0)[:, None]
        tl.store(
            y + vectors[None, :] * rows + row[:, None],
            scaled.to(y.dtype.element_ty),
            (vectors < n)[None, :] & row_exists[:, None],
        )
