"""Clipping of per-example gradients onto a grid of integers, so that their sum and its noise are exact.

Sums and noise of floating-point numbers leak: the low bits of a sum depend on the data, and not every number can be
the rounded sum of a given number and noise (Mironov, CCS 2012; Haney et al., 2022). Here one unit of the grid is C /
2²¹. The clipped gradient of each example is rounded to integers, the integers are added, and discrete Gaussian noise
is added to them. What is released is a function of these integers.

The integer vector q of an example has a norm of at most 2²¹ units, whatever the rounding errors are. With the factor
s it is q = round(s g), so ‖q‖ ≤ s ‖g‖ (1 + 2⁻²⁴) + √d / 2. The norm of g is summed in float32 over at most 1024
squares, which in any order has a relative error below 2⁻¹⁴, and in float64 over these blocks. The factor s is chosen
such that the bound is 2²¹ with all these errors included. Two margins are included as well: one unit for squares that
underflow, and 2⁻¹⁰ of the norm for the gradients of *other* rows when a row is added.

Gradients that are outer products are not rounded one by one. Their sum is one of integers in steps of 2⁻²⁰ units,
and is rounded to units at its end, which may move each of these coordinates by a whole unit and not by a half. This
and the rounding of the factors (`product_sums`) are included: with d₁ coordinates that are rounded for each example
and d₂ that are rounded in the sum, the rounding adds √(d₁ / 4 + d₂) and the errors of the factors.

The assumption about other rows: in a micro-batch of a fixed shape, with deterministic kernels and without TF32
(`fixed_shapes`), the computed gradient of a row depends on the row and the weights, and on its place in the batch and
on the other rows so little that adding a row to a sample changes the sum of the other rows' integers by a norm of at
most 2⁻¹⁰ · 2²¹ units. It was measured as 0 on CPUs and on an H200. A model whose rows mix does not satisfy it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, islice
from types import ModuleType

import torch
from torch import Tensor

from ..errors import require
from ..native import private as native
from .outer_products import Gradients, OuterProducts, RowGradients
from .product_sums import UNITS, ProductShape, ProductSum

NORM_BLOCK = 1024  # squares that are summed in float32
NORM_ERROR = 2.0**-13  # relative: of the norm, of the factor and of their products, together
OTHER_ROWS = 2.0**-10  # of the clipping norm: what the other rows' gradients may change by when a row is added
MAX_ROWS = 512  # whose integers are added in 32 bits: 512 · 2²¹ is half of what they hold
MIN_CLIP, MAX_CLIP = 2.0**-20, 2.0**20  # so that no square of a number that matters underflows
SMOOTHING_VARIANCE = 9  # added to the noise; see `accounting`
MAGIC = 1.5 * 2**23  # added to |x| < 2²² it gives the float32 whose last bits are round(x)
MAGIC_BITS = 0x4B400000
HEADROOM_USE = 1 - 2.0**-20  # of the headroom, so that a rounded factor stays within it
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of which the Triton kernels read gradients


@dataclass(frozen=True)
class GradientGrid:
    """The grid on which clipped gradients of `size` coordinates are added."""

    clip: float  # C
    size: int  # d
    units: int = UNITS  # the norm of an example in these coordinates; less than 2²¹ in a layer that has a part of C
    products: tuple[ProductShape, ...] = ()  # of the parameters whose gradients are outer products

    def __post_init__(self) -> None:
        require(
            MIN_CLIP <= self.clip <= MAX_CLIP,
            f"clip must lie in {MIN_CLIP:.3g} … {MAX_CLIP:.3g} for exact sums, got {self.clip:g}: scale the loss.",
        )
        require(self.norm_limit > 0, f"a gradient of {self.size} coordinates is too long for the grid of private sums.")

    @property
    def norm_limit(self) -> float:
        """Return the largest s ‖g‖ of an example, in units, for which ‖q‖ and all margins are at most `units`."""
        rounded = math.sqrt(self.size + 3 * sum(shape.size for shape in self.products)) / 2
        factors = math.hypot(*(shape.error(self.units) for shape in self.products))
        return (self.units * (1 - OTHER_ROWS) - rounded - factors - 1) / (1 + NORM_ERROR)

    def with_products(self, shapes: Sequence[ProductShape | None]) -> GradientGrid:
        """Return the grid for parameters of which some have outer products, by the shape of each or None."""
        return replace(self, products=tuple(shape for shape in shapes if shape is not None))

    def units_of_parameters(self, count: int) -> list[int]:
        """Return the norm of an example in the layer of each parameter, in units."""
        return [self.units] * count

    def noise_variance(self, sigma: float) -> int:
        """Return the variance of the noise in units², for a noise multiplier σ."""
        return math.ceil((sigma * UNITS) ** 2) + SMOOTHING_VARIANCE

    def add_clipped(self, gradients: Sequence[RowGradients], total: Tensor, sums: Sequence[ProductSum] = ()) -> Tensor:
        """Add the clipped gradients of all rows, from parts of shape (rows, n), to the int64 `total` in units.

        Parts that are outer products are added to `sums` in place of it. An example whose norm is not finite counts as
        zero. The parts may be overwritten. Returns the squared norms.
        """
        chunks = zip(*(part.split(MAX_ROWS) for part in gradients), strict=True)
        return torch.cat([self.add_clipped_rows(parts, total, sums) for parts in chunks])

    def add_clipped_rows(
        self, gradients: Sequence[RowGradients], total: Tensor, sums: Sequence[ProductSum] = ()
    ) -> Tensor:
        """Do the same for `MAX_ROWS` rows or fewer."""
        dense = [part for part in gradients if isinstance(part, Tensor)]
        products = [part.in_float64() for part in gradients if isinstance(part, OuterProducts)]
        kernels = triton_kernels() if dense and dense[0].is_cuda and dense[0].dtype in KERNEL_DTYPES else None
        rows = [(part if kernels else part.float()).contiguous() for part in dense]
        norms = [product.squares() for product in products]
        squares = [(kernels.sum_squares if kernels else sum_squares)(rows)] if rows else []
        squared = torch.stack([*squares, *(square for square, _ in norms)]).sum(0)
        scales = self.scale_rows(squared)
        for shape, (_, spread) in zip(self.products, norms, strict=True):
            scales = limit_scales(scales, shape.headroom * self.units, spread)
        for product, own in zip(products, sums, strict=True):
            own.add(product, scales)
        is_lost = scales == 0
        if kernels is None and is_lost.any():
            for part in rows:
                part[is_lost] = 0  # NaN · 0 is NaN
        for run, place in split_runs(gradients, rows, total):
            (kernels.add_rounded_rows if kernels else add_rounded_rows)(run, scales, place)
        return squared

    def scale_rows(self, squares: Tensor) -> Tensor:
        """Return s of each row from its squared norm: min(2²¹ / C, limit / ‖g‖), and 0 where that is not finite."""
        scales = (self.norm_limit / squares.sqrt()).clamp(max=UNITS / self.clip)
        return torch.where(squares.isfinite(), scales, 0.0).float()

    def to_gradient(self, total: Tensor, divisor: float) -> Tensor:
        """Return a sum of units as a float64 gradient, divided by the batch size."""
        return total.double().mul_(self.clip / UNITS / divisor)


def limit_scales(scales: Tensor, limit: int, spread: Tensor) -> Tensor:
    """Return s of each row with s Σ ‖a_t‖ ‖b_t‖ below a limit, which it always is for a single position."""
    largest = HEADROOM_USE * limit / spread
    return torch.where(largest < scales, largest.float(), scales)


def split_runs(
    gradients: Sequence[RowGradients], rows: list[Tensor], total: Tensor
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Yield the tensors among gradients that follow each other, in the form of `rows`, and their place in `total`."""
    start, rest = 0, iter(rows)
    for is_dense, run in groupby(gradients, lambda part: isinstance(part, Tensor)):
        sizes = [part.shape[1] for part in run]
        if is_dense:
            yield list(islice(rest, len(sizes))), total[start : start + sum(sizes)]
        start += sum(sizes)


def sum_squares(parts: list[Tensor]) -> Tensor:
    """Return the squared norm of each row over all parts in float64, from float32 sums of 1024 squares."""
    squares = torch.zeros(len(parts[0]), dtype=torch.float64, device=parts[0].device)
    if all(native.add_squared_norms(part, squares) for part in parts):
        return squares
    norms = []
    for part in parts:
        whole = part.shape[1] // NORM_BLOCK * NORM_BLOCK
        if whole:
            norms.append(torch.linalg.vector_norm(part[:, :whole].unflatten(1, (-1, NORM_BLOCK)), dim=2))
        if whole < part.shape[1]:
            norms.append(torch.linalg.vector_norm(part[:, whole:], dim=1, keepdim=True))
    return torch.cat(norms, 1).double().square_().sum(1)


def add_rounded_rows(parts: list[Tensor], scales: Tensor, total: Tensor) -> None:
    """Add Σ round(s g) over the rows to `total`; the parts may be overwritten.

    PyTorch adds the bits of the float32 s g + `MAGIC`. Their sum is that of the integers plus a constant, modulo
    2³², and the integers' own sum fits 31 bits.
    """
    places = total.split([part.shape[1] for part in parts])
    if all(native.add_rounded_rows(part, scales, place) for part, place in zip(parts, places, strict=True)):
        return
    bits = [part.mul_(scales[:, None]).add_(MAGIC).view(torch.int32).sum(0, dtype=torch.int32) for part in parts]
    shifted = torch.cat(bits).long().sub_(len(scales) * MAGIC_BITS - (1 << 31))
    total += shifted.bitwise_and_((1 << 32) - 1).sub_(1 << 31)


@cache
def triton_kernels() -> ModuleType | None:
    """Return the module of the Triton kernels, or None where Triton is not installed."""
    try:
        from . import clipping_triton
    except ImportError:
        return None
    return clipping_triton


def flatten(gradients: Gradients) -> Tensor:
    """Return the gradients of all parameters as one flat tensor."""
    return torch.cat([gradient.flatten() for gradient in gradients.values()])
