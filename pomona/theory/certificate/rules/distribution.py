"""Bounds of softmax over the last dimension, and of its gap between two networks.

With p the result, p_i = σ(x_i − log Σ_{j≠i} exp x_j) has its exact range at corners of the box. A change d of the input
changes p_i by p_i · (1 / (1 + s_i) − 1) with s_i = Σ_j p_j (exp(d_j − d_i) − 1), where p is a distribution.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..intervals import EPS, Interval, PairBounds
from .linearised import LinearPart, choose
from .scalar_function import exact_zero_product, finite_or_infinite


def probabilities(x: Interval) -> Interval:
    """Return the range of softmax on a box of inputs."""
    low, high = x.low - log_sum_of_others(x.high), x.high - log_sum_of_others(x.low)
    return Interval(sigmoid_with_margin(low, x, -1), sigmoid_with_margin(high, x, 1))


def sigmoid_with_margin(logit: Tensor, x: Interval, sign: int) -> Tensor:
    """Return σ of a logit, below or above it by a margin for rounding."""
    p = torch.sigmoid(logit)
    ends = torch.stack([x.low, x.high])
    size = 1 + torch.where(ends.isfinite(), ends.abs(), 0).amax(0).amax(-1, keepdim=True)
    margin = 8 * (x.low.shape[-1] + 8) * EPS * size
    widened = (p * (1 + sign * margin) + sign * margin * EPS).clamp(0, 1)
    return torch.where(logit == -math.inf, 0, widened)  # a hidden entry is zero


def log_sum_of_others(x: Tensor) -> Tensor:
    """Return log Σ_{j≠i} exp x_j for each i of the last dimension, without cancellation."""
    start = torch.full_like(x[..., :1], -math.inf)
    before = torch.cat([start, torch.logcumsumexp(x, -1)[..., :-1]], -1)
    after = torch.cat([start, torch.logcumsumexp(x.flip(-1), -1)[..., :-1]], -1).flip(-1)
    return torch.logaddexp(before, after)


def growth(p: Interval, gap: Interval, side: int) -> Interval:
    """Return the range of s_i = Σ_j p_j (exp(e_j − e_i) − 1), with e = side · gap and p a distribution."""
    e = gap if side > 0 else -gap
    return Interval(smallest_growth(p, e), -smallest_growth(p, -e, negate=True))


def smallest_growth(p: Interval, e: Interval, *, negate: bool = False) -> Tensor:
    """Return a lower bound of s_i for changes in e, or of −s_i for changes in −e.

    For each number λ, a distribution has Σ p_j v_j = λ + Σ p_j (v_j − λ); λ is the mean of v in the middle of p.
    """
    exponent = e.low.unsqueeze(-2) - e.high.unsqueeze(-1)  # e_j − e_i in row i, column j, at least
    values = -torch.expm1(-exponent) if negate else torch.expm1(exponent)
    n = values.shape[-1]
    ignored = torch.eye(n, dtype=torch.bool, device=values.device) | (p.high == 0).unsqueeze(-2)
    values = torch.where(ignored, 0, values - (4 + exponent.abs()) * EPS * values.abs())  # rounded down
    centre, radius = p.centre.unsqueeze(-2), p.radius.unsqueeze(-2)
    mean = (centre * values).sum(-1, keepdim=True) / centre.sum(-1, keepdim=True)
    away = values - mean
    least = mean.squeeze(-1) + (exact_zero_product(centre, away) - exact_zero_product(radius, away.abs())).sum(-1)
    size = exact_zero_product(p.high.unsqueeze(-2), values.abs() + mean.abs()).sum(-1) + 2 * mean.squeeze(-1).abs()
    least, smallest = least - 4 * (n + 16) * EPS * size, values.amin(-1)
    return torch.where(least > smallest, least, smallest)  # also where `least` is not a number


def change(p: Interval, growth_range: Interval) -> Interval:
    """Return the range of p_i (1 / (1 + s_i) − 1)."""
    low, high = growth_range.low.clamp(min=-1), growth_range.high.clamp(min=-1)
    most, least = -low / (1 + low), torch.where(high.isinf(), -1, -high / (1 + high))
    ends = torch.stack([exact_zero_product(q, r) for q in (p.low, p.high) for r in (least, most)])
    return Interval(ends.amin(0), ends.amax(0)).widen_by(8 * EPS * ends.abs().amax(0))


def distribution_bounds(x: PairBounds) -> PairBounds:
    """Return the bounds of softmax in both networks and of its gap, seen from each of them."""
    dense, pruned = probabilities(x.dense), probabilities(x.pruned)
    gap = change(pruned, growth(pruned, x.gap, 1)).intersect(-change(dense, growth(dense, x.gap, -1)))
    return PairBounds(dense, pruned, known_gap(x, gap, dense - pruned)).tighten()


def known_gap(x: PairBounds, gap: Interval, sides: Interval) -> Interval:
    """Return a gap that follows from changes of the input, or that of the two sides where a change is not finite.

    An entry that is minus infinity in one network alone changes by an infinite amount from a probability of zero.
    """
    hidden = (x.dense.high == -math.inf) & (x.pruned.high == -math.inf)
    lost = (x.dense.high == -math.inf) | (x.pruned.high == -math.inf) | ~x.gap.magnitude.isfinite()
    broken = (lost & ~hidden).any(-1, keepdim=True)
    return Interval(torch.where(broken, sides.low, gap.low), torch.where(broken, sides.high, gap.high))


def side_part(x: Interval) -> LinearPart:
    """Return softmax on a box as its derivative in the middle, p⁰_i (d_i − Σ p⁰_j d_j), and a remainder."""
    p = probabilities(x)
    middle = torch.softmax(x.centre, -1)
    hidden = p.high == 0
    centre, radius, size = (torch.where(hidden, 0, part) for part in (x.centre, x.radius, x.magnitude))
    constant = middle - middle * (centre - (middle * centre).sum(-1, keepdim=True))
    remainder = side_remainder(middle, radius) + Interval(constant, constant)
    reach = middle * (1 + size + (middle * size).sum(-1, keepdim=True))
    return choose((middle,), remainder.widen_by(16 * (middle.shape[-1] + 8) * EPS * reach), p)


def side_remainder(middle: Tensor, radius: Tensor) -> Interval:
    """Return the interval of p − p⁰ − J⁰ d for changes |d| ≤ radius of the input.

    With e_j = d_j − d_i and s = Σ p⁰_j (exp(e_j) − 1), p_i = p⁰_i / (1 + s), and the remainder is
    p⁰_i (s² / (1 + s) − Σ p⁰_j (exp(e_j) − 1 − e_j)), two terms that are not negative.
    """
    n = middle.shape[-1]
    reach = radius.unsqueeze(-2) + radius.unsqueeze(-1)
    reach = reach.masked_fill(torch.eye(n, dtype=torch.bool, device=reach.device), 0)
    weights = middle.unsqueeze(-2)
    grown, shrunk = ((weights * torch.expm1(sign * reach)).sum(-1) for sign in (1, -1))
    remaining = (1 + shrunk - 4 * (n + 8) * EPS).clamp(min=0)  # rounded down: it may be much smaller than its terms
    high = torch.maximum(grown**2 / (1 + grown), shrunk**2 / remaining * (1 + 8 * (n + 8) * EPS))
    low = (weights * (torch.expm1(reach) - reach).clamp(min=0)).sum(-1)
    slack = 8 * (n + 8) * EPS * (1 + reach.amax(-1)) * (grown + (weights * reach).sum(-1))
    return finite_or_infinite(Interval(-middle * (low + slack), middle * (high + slack)))


def gap_part(x: PairBounds, gap: Interval) -> LinearPart:
    """Return the gap of softmax as a derivative between the networks times the gap of the input, and a remainder."""
    p = probabilities(x.hull)
    middle = torch.softmax(x.hull.centre, -1)
    known = p.high > 0
    low, high = (torch.where(known, end, 0) for end in (x.gap.low, x.gap.high))
    shift = (middle * (low + high) / 2).sum(-1, keepdim=True)  # the derivative of a constant shift is zero
    size = torch.where(known, torch.maximum(high - shift, shift - low), 0)
    error = derivative_error(p, middle, size)
    reach = middle * (size + shift.abs() + (middle * (size + shift.abs())).sum(-1, keepdim=True))
    error = error + 16 * (middle.shape[-1] + 8) * EPS * (reach + error)
    return choose((middle,), Interval(-error, error), gap)


def derivative_error(p: Interval, middle: Tensor, size: Tensor) -> Tensor:
    """Return a bound of |(J − J⁰) d| for |d| ≤ size, where J is the derivative at p and J⁰ that at the middle."""
    off = torch.maximum(p.high - middle, middle - p.low).clamp(min=0)
    total = (p.high * size).sum(-1, keepdim=True)
    spread = (1 - p.low).clamp(min=0) * size + total - p.high * size
    spread = torch.minimum(spread, size + size.amax(-1, keepdim=True))
    return off * spread + middle * (off * size).sum(-1, keepdim=True)


def apply_derivative(result: tuple[Tensor, ...], rows: Tensor) -> Tensor:
    """Return the derivative of softmax where it has this result, which is symmetric, times rows."""
    (p,) = result
    return p * (rows - (p * rows).sum(-1, keepdim=True))
