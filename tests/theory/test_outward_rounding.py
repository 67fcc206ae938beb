"""Bounds are rounded outward: they hold for exact results, which these tests compute in fractions or with 80 digits."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import pytest
import torch
from rule_checks import make_step, value
from torch import Tensor, nn

from pomona.errors import PomonaError
from pomona.theory import certificate
from pomona.theory.certificate import Ball, Cube, certify_predictions
from pomona.theory.certificate.affine_map import affine_map
from pomona.theory.certificate.intervals import EPS, Interval, PairBounds
from pomona.theory.certificate.linear_form import Form, Lines, largest_value
from pomona.theory.certificate.norm_bounds import norm_bounds
from pomona.theory.certificate.paired_graph import pair_networks
from pomona.theory.certificate.rules import rule_of
from pomona.theory.certificate.rules.distribution import smallest_growth
from pomona.theory.certificate.rules.scalar_function import gap_range
from pomona.theory.certificate.rules.smooth_functions import softplus
from pomona.theory.certificate.steps import DENSE, PRUNED, Weight

ATEN = torch.ops.aten
COUNT = 400


def draw(seed: int, *shape: int) -> Tensor:
    """Return numbers with all digits in use."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def point(dense: Tensor, pruned: Tensor | None = None) -> PairBounds:
    """Return the bounds of one pair of values; their gap is rounded outward."""
    pruned = dense if pruned is None else pruned
    gap = Interval(dense - pruned, dense - pruned).widen_by(EPS * (dense - pruned).abs())
    return PairBounds(Interval(dense, dense), Interval(pruned, pruned), gap)


def exact(x: Tensor) -> list[Fraction]:
    return [Fraction(number) for number in x.flatten().tolist()]


def assert_contains(interval: Interval, numbers: list) -> None:
    """Assert that each entry of an interval contains an exact number."""
    lows, highs = (end.flatten().tolist() for end in (interval.low, interval.high))
    for low, number, high in zip(lows, numbers, highs, strict=True):
        assert low <= number <= high


# ---- intervals


def test_no_point_is_farther_from_the_middle_than_the_radius() -> None:
    low = draw(0, COUNT)
    high = low + 10.0 ** (-10 * draw(1, COUNT).abs())
    x = Interval(low, high)
    pairs = zip(exact(x.low), exact(x.high), exact(x.centre), exact(x.radius), strict=True)
    assert all(max(end - middle, middle - start) <= radius for start, end, middle, radius in pairs)


# ---- piecewise linear functions


@pytest.mark.parametrize("slope", [0.01, 0.3, -0.7, 1.7, 1e6 / 3])
def test_leaky_relu_contains_its_exact_value(slope: float) -> None:
    step = make_step("leaky_relu", ATEN.leaky_relu.default, [value(0), slope], (1, COUNT))
    x = -draw(0, 1, COUNT).abs()
    result = rule_of(step).bounds(step, [point(x)])
    assert_contains(result.dense, [Fraction(slope) * number for number in exact(x)])


@pytest.mark.parametrize("slope", [0.01, 0.3, -0.7, 1.7, 1e6 / 3])
def test_lines_around_leaky_relu_hold_exactly(slope: float) -> None:
    """The planes around the gap had a margin for slopes of the plane, and none for those of the function."""
    step = make_step("leaky_relu", ATEN.leaky_relu.default, [value(0), slope], (1, COUNT))
    low, pruned_low = -draw(0, COUNT).abs(), -draw(1, COUNT).abs()
    high, pruned_high = draw(2, COUNT).abs() * 0.1, draw(3, COUNT).abs() * 0.1
    dense, pruned = Interval(low, high), Interval(pruned_low, pruned_high)
    gap = dense - pruned
    sides = rule_of(step).relax(step, [PairBounds(dense, pruned, gap)])

    def function(x: Fraction) -> Fraction:
        return x if x > 0 else Fraction(slope) * x

    for k in range(COUNT):
        ends = [[Fraction(float(end[k])) for end in (side.low, side.high)] for side in (dense, pruned)]
        for lines, points in zip(sides[:2], ends, strict=True):
            for x in points:
                assert plane(lines, k, x, "low") <= function(x) <= plane(lines, k, x, "high")
        for a in ends[0]:
            for b in ends[1]:
                after = function(a) - function(b)
                assert plane(sides[2], k, a - b, "low", b) <= after <= plane(sides[2], k, a - b, "high", b)


def plane(lines: Lines, k: int, x: Fraction, which: str, pruned: Fraction = Fraction(0)) -> Fraction:
    """Return the exact value of one entry's line or plane."""
    parts = [getattr(lines, f"{which}_{name}") for name in ("slope", "constant", "tilt")]
    slope, constant, tilt = (Fraction(0) if part is None else Fraction(float(part[k])) for part in parts)
    return slope * x + constant + tilt * pruned


# ---- layers


def batch_norm_weights(seed: int) -> tuple[list[Weight], list]:
    """Return weight, bias, mean and variance of which the shift cancels and the two networks differ in the last digits.

    Also the exact scale and shift of both networks, for a variance that is increased by 1e-5.
    """
    variance = draw(seed, COUNT).abs() + 0.1
    mean, weight = 1e6 * draw(seed + 1, COUNT), draw(seed + 2, COUNT)
    bias = mean * weight * (variance + 1e-5).rsqrt()
    other = variance * (1 + 4 * EPS)
    tensors = [(weight, weight), (bias, bias), (mean, mean), (variance, other)]
    weights = [Weight(name, *sides) for name, sides in zip("wbmv", tensors, strict=True)]
    sides = []
    for side in (DENSE, PRUNED):
        w, b, m, v = (part.of(side).tolist() for part in weights)
        scales = [mpmath.mpf(x) / mpmath.sqrt(mpmath.mpf(y) + mpmath.mpf(1e-5)) for x, y in zip(w, v, strict=True)]
        shifts = [mpmath.mpf(x) - mpmath.mpf(y) * s for x, y, s in zip(b, m, scales, strict=True)]
        sides.append((scales, shifts))
    return weights, sides


def test_batch_norm_contains_its_exact_value() -> None:
    """The shift is the difference of two numbers that are much larger, and so was its error."""
    with mpmath.workdps(80):
        (weight, bias, mean, variance), sides = batch_norm_weights(0)
        settings = [weight, bias, mean, variance, False, 0.1, 1e-5, False]
        step = make_step("batch_norm", ATEN.batch_norm.default, [value(0), *settings], (1, COUNT))
        x = draw(9, 1, COUNT)
        numbers = [mpmath.mpf(number) for number in x.flatten().tolist()]
        results = [[s * n + t for s, n, t in zip(scales, numbers, shifts, strict=True)] for scales, shifts in sides]
        bounds = rule_of(step).bounds(step, [point(x)])
        assert_contains(bounds.dense, results[0])
        assert_contains(bounds.pruned, results[1])
        assert_contains(bounds.gap, [a - b for a, b in zip(*results, strict=True)])
        form = Form(torch.eye(COUNT, dtype=torch.float64)[:, None], torch.zeros(COUNT, 1, COUNT, dtype=torch.float64))
        below = rule_of(step).substitution(step, form, [point(x)])
        for k, number in enumerate(numbers):
            above = mpmath.mpf(float(below.constant[k])) + mpmath.mpf(float(below.forms[0].pruned[k, 0, k])) * number
            assert results[0][k] - results[1][k] <= above


def test_norms_of_a_folded_batch_norm_contain_the_exact_difference() -> None:
    with mpmath.workdps(80):
        (weight, bias, mean, variance), sides = batch_norm_weights(0)

        class Norm(nn.Module):
            def __init__(self, side: int) -> None:
                super().__init__()
                self.layer, self.norm = nn.Linear(COUNT, COUNT), nn.BatchNorm1d(COUNT)
                self.double()
                self.layer.weight.data, self.layer.bias.data = torch.eye(COUNT).double(), torch.zeros(COUNT).double()
                self.norm.weight.data, self.norm.bias.data = weight.of(side), bias.of(side)
                self.norm.running_mean, self.norm.running_var = mean.of(side), variance.of(side)

            def forward(self, x: Tensor) -> Tensor:
                return self.norm(self.layer(x))

        graph = pair_networks(Norm(DENSE), Norm(PRUNED), torch.zeros(1, COUNT))
        found = norm_bounds(graph, Ball(1e-300)).output.gap
        apart = mpmath.sqrt(sum((a - b) ** 2 for a, b in zip(sides[0][1], sides[1][1], strict=True)))
        assert apart <= found


@pytest.mark.parametrize("whole", [False, True], ids=["real", "whole"])
def test_quotients_contain_their_exact_value(whole: bool) -> None:
    """A whole number's reciprocal was one of float32; the difference of two close reciprocals is rounded."""
    divisor = torch.arange(3, 3 + COUNT) if whole else draw(0, COUNT)
    other = divisor if whole else divisor * (1 + 2 * EPS)
    step = make_step("div", ATEN.div.Tensor, [value(0), Weight("w", divisor, other)], (1, COUNT))
    x = draw(1, 1, COUNT)
    bounds = rule_of(step).bounds(step, [point(x)])
    results = [[n / d for n, d in zip(exact(x), exact(side.double()), strict=True)] for side in (divisor, other)]
    assert_contains(bounds.dense, results[0])
    assert_contains(bounds.gap, [a - b for a, b in zip(*results, strict=True)])
    scale = affine_map(step, DENSE, x.shape)
    assert all(
        abs(Fraction(one) - 1 / two) <= Fraction(scale.weight_error)
        for one, two in zip(scale.weight.flatten().tolist(), exact(divisor.double()), strict=True)
    )


def test_a_difference_of_constants_is_rounded_outward() -> None:
    dense, pruned = draw(0, 1, COUNT), 1e-3 * draw(1, 1, COUNT)
    step = make_step("cat", ATEN.cat.default, [[value(0), Weight("w", dense, pruned)], 1], (1, 2 * COUNT))
    bounds = rule_of(step).bounds(step, [point(torch.zeros(1, COUNT, dtype=torch.float64))])
    gap = bounds.gap.map(lambda end: end[:, COUNT:])
    assert_contains(gap, [a - b for a, b in zip(exact(dense), exact(pruned), strict=True)])


def test_sum_of_a_vector_of_weights_counts_all_terms() -> None:
    weight = draw(0, 4096)
    step = make_step("linear", ATEN.linear.default, [value(0), Weight("w", weight, weight)], (1,))
    x = draw(1, 1, 4096)
    bounds = rule_of(step).bounds(step, [point(x)])
    assert float(bounds.dense.radius) >= 4096 * EPS * float((x * weight).abs().sum())


# ---- forms


def test_bounds_of_forms_by_intervals_hold_exactly() -> None:
    """dense − pruned was rounded, and the margin was relative to the gap alone."""
    dense, pruned = draw(0, COUNT), draw(1, COUNT) * 1e-3
    x = point(dense[:, None], pruned[:, None])
    for k in range(COUNT):
        one = torch.ones(1, 1, dtype=torch.float64)
        entry = PairBounds(*(side.map(lambda end, k=k: end[k]) for side in (x.dense, x.pruned, x.gap)))
        above = largest_value(Form(one, 0 * one), entry)
        assert Fraction(float(dense[k])) - Fraction(float(pruned[k])) <= Fraction(float(above))


# ---- smooth functions


@pytest.mark.parametrize("threshold", [20.0, 30.0, 40.0, -3.0])
def test_jump_of_softplus_is_exact(threshold: float) -> None:
    """It was computed as a difference of two larger numbers, and left out where it is below their rounding."""
    with mpmath.workdps(80):
        jump = mpmath.log(1 + mpmath.exp(mpmath.mpf(threshold))) - mpmath.mpf(threshold)
        x = Interval(*(torch.tensor([threshold + move]).double() for move in (-1e-12, 1e-12)))
        zero = torch.zeros(1, dtype=torch.float64)
        gap = gap_range(softplus(1.0, threshold), x, Interval(zero, zero))
        assert jump <= float(gap.high) <= jump * mpmath.mpf(1 + 1e-12)


@pytest.mark.parametrize("size", [1.0, 100.0, 600.0])
def test_growth_of_probabilities_holds_exactly(size: float) -> None:
    """exp(e_j − e_i) magnifies the rounding of the difference."""
    with mpmath.workdps(80):
        for seed in range(60):
            e, p = size * torch.rand(5, generator=torch.Generator().manual_seed(seed)).double(), None
            p = torch.softmax(draw(seed, 5), -1)
            gap, chances = Interval(e, e), Interval(p, p).widen_by(8 * EPS * p)
            numbers, shares = ([mpmath.mpf(n) for n in x.tolist()] for x in (e, p))
            total = sum(shares)
            least, most = smallest_growth(chances, gap), smallest_growth(chances, -gap, negate=True)
            for i in range(5):
                s = sum(q / total * (mpmath.exp(n - numbers[i]) - 1) for q, n in zip(shares, numbers, strict=True))
                assert float(least[i]) <= s <= -float(most[i])


# ---- regions


def test_the_distance_to_a_corner_of_a_narrow_cube_is_rounded_up() -> None:
    """The middle of two neighbouring numbers is one of them, and half the width is too little."""
    for low, high in ((1.0, 1.0 + EPS), (0.1, 0.3), (1e6, 1e6 + 1)):
        middle, distance = Cube(low, high).centre((3,))
        centre = Fraction(float(middle[0, 0]))
        farthest = max(Fraction(high) - centre, centre - Fraction(low))
        assert 3 * farthest**2 <= Fraction(distance) ** 2


def test_an_infinite_cube_is_refused() -> None:
    with pytest.raises(PomonaError, match="finite low < high, got 0 and inf"):
        Cube(0, math.inf)


def test_an_example_outside_of_the_region_is_refused_by_any_amount() -> None:
    """An example within 1e-12 of the region counted as inside, and nothing is proven there."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    for region, x in ((Cube(0, 1), [[0.5, 1 + EPS]]), (Ball(1.0), [[0.0, 1 + EPS]])):
        with pytest.raises(PomonaError, match="1 of 1 examples lie outside"):
            certify_predictions(model, model, torch.tensor(x, dtype=torch.float64), region=region)
        assert certify_predictions(model, model, torch.tensor([[0.0, 1.0]]), region=region).share == 1


def test_margins_over_a_region_cover_the_rounding_of_the_outputs() -> None:
    """The margin of the networks at an example was computed without a bound of its rounding."""
    model = nn.Linear(64, 2, bias=False).double()
    model.weight.data = 1e8 * draw(0, 2, 64)
    basis = torch.linalg.qr(model.weight.data.T).Q
    x = draw(1, 50, 64)
    x = (x - x @ basis @ basis.T).clamp(-5, 5)  # both outputs are sums of large terms that cancel
    found = certify_predictions(model, model.state_dict(), x, region=Cube(-5, 5))
    for k in range(len(x)):
        outputs = exact_outputs(nn.Sequential(model), exact(x[k]))
        margin = outputs[int(found.classes[k])] - outputs[1 - int(found.classes[k])]
        assert Fraction(float(found.margin[k])) <= margin


def test_certificate_of_a_narrow_region_holds_for_its_corners() -> None:
    torch.manual_seed(1)
    dense = nn.Sequential(nn.Linear(3, 5), nn.LeakyReLU(1.7), nn.Linear(5, 2)).double()
    pruned = certificate.prune_by_magnitude(dense, 0.3)
    found = certificate.certify(dense, pruned, (3,), region=Cube(1.0, 1.0 + 2 * EPS), steps=0)
    for corner in torch.cartesian_prod(*[torch.tensor([1.0, 1 + EPS, 1 + 2 * EPS]).double()] * 3):
        outputs = [exact_outputs(network, exact(corner)) for network in (dense, pruned)]
        assert sum((a - b) ** 2 for a, b in zip(*outputs, strict=True)) <= Fraction(found.error) ** 2


def exact_outputs(network: nn.Sequential, x: list[Fraction]) -> list[Fraction]:
    """Return the outputs of a network of linear layers and leaky ReLU without rounding."""
    for layer in network:
        if isinstance(layer, nn.LeakyReLU):
            x = [n if n > 0 else Fraction(layer.negative_slope) * n for n in x]
        else:
            rows = [exact(row) for row in layer.weight.detach()]
            biases = [Fraction(0)] * len(rows) if layer.bias is None else exact(layer.bias.detach())
            x = [sum(w * n for w, n in zip(row, x, strict=True)) + b for row, b in zip(rows, biases, strict=True)]
    return x
