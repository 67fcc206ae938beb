"""Bounds of y = z / √(mean z² + ε) with z = x − mean x over the last dimension, and of its gap between two networks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..intervals import EPS, Interval, PairBounds
from .bilinear import multiply_numbers
from .linearised import LinearPart, choose
from .scalar_function import finite_or_infinite


@dataclass(frozen=True)
class Box:
    """A box of centred vectors z of n entries, with the range of σ = √(mean z² + ε) and of y = z / σ on it."""

    z: Interval
    deviation: Interval
    y: Interval


def centred(x: Interval) -> Interval:
    """Return the range of x − mean x on a box; mean x includes the entry itself."""
    n = x.low.shape[-1]
    centre = x.centre - x.centre.mean(-1, keepdim=True)
    radius = (1 - 2 / n) * x.radius + x.radius.mean(-1, keepdim=True)
    margin = 4 * (n + 8) * EPS * (x.centre.abs() + x.radius + (x.centre.abs() + x.radius).mean(-1, keepdim=True))
    return Interval(centre - radius, centre + radius).widen_by(margin)


def box_of(z: Interval, epsilon: float) -> Box:
    """Return the ranges on a box of centred vectors."""
    n = z.low.shape[-1]
    squares = Interval(torch.where((z.low < 0) & (z.high > 0), 0, torch.minimum(z.low**2, z.high**2)), z.magnitude**2)
    wide = 4 * (n + 8) * EPS
    variance = squares.map(lambda end: end.mean(-1, keepdim=True))
    deviation = Interval(
        torch.sqrt((variance.low * (1 - wide) + epsilon).clamp(min=0)) * (1 - 8 * EPS),
        torch.sqrt(variance.high * (1 + wide) + epsilon) * (1 + 8 * EPS),
    )
    return Box(z, deviation, standard_range(z, squares, epsilon))


def standard_range(z: Interval, squares: Interval, epsilon: float) -> Interval:
    """Return the range of y_i = z_i / √((z_i² + q) / n + ε) with q = Σ_{j≠i} z_j², which is at least z_i² / (n − 1).

    y_i increases with z_i, and falls or rises with q by the sign of z_i.
    """
    n = z.low.shape[-1]
    slack = 4 * (n + 8) * EPS * squares.high.sum(-1, keepdim=True)
    others = squares.map(lambda end: end.sum(-1, keepdim=True) - end).widen_by(slack)

    def result(end: Tensor, outward: Tensor) -> Tensor:
        least = torch.maximum(others.low.clamp(min=0), end**2 / max(n - 1, 1))
        q = torch.where(outward, least, torch.maximum(others.high, least))
        scale = torch.sqrt((end**2 + q) / n + epsilon)
        return torch.where(end == 0, 0, end / scale)

    y = Interval(result(z.low, z.low < 0), result(z.high, z.high > 0))
    return finite_or_infinite(y.widen_by(32 * EPS * y.magnitude))


def standardised_bounds(x: PairBounds, epsilon: float) -> PairBounds:
    """Return the bounds of y in both networks and of its gap, seen from each of them."""
    dense, pruned = (box_of(centred(side), epsilon) for side in (x.dense, x.pruned))
    gap = centred(x.gap)
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


def standardised_parts(x: PairBounds, result: PairBounds, epsilon: float) -> tuple[LinearPart, LinearPart]:
    """Return y, whose bounds are given, as its derivative in the middle and a remainder: of the gap, and pruned."""
    pruned = box_of(centred(x.pruned), epsilon)
    hull = box_of(centred(x.hull), epsilon)
    centre, radius = pruned.z.centre, pruned.z.radius
    middle, scale = at_centre(centre, epsilon)
    error = derivative_error(pruned, middle, scale, radius)
    constant = middle - apply_derivative(middle, scale, centre)
    margin = rounding(middle, scale, centre.abs() + radius)
    part = choose((middle, scale), Interval(constant - error, constant + error).widen_by(margin), result.pruned)
    middle, scale = at_centre(hull.z.centre, epsilon)
    size = centred(x.gap).magnitude
    error = derivative_error(hull, middle, scale, size) + rounding(middle, scale, size)
    return choose((middle, scale), Interval(-error, error), result.gap), part


def at_centre(z: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return y and 1 / σ of one vector."""
    scale = torch.rsqrt((z * z).mean(-1, keepdim=True) + epsilon)
    return z * scale, scale


def apply_derivative(y: Tensor, scale: Tensor, rows: Tensor) -> Tensor:
    """Return the derivative of y by z, (1 − y yᵀ / n) / σ, which is symmetric, times rows."""
    return scale * (rows - y * (y * rows).mean(-1, keepdim=True))


def transpose(derivative: tuple[Tensor, ...], rows: Tensor) -> Tensor:
    """Return rows of coefficients on y as rows on x."""
    y, scale = derivative
    on_z = apply_derivative(y, scale, rows)
    return on_z - on_z.mean(-1, keepdim=True)


def derivative_error(box: Box, y: Tensor, scale: Tensor, size: Tensor) -> Tensor:
    """Return a bound of |(J − J⁰) d| for |d| ≤ size, where J is the derivative in the box and J⁰ that at its centre.

    With r = 1/σ: J d = r d − r y m with m = mean y d, so that (J − J⁰) d = (r − r⁰) d − (r y − r⁰ y⁰) m − r⁰ y⁰ (m − m⁰).
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
