"""Products of two values of both networks: elementwise and of matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..intervals import EPS, Interval, PairBounds
from ..linear_form import Form, row_sums
from .scalar_function import exact_zero_product, finite_or_infinite


@dataclass(frozen=True)
class Bilinear:
    """A product x, y ↦ x · y, of numbers or of matrices, whose entries are sums of `terms` products."""

    multiply: Callable[[Tensor, Tensor], Tensor]
    terms: int
    of_numbers: bool

    @property
    def rounding(self) -> float:
        """The relative error of one entry, with respect to the sum of absolute values."""
        return 2 * (self.terms + 8) * EPS

    def image(self, x: Interval, y: Interval) -> Interval:
        """Return the interval of x · y, with a margin for rounding.

        It is exact for products of numbers and where x is not negative; elsewhere |x · y − x₀ · y₀| is at most
        |x₀| · r + s · (|y₀| + r), with middles x₀ and y₀ and radii s and r.
        """
        if self.of_numbers:
            return multiply_numbers(x, y)
        around = self.around_middle(x, y)
        known = x.low >= 0
        sign = Interval(torch.where(known, x.low, 0), torch.where(known, x.high, 0))
        rest = Interval(torch.where(known, 0, x.low), torch.where(known, 0, x.high))
        low = self.multiply(sign.low, y.low.clamp(min=0)) + self.multiply(sign.high, y.low.clamp(max=0))
        high = self.multiply(sign.high, y.high.clamp(min=0)) + self.multiply(sign.low, y.high.clamp(max=0))
        by_sign = Interval(low, high) + self.around_middle(rest, y)
        return finite_or_infinite(around.intersect(by_sign.widen_by(self.margin(x, y))))

    def around_middle(self, x: Interval, y: Interval) -> Interval:
        """Return an interval of x · y around the product of the middles."""
        middle = self.multiply(x.centre, y.centre)
        radius = self.multiply(x.centre.abs(), y.radius) + self.multiply(x.radius, y.centre.abs() + y.radius)
        return Interval(middle - radius, middle + radius).widen_by(self.margin(x, y))

    def margin(self, x: Interval, y: Interval) -> Tensor:
        """Return a margin for the rounding of products of entries of x and y."""
        return self.rounding * self.multiply(x.centre.abs() + x.radius, y.centre.abs() + y.radius)

    def bounds(self, x: PairBounds, y: PairBounds) -> PairBounds:
        """Return the bounds of x · y: the gap is x_dense · gap_y + gap_x · y_pruned, or with the sides swapped."""
        gap = self.image(x.dense, y.gap) + self.image(x.gap, y.pruned)
        gap = gap.intersect(self.image(x.pruned, y.gap) + self.image(x.gap, y.dense))
        return PairBounds(self.image(x.dense, y.dense), self.image(x.pruned, y.pruned), gap).tighten()

    def substitute(self, form: Form, x: PairBounds, y: PairBounds) -> tuple[Form, Form, Tensor]:
        """Return forms on x · y as forms on x and on y, and a constant.

        Each product is replaced by its linear part at the middles: x · y = x₀ · y + x · y₀ − x₀ · y₀ up to the product
        of the radii, which is the mean of McCormick's two planes.
        """
        x_shape, y_shape = x.gap.low.shape, y.gap.low.shape
        on_x = self.rows_on_x(form.gap, y.gap.centre, x_shape)
        x_form = Form(
            on_x + self.rows_on_x(form.gap, y.pruned.centre, x_shape),
            on_x + self.rows_on_x(form.pruned, y.pruned.centre, x_shape),
        )
        y_form = Form(
            self.rows_on_y(form.gap, x.dense.centre, y_shape),
            self.rows_on_y(form.gap, x.gap.centre, y_shape) + self.rows_on_y(form.pruned, x.pruned.centre, y_shape),
        )
        parts = (form.gap, x.dense, y.gap), (form.gap, x.gap, y.pruned), (form.pruned, x.pruned, y.pruned)
        constant = sum((self.constant(*part) for part in parts), torch.zeros_like(row_sums(form.gap)))
        return x_form, y_form, constant

    def rows_on_x(self, rows: Tensor, y: Tensor, shape: torch.Size) -> Tensor:
        """Return rows of coefficients on x · y, for a fixed y, as coefficients on an x of this shape."""
        return sum_to_shape(rows * y if self.of_numbers else rows @ y.mT, shape)

    def rows_on_y(self, rows: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        """Return rows of coefficients on x · y, for a fixed x, as coefficients on a y of this shape."""
        return sum_to_shape(rows * x if self.of_numbers else x.mT @ rows, shape)

    def constant(self, rows: Tensor, x: Interval, y: Interval) -> Tensor:
        """Return what rows on x · y are at most above their linear part, with a margin for rounding."""
        error = self.multiply(x.radius, y.radius) + 8 * self.margin(x, y)
        middle = self.multiply(x.centre, y.centre)
        slack = 2 * rows[0].numel() * EPS * self.multiply(x.magnitude, y.magnitude)
        return row_sums(rows.abs() * (error + slack) - rows * middle)


def sum_to_shape(rows: Tensor, shape: torch.Size) -> Tensor:
    """Return rows of coefficients summed over the axes along which a tensor of this shape was repeated."""
    axes = rows.ndim - 1 - len(shape)
    return rows.sum_to_size(len(rows), *[1] * axes, *shape).reshape(len(rows), *shape)


def multiply_numbers(x: Interval, y: Interval) -> Interval:
    """Return the interval of the products of two numbers."""
    products = torch.stack([exact_zero_product(a, b) for a in (x.low, x.high) for b in (y.low, y.high)])
    result = Interval(products.amin(0), products.amax(0))
    return finite_or_infinite(result.widen_by(2 * EPS * products.abs().amax(0)))


NUMBERS = Bilinear(torch.mul, 1, of_numbers=True)


def matrices(inner: int) -> Bilinear:
    """Return the product of matrices with this many terms in an entry."""
    return Bilinear(torch.matmul, inner, of_numbers=False)
