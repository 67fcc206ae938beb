"""Sums of clipped outer products on the grid of `clipping`: products of integers in float64, which are exact.

The gradient of an example is G = Σ_t b_t a_tᵀ (see `outer_products`), and s G is what it adds to the sum in units of
the grid. Both factors are rounded to integers: A_t = round(α_t a_t) with α_t = P / ‖a_t‖, and B_t = round(β_t b_t) with
α_t β_t = s 2²⁰. So Σ_t B_t A_tᵀ is s G in steps of 2⁻²⁰ units, but for the rounding of the factors. It is a matrix of
integers that depends on the example alone, and the matrix product Σ_i Σ_t B_it A_itᵀ over all examples adds these
matrices without any rounding error and in any order: a float64 holds every partial sum, an integer below 2⁵³.

**The rounding of the factors.** With W_t = s 2²⁰ ‖a_t‖ ‖b_t‖, n inputs and m outputs,

    ‖B_t A_tᵀ − s 2²⁰ b_t a_tᵀ‖ ≤ ‖B_t − β b_t‖ ‖A_t‖ + ‖β b_t‖ ‖A_t − α a_t‖ ≤ √m/2 (P + √n/2) + (W_t / P) √n/2.

For one position ‖a‖ ‖b‖ is the norm of G, so W ≤ 2⁴¹ by clipping. For several positions, Σ_t ‖a_t‖ ‖b_t‖ may be any
multiple of ‖G‖, so the factor s is also limited such that Σ_t W_t ≤ `HEADROOM` · 2⁴¹: an example in which the outer
products of a layer cancel out to less than a 64th of their norms is clipped further. With P = √(Σ W √n / (T √m)) the
error of all positions is at most √(T √(nm) Σ W) + T √(nm) / 4, whatever the data is. `ProductShape.error` is this
bound, in units, and `GradientGrid.norm_limit` leaves room for it.

**The rounding of the sum.** The sum over all examples is rounded from steps of 2⁻²⁰ units to units once, after
everything is added. Two sums that differ by x in a coordinate differ by at most |x| + 1 afterwards. So adding an
example moves the rounded sum by at most the norm of its own matrix plus √(mn) units.

**The size of the sum.** A product has `rows_per_product` rows at most, so that the absolute values of all its terms add
up to 2⁵³ or less in each coordinate; Σ_t |B_tj| |A_tk| ≤ Σ_t ‖B_t‖ ‖A_t‖ ≤ ΣW + error. Further products are added as
int64. These hold `MAX_SAMPLE` rows of a norm of 2⁴¹.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .outer_products import OuterProducts

UNITS = 1 << 21  # of the grid in the clipping norm
FINE_BITS = 20
FINE = 1 << FINE_BITS  # steps of these sums in a unit
HEADROOM = 64  # of Σ ‖a_t‖ ‖b_t‖ over the norm to which an example is clipped
EXACT = 1 << 53  # the integers up to here are float64 numbers
MAX_SAMPLE = 1 << 21  # rows whose sum fits 63 bits: 2²¹ rows of 2⁴¹
CHUNK = 1 << 15  # numbers that a pass on a CPU reads and writes in the cache
SLACK = 1 + 2.0**-20  # for the float64 errors of norms, factors and these bounds


@dataclass(frozen=True)
class ProductShape:
    """The shape of outer products: positions of a row, outputs and inputs."""

    positions: int
    outputs: int
    inputs: int

    @classmethod
    def of(cls, products: OuterProducts) -> ProductShape:
        """Return the shape of outer products."""
        _, positions, outputs = products.outputs.shape
        return cls(positions, outputs, products.inputs.shape[2])

    @property
    def size(self) -> int:
        """Return the coordinates of the gradient."""
        return self.outputs * self.inputs

    @property
    def headroom(self) -> int:
        """Return the limit of Σ ‖a_t‖ ‖b_t‖ over the clipping norm."""
        return 1 if self.positions == 1 else HEADROOM

    def largest_input(self, units: int) -> float:
        """Return P, the norm of the inputs of a position as integers, for a clipping norm of so many units."""
        ratio = math.sqrt(self.inputs / self.outputs)
        return math.sqrt(self.headroom * units * FINE * ratio / self.positions)

    def error(self, units: int) -> float:
        """Return a bound on the norm of what rounding the factors changes in an example, in units."""
        root = math.sqrt(self.size)
        rounding = math.sqrt(self.positions * root * self.headroom * units * FINE) + self.positions * root / 4
        return SLACK * rounding / FINE

    def rows_per_product(self, units: int) -> int:
        """Return the number of rows whose sum float64 numbers hold exactly."""
        largest = math.ceil(SLACK * (self.headroom * units + self.error(units)) * FINE)
        return EXACT // largest


def round_factors(products: OuterProducts, scales: Tensor, units: int) -> tuple[Tensor, Tensor]:
    """Return B and A, float64 integers of shape (rows · positions, m) and (…, n), from factors in float64.

    Rows whose scale s is 0 are zero, whatever they hold.
    """
    shape = ProductShape.of(products)
    largest, norms = shape.largest_input(units), products.norms[1]
    is_kept = (scales > 0)[:, None] & (norms > 0)
    inward = torch.where(is_kept, largest / norms, 0.0)
    outward = torch.where(is_kept, scales.double()[:, None] * FINE * (norms / largest), 0.0)
    pairs = (products.outputs, outward), (products.inputs, inward)
    ours, theirs = ((part * factor[..., None]).round_().flatten(0, 1) for part, factor in pairs)
    is_lost = scales == 0
    if is_lost.any():
        for part in (ours, theirs):
            part.masked_fill_(is_lost.repeat_interleave(shape.positions)[:, None], 0)  # NaN · 0 is NaN
    return ours, theirs


@dataclass
class ProductSum:
    """The sum of clipped outer products of one parameter, in steps of 2⁻²⁰ units."""

    shape: ProductShape
    units: int
    waiting: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # factors that are not multiplied yet
    rows: int = 0  # that are waiting
    total: Tensor | None = None  # of what was multiplied, int64

    def add(self, products: OuterProducts, scales: Tensor) -> None:
        """Add rows times their scales."""
        limit = self.shape.rows_per_product(self.units)
        for part, factors in zip(products.split(limit), scales.split(limit), strict=True):
            if self.rows + len(part) > limit or self.holds_much():
                self.multiply()
            self.waiting.append(round_factors(part, factors, self.units))
            self.rows += len(part)

    def holds_much(self) -> bool:
        """Return whether the factors that are waiting have as many entries as their product."""
        shape = self.shape
        return self.rows * shape.positions * (shape.outputs + shape.inputs) >= shape.size

    def product(self) -> Tensor:
        """Return the product of the waiting factors, (m · n,) integers in float64, and forget them."""
        ours, theirs = (torch.cat(parts) for parts in zip(*self.waiting, strict=True))
        self.waiting, self.rows = [], 0
        return (ours.mT @ theirs).flatten()

    def multiply(self) -> None:
        """Add the product of the waiting factors to the total."""
        if self.waiting:
            found = self.product().long()
            self.total = found if self.total is None else self.total.add_(found)

    def add_into(self, place: Tensor, *, is_rounded: bool) -> None:
        """Add the sum to the int64 `place`: rounded to units, or in steps of 2⁻²⁰ units."""
        if self.total is None and self.waiting:
            total = self.product()
        else:
            self.multiply()
            total = self.total if self.total is not None else place.new_zeros(len(place))
        count = CHUNK if place.device.type == "cpu" else len(place)
        for part, own in zip(place.split(count), total.split(count), strict=True):
            part += round_to_units(own.long()) if is_rounded else own.long()


def round_to_units(total: Tensor) -> Tensor:
    """Return an int64 sum in steps of 2⁻²⁰ units, rounded to units; `total` may be overwritten."""
    return total.add_(FINE // 2).bitwise_right_shift_(FINE_BITS)
