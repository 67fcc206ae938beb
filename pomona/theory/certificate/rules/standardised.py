"""Bounds of y = z / √(mean z² + ε) over the last dimension, and of its gap between two networks.

In layer norm and group norm z is x − mean x; in the norm by root mean square it is x itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..intervals import EPS, Interval, PairBounds
from .bilinear import multiply_numbers
from .linearised import LinearPart, LinearParts, Transpose, choose
from .scalar_function import finite_or_infinite


@dataclass(frozen=True)
class Statistics:
    """What a norm divides by: √(mean z² + ε), with z = x − mean x where it is `centred`, and z = x elsewhere."""

    epsilon: float
    centred: bool = True

    def vectors(self, x: Interval) -> Interval:
        """Return the range of z on a box."""
        return centre_vectors(x) if self.centred else x


@dataclass(frozen=True)
class Box:
    """A box of vectors z of n entries, with the range of σ = √(mean z² + ε) and of y = z / σ on it."""

    z: Interval
    deviation: Interval
    y: Interval


def centre_vectors(x: Interval) -> Interval:
    """Return the range of x − mean x on a box; mean x includes the entry itself."""
    n = x.low.shape[-1]
    centre = x.centre - x.centre.mean(-1, keepdim=True)
    radius = (1 - 2 / n) * x.radius + x.radius.mean(-1, keepdim=True)
    margin = 4 * (n + 8) * EPS * (x.centre.abs() + x.radius + (x.centre.abs() + x.radius).mean(-1, keepdim=True))
    return Interval(centre - radius, centre + radius).widen_by(margin)


def box_of(x: Interval, statistics: Statistics) -> Box:
    """Return the ranges on a box of inputs."""
    z, epsilon = statistics.vectors(x), statistics.epsilon
    n = z.low.shape[-1]
    squares = Interval(torch.where((z.low < 0) & (z.high > 0), 0, torch.minimum(z.low**2, z.high**2)), z.magnitude**2)
    wide = 4 * (n + 8) * EPS
    variance = squares.map(lambda end: end.mean(-1, keepdim=True))
    deviation = Interval(
        torch.sqrt((variance.low * (1 - wide) + epsilon).clamp(min=0)) * (1 - 8 * EPS),
        torch.sqrt(variance.high * (1 + wide) + epsilon) * (1 + 8 * EPS),
    )
    return Box(z, deviation, standard_range(z, squares, statistics))


def standard_range(z: Interval, squares: Interval, statistics: Statistics) -> Interval:
    """Return the range of y_i = z_i / √((z_i² + q) / n + ε) with q = Σ_{j≠i} z_j².

    y_i increases with z_i, and falls or rises with q by the sign of z_i. Where Σ z = 0, q is at least z_i² / (n − 1).
    """
    n = z.low.shape[-1]
    slack = 4 * (n + 8) * EPS * squares.high.sum(-1, keepdim=True)
    others = squares.map(lambda end: end.sum(-1, keepdim=True) - end).widen_by(slack)

    def result(end: Tensor, outward: Tensor) -> Tensor:
        least = others.low.clamp(min=0)
        least = torch.maximum(least, end**2 / max(n - 1, 1)) if statistics.centred else least
        q = torch.where(outward, least, torch.maximum(others.high, least))
        scale = torch.sqrt((end**2 + q) / n + statistics.epsilon)
        return torch.where(end == 0, 0, end / scale)

    y = Interval(result(z.low, z.low < 0), result(z.high, z.high > 0))
    return finite_or_infinite(y.widen_by(32 * EPS * y.magnitude))


def standardised_bounds(x: PairBounds, statistics: Statistics) -> PairBounds:
    """Return the bounds of y in both networks and of its gap, seen from each of them."""
    dense, pruned = (box_of(side, statistics) for side in (x.dense, x.pruned))
    gap = statistics.vectors(x.gap)
    result = gap_between(dense, pruned, gap).intersect(-gap_between(pruned, dense, -gap))
    return PairBounds(dense.y, pruned.y, finite_or_infinite(result)).tighten()


def gap_between(first: Box, second: Box, gap: Interval) -> Interval:
    """Return the range of y − y' = d / σ − y' · v / (σ (σ + σ')), with d = z − z' and v = mean d (z + z').

    By Cauchy and Schwarz, |v| ≤ ‖d‖ (σ + σ') / √n.
    """
    n = gap.low.shape[-1]
    inverse = Interval(1 / first.deviation.high, 1 / first.deviation.low)
    product = multiply_numbers(gap, first.z + second.z)
    size = torch.maximum(product.magnitude, -product.low).mean(-1, keepdim=True)
    v = product.map(lambda end: end.mean(-1, keepdim=True)).widen_by(4 * (n + 8) * EPS * size)
    total = first.deviation + second.deviation
    ratio = multiply_numbers(multiply_numbers(v, inverse), Interval(1 / total.high, 1 / total.low))
    most = torch.linalg.vector_norm(gap.magnitude, dim=-1, keepdim=True) / math.sqrt(n) * inverse.high
    most = most * (1 + 4 * (n + 8) * EPS)
    ratio = finite_or_infinite(ratio).intersect(Interval(-most, most))
    return multiply_numbers(gap, inverse) - multiply_numbers(second.y, ratio)


def standardised_parts(x: PairBounds, result: PairBounds, statistics: Statistics) -> LinearParts:
    """Return y, whose bounds are given, as its derivative in the middle and a remainder."""
    hull = box_of(x.hull, statistics)
    middle, scale = at_centre(hull.z.centre, statistics.epsilon)
    size = statistics.vectors(x.gap).magnitude
    error = derivative_error(hull, middle, scale, size) + rounding(middle, scale, size)
    gap = choose((middle, scale), Interval(-error, error), result.gap)
    sides = (side_part(x.dense, result.dense, statistics), side_part(x.pruned, result.pruned, statistics))
    return LinearParts(*sides, gap)


def side_part(x: Interval, result: Interval, statistics: Statistics) -> LinearPart:
    """Return y in one network as its derivative in the middle and a remainder."""
    box = box_of(x, statistics)
    centre, radius = box.z.centre, box.z.radius
    middle, scale = at_centre(centre, statistics.epsilon)
    constant = middle - apply_derivative(middle, scale, centre)
    margin = rounding(middle, scale, centre.abs() + radius)
    remainder = side_remainder(box, centre, scale, statistics.epsilon) + Interval(constant, constant)
    return choose((middle, scale), remainder.widen_by(margin), result)


def side_remainder(box: Box, centre: Tensor, scale: Tensor, epsilon: float) -> Interval:
    """Return the interval of y − y⁰ − J⁰ d for all z = z⁰ + d in the box, where z⁰ is its centre.

    With v = mean z² and r(v) = 1 / √(v + ε), y_i = z_i r(v), and the remainder is z⁰_i (h(v) + r'(v⁰) mean d²) +
    d_i (r(v) − r(v⁰)), where h(v) = r(v) − r(v⁰) − r'(v⁰) (v − v⁰) is convex and zero at v⁰.
    """
    n = centre.shape[-1]
    inverse = Interval(1 / box.deviation.high, 1 / box.deviation.low)
    slope = -(scale**3) / 2
    start = 1 / scale**2  # v⁰ + ε

    def excess(root: Tensor) -> Tensor:
        margin = 64 * (n + 8) * EPS * (inverse.high - slope * (1 / root**2 + start))
        return (root - scale - slope * (1 / root**2 - start)).clamp(min=0) + margin

    most = torch.maximum(excess(inverse.low), excess(inverse.high))
    least = slope * (box.z.radius**2).mean(-1, keepdim=True)
    change = torch.maximum(inverse.high - scale, scale - inverse.low).clamp(min=0)
    curved = multiply_numbers(Interval(centre, centre), Interval(least, most).widen_by(8 * n * EPS * least.abs()))
    moved = box.z.radius * change * (1 + 8 * EPS)
    return finite_or_infinite(curved + Interval(-moved, moved))


def at_centre(z: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return y and 1 / σ of one vector."""
    scale = torch.rsqrt((z * z).mean(-1, keepdim=True) + epsilon)
    return z * scale, scale


def apply_derivative(y: Tensor, scale: Tensor, rows: Tensor) -> Tensor:
    """Return the derivative of y by z, (1 − y yᵀ / n) / σ, which is symmetric, times rows."""
    return scale * (rows - y * (y * rows).mean(-1, keepdim=True))


def transpose(statistics: Statistics) -> Transpose:
    """Return the map of rows of coefficients on y to rows on x."""

    def rows_on_x(derivative: tuple[Tensor, ...], rows: Tensor) -> Tensor:
        y, scale = derivative
        on_z = apply_derivative(y, scale, rows)
        return on_z - on_z.mean(-1, keepdim=True) if statistics.centred else on_z

    return rows_on_x


def derivative_error(box: Box, y: Tensor, scale: Tensor, size: Tensor) -> Tensor:
    """Return a bound of |(J − J⁰) d| for |d| ≤ size, where J is the derivative in the box and J⁰ that at its centre.

    With r = 1/σ and m = mean y d, J d = r d − r y m, and (J − J⁰) d = (r − r⁰) d − (r y − r⁰ y⁰) m − r⁰ y⁰ (m − m⁰).
    """
    n = size.shape[-1]
    inverse = Interval(1 / box.deviation.high, 1 / box.deviation.low)
    scale_error = torch.maximum(inverse.high - scale, scale - inverse.low)
    product = multiply_numbers(inverse, box.y)
    product_error = torch.maximum(product.high - scale * y, scale * y - product.low)
    mean = torch.minimum(
        (box.y.magnitude * size).mean(-1, keepdim=True),
        torch.linalg.vector_norm(size, dim=-1, keepdim=True) / math.sqrt(n),
    )
    mean_error = (torch.maximum(box.y.high - y, y - box.y.low) * size).mean(-1, keepdim=True)
    return (scale_error * size + product_error * mean + scale * y.abs() * mean_error) * (1 + 8 * (n + 8) * EPS)


def rounding(y: Tensor, scale: Tensor, size: Tensor) -> Tensor:
    """Return a margin for the rounding of the derivative on vectors up to this size."""
    n = size.shape[-1]
    reach = scale * (size + size.mean(-1, keepdim=True) + y.abs() * (y.abs() * size).mean(-1, keepdim=True)) + y.abs()
    return 32 * (n + 8) * EPS * reach
