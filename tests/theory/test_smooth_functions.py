"""Ranges of values and slopes of the functions that networks use, and lines around them, against samples and proofs."""

import math

import mpmath
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_checks import check_rule, make_step, sample_pairs, value

from pomona.theory.certificate.intervals import EPS, Interval
from pomona.theory.certificate.rules import smooth_functions as functions
from pomona.theory.certificate.rules.periodic import COSINE, SINE
from pomona.theory.certificate.rules.scalar_function import ROUNDINGS, gap_lines, gap_range


def phi(x):
    return mpmath.erfc(-x / mpmath.sqrt(2)) / 2


def gelu_tanh(x):
    return x / 2 * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3)))


def elu(x, alpha=1.0, scale=1.0, input_scale=1.0):
    return scale * x if x > 0 else scale * alpha * mpmath.expm1(input_scale * x)


def softplus(x, beta=1, threshold=20):
    return x if beta * x > threshold else mpmath.log1p(mpmath.exp(beta * x)) / beta


# name: the function, PyTorch's, a reference of high precision, and whether it needs positive numbers
CASES = {
    "gelu": (functions.GELU, F.gelu, lambda x: x * phi(x), False),
    "gelu_tanh": (functions.GELU_TANH, lambda x: F.gelu(x, approximate="tanh"), gelu_tanh, False),
    "silu": (functions.SILU, F.silu, lambda x: x / (1 + mpmath.exp(-x)), False),
    "mish": (functions.MISH, F.mish, lambda x: x * mpmath.tanh(mpmath.log1p(mpmath.exp(x))), False),
    "sigmoid": (functions.SIGMOID, torch.sigmoid, lambda x: 1 / (1 + mpmath.exp(-x)), False),
    "tanh": (functions.TANH, torch.tanh, mpmath.tanh, False),
    "log_sigmoid": (functions.LOG_SIGMOID, F.logsigmoid, lambda x: -mpmath.log1p(mpmath.exp(-x)), False),
    "erf": (functions.ERF, torch.erf, mpmath.erf, False),
    "atan": (functions.ATAN, torch.atan, mpmath.atan, False),
    "exp": (functions.EXP, torch.exp, mpmath.exp, False),
    "expm1": (functions.EXPM1, torch.expm1, mpmath.expm1, False),
    "hardsigmoid": (functions.HARDSIGMOID, F.hardsigmoid, lambda x: min(max(x / 6 + 0.5, 0), 1), False),
    "hardswish": (functions.HARDSWISH, F.hardswish, lambda x: x * min(max(x + 3, 0), 6) / 6, False),
    "softplus": (functions.softplus(), F.softplus, softplus, False),
    "softplus_jump": (functions.softplus(2, 1), lambda x: F.softplus(x, 2, 1), lambda x: softplus(x, 2, 1), False),
    "softplus_negative": (
        functions.softplus(-1, 2),
        lambda x: F.softplus(x, -1, 2),
        lambda x: softplus(x, -1, 2),
        False,
    ),
    "elu": (functions.elu(0.5), lambda x: F.elu(x, 0.5), lambda x: elu(x, 0.5), False),
    "celu": (functions.celu(0.5), lambda x: F.celu(x, 0.5), lambda x: elu(x, 0.5, 1.0, 2.0), False),
    "selu": (functions.selu(), F.selu, lambda x: elu(x, functions.SELU_ALPHA, functions.SELU_SCALE), False),
    "square": (functions.power(2), lambda x: x**2, lambda x: x**2, False),
    "cube": (functions.power(3), lambda x: x**3, lambda x: x**3, False),
    "sin": (SINE, torch.sin, mpmath.sin, False),
    "cos": (COSINE, torch.cos, mpmath.cos, False),
    "reciprocal": (functions.power(-1), torch.reciprocal, lambda x: 1 / x, True),
    "power": (functions.power(1.5), lambda x: x**1.5, lambda x: x ** mpmath.mpf(1.5), True),
    "sqrt": (functions.SQRT, torch.sqrt, mpmath.sqrt, True),
    "rsqrt": (functions.RSQRT, torch.rsqrt, lambda x: 1 / mpmath.sqrt(x), True),
    "log": (functions.LOG, torch.log, mpmath.log, True),
    "log1p": (functions.LOG1P, torch.log1p, mpmath.log1p, True),
}
ONE_PIECE = [name for name, case in CASES.items() if hasattr(case[0], "pieces") and len(case[0].pieces) == 1]


def random_intervals(seed, positive, count=200):
    """Return intervals of widths from 10⁻⁶ to 20."""
    generator = torch.Generator().manual_seed(seed)
    centre = 4 * torch.randn(count, generator=generator, dtype=torch.float64)
    width = 20 * 10 ** (-7 * torch.rand(count, generator=generator, dtype=torch.float64))
    low = centre.abs() + 1e-3 if positive else centre - width / 2
    return Interval(low, low + width)


def points_in(x, count=201):
    share = torch.linspace(0, 1, count, dtype=torch.float64)[:, None]
    return (x.low + (x.high - x.low) * share).clamp(min=x.low, max=x.high)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_sample_is_outside_of_any_bound(name, seed):
    function, torch_function, _, positive = CASES[name]
    x = random_intervals(seed, positive)
    points = points_in(x)
    values = torch_function(points)
    reach = function.range(x)
    assert ((reach.low <= values) & (values <= reach.high)).all()
    lines = function.lines(x)
    assert (lines.low_slope * points + lines.low_constant <= values).all()
    assert (values <= lines.high_slope * points + lines.high_constant).all()
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(seed))
    gaps, differences = points - points[order], values - values[order]
    gap = Interval(gaps.amin(0), gaps.amax(0))
    noise = 8 * EPS * (points.abs() + values.abs()).amax(0)  # of the differences of samples themselves
    result, lines = gap_range(function, x, gap), gap_lines(function, x, gap)
    assert ((result.low - noise <= differences) & (differences <= result.high + noise)).all()
    assert (lines.low_slope * gaps + lines.low_constant - noise <= differences).all()
    assert (differences <= lines.high_slope * gaps + lines.high_constant + noise).all()


@pytest.mark.parametrize("name", CASES)
def test_slopes_of_chords_are_in_the_range_of_slopes(name):
    function, _, reference, positive = CASES[name]
    x = random_intervals(1, positive, count=30)
    slopes, jumps = function.slopes(x), function.jumps(x)
    with mpmath.workdps(40):
        for i in range(30):
            ends = [mpmath.mpf(float(x.low[i])), mpmath.mpf(float(x.high[i]))]
            points = [ends[0] + (ends[1] - ends[0]) * k / 12 for k in range(13)]
            values = [reference(point) for point in points]
            for k in range(12):
                slope = (values[k + 1] - values[k]) / (points[k + 1] - points[k])
                slack = float(jumps[i]) / (points[k + 1] - points[k])
                assert float(slopes.low[i]) - slack <= slope <= float(slopes.high[i]) + slack


@pytest.mark.parametrize("name", ONE_PIECE)
def test_rounding_of_values_and_slopes_is_far_inside_the_margin(name):
    function, _, reference, positive = CASES[name]
    (piece,) = function.pieces
    x = 5 * torch.randn(60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x.abs() + 1e-3 if positive else x
    values, slopes = piece.value(x), piece.slope(x)
    with mpmath.workdps(40):
        for point, found, slope in zip(x.tolist(), values.tolist(), slopes.tolist(), strict=True):
            exact = reference(mpmath.mpf(point))
            assert abs(found - exact) <= ROUNDINGS * EPS * (1 + abs(point) + abs(exact)) / 4
            exact = mpmath.diff(reference, mpmath.mpf(point))
            assert abs(slope - exact) <= ROUNDINGS * EPS * (1 + abs(point) + abs(exact)) / 4


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "exp", "log_sigmoid", "cube", "sqrt", "log"])
def test_range_of_a_monotone_function_is_that_of_its_ends(name):
    function, torch_function, _, positive = CASES[name]
    x = random_intervals(3, positive)
    reach = function.range(x)
    torch.testing.assert_close(reach.low, torch_function(x.low), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(reach.high, torch_function(x.high), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "mish", "hardswish", "square", "sin", "cos"])
def test_range_is_as_narrow_as_the_samples_show(name):
    function, torch_function, _, positive = CASES[name]
    x = random_intervals(4, positive)
    reach, values = function.range(x), torch_function(points_in(x, 4001))
    spacing = (x.high - x.low) / 4000
    curvature = 1.2 * spacing**2 + 1e-11 * (1 + x.magnitude**2)
    assert (values.amin(0) - reach.low <= curvature).all()
    assert (reach.high - values.amax(0) <= curvature).all()


@pytest.mark.parametrize("name", ["gelu", "tanh", "silu", "exp", "rsqrt"])
def test_lines_are_as_close_as_the_curvature_allows(name):
    # On a short interval of radius r, no pair of lines is closer than r²/2 · |f''| in the middle.
    function = CASES[name][0]
    centre = torch.linspace(0.3, 1.2, 40, dtype=torch.float64)
    x = Interval(centre - 1e-3, centre + 1e-3)
    slopes = function.slopes(x)
    error = function.lines(x).error(x)
    assert (error <= 0.3 * (slopes.high - slopes.low) * 2e-3 + 1e-12).all()


# ---- the points where slopes and second derivatives change their signs


def sign_changes_once(function, derivative, low, high, root, width=0.01):
    """Prove by interval arithmetic that a function has one zero in low … high, at a root up to 10⁻¹²."""
    iv = mpmath.iv
    near = iv.mpf([root - width, root + width])
    assert derivative(near).a > 0 or derivative(near).b < 0
    signs = []
    for start, end in ((low, root - width), (root + width, high)):
        waiting, sign = [(start, end)], set()
        while waiting:
            a, b = waiting.pop()
            image = function(iv.mpf([a, b]))
            if image.a > 0 or image.b < 0:
                sign.add(1 if image.a > 0 else -1)
            else:
                assert b - a > 1e-6
                waiting += [(a, (a + b) / 2), ((a + b) / 2, b)]
        assert len(sign) == 1
        signs += sign
    assert signs[0] == -signs[1]
    ends = [function(iv.mpf(root - 1e-12)), function(iv.mpf(root + 1e-12))]
    return (ends[0].b < 0 < ends[1].a) or (ends[1].b < 0 < ends[0].a)


def iv_tanh(x):
    e = mpmath.iv.exp(2 * x)
    return 1 - 2 / (e + 1)


def test_mish_bends_at_two_points_only():
    # With n = exp(x), the second derivative has the sign of (x + 2) + (x + 4) n + (3 − 1.5 x) n² + (1 − x) n³, whose
    # first term decides for x < −20, and its last for x > 20.
    def second(x):
        n = mpmath.iv.exp(x)
        return (x + 2) + (x + 4) * n + (3 - x * 1.5) * n**2 + (1 - x) * n**3

    def third(x):
        n = mpmath.iv.exp(x)
        return 1 + (x + 5) * n + (4.5 - 3 * x) * n**2 + (2 - 3 * x) * n**3

    middle = 0.0
    assert sign_changes_once(second, third, -20.0, middle, functions.MISH_BENDS[0])
    assert sign_changes_once(second, third, middle, 20.0, functions.MISH_BENDS[1])
    with mpmath.workdps(40):
        reference = CASES["mish"][2]
        for bend in functions.MISH_BENDS:  # the formula above is that of the second derivative
            assert abs(mpmath.diff(reference, mpmath.mpf(bend), 2)) < 1e-14
        for x in (-7.0, -2.3, -2.2, 0.3, 1.4, 1.6, 6.0):
            assert mpmath.sign(mpmath.diff(reference, mpmath.mpf(x), 2)) == mpmath.sign(second(mpmath.iv.mpf(x)).mid)


def test_gelu_tanh_bends_at_two_points_only():
    # x/2 · tanh u is even. Its second derivative has the sign of 4 − 2 / (1 + 3 c x²) − 2 x u' tanh u, which falls for
    # x > 0, and is below 4 − 2 x u' tanh u < 0 for x > 2.
    scale, cubic = functions.GELU_TANH_SCALE, functions.GELU_TANH_CUBIC

    def second(x):
        slope, t = scale * (1 + 3 * cubic * x**2), iv_tanh(scale * (x + cubic * x**3))
        return 4 - 2 / (1 + 3 * cubic * x**2) - 2 * x * slope * t

    def third(x):
        slope, t = scale * (1 + 3 * cubic * x**2), iv_tanh(scale * (x + cubic * x**3))
        falling = 2 * slope * t + 2 * x * 6 * scale * cubic * x * t + 2 * x * slope**2 * (1 - t**2)
        return 12 * cubic * x / (1 + 3 * cubic * x**2) ** 2 - falling

    assert sign_changes_once(second, third, 0.0, 5.0, functions.GELU_TANH_BEND)


def test_silu_bends_where_x_tanh_of_half_x_is_two():
    # x tanh(x/2) increases with |x|.
    with mpmath.workdps(30):
        for sign in (-1, 1):
            assert (
                mpmath.sign(
                    (functions.SILU_BEND + sign * 1e-14) * mpmath.tanh(functions.SILU_BEND / 2 + sign * 5e-15) - 2
                )
                == sign
            )


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "mish"])
def test_turns_are_zeros_of_the_slope_between_the_bends(name):
    # To the left of the first bend the slope falls from zero; from there to the second one it rises above one.
    piece, reference = CASES[name][0].pieces[0], CASES[name][2]
    (turn,) = piece.turns
    with mpmath.workdps(40):
        assert piece.bends[0] < turn < piece.bends[1]
        assert mpmath.diff(reference, mpmath.mpf(turn) - mpmath.mpf(1e-15)) < 0
        assert mpmath.diff(reference, mpmath.mpf(turn) + mpmath.mpf(1e-15)) > 0
        assert mpmath.diff(reference, mpmath.mpf(-5)) < 0 < mpmath.diff(reference, mpmath.mpf(5)) - mpmath.mpf("0.99")


# ---- cases by hand


def interval(low, high):
    return Interval(torch.tensor([low], dtype=torch.float64), torch.tensor([high], dtype=torch.float64))


def test_softplus_counts_its_jump():
    # softplus(beta 1, threshold 0): log 2 below zero, 0 above, so that the gap across zero is up to log 2.
    function = functions.softplus(1.0, 0.0)
    reach = function.range(interval(-1e-9, 1e-9))
    assert float(reach.low) <= 1e-9
    assert float(reach.high) == pytest.approx(math.log(2))
    assert float(function.jumps(interval(-1e-9, 1e-9))) == pytest.approx(math.log(2))
    assert float(function.jumps(interval(0.1, 1.0))) == 0
    tiny = interval(0.0, 1e-9)
    assert float(gap_range(function, interval(-1e-9, 1e-9), tiny).high) >= math.log(2) - 1e-6


def test_poles_and_borders_of_the_domain_are_infinite():
    assert float(functions.power(-1).range(interval(-1.0, 1.0)).low) == -math.inf
    assert float(functions.power(-2).range(interval(0.0, 1.0)).high) == math.inf
    assert float(functions.SQRT.range(interval(-1e-3, 1.0)).low) == -math.inf
    assert float(functions.SQRT.slopes(interval(0.0, 1.0)).high) == math.inf
    assert float(functions.LOG.range(interval(0.0, 1.0)).low) == -math.inf


@pytest.mark.parametrize(
    ("op", "function", "settings"),
    [
        ("gelu", torch.ops.aten.gelu.default, {}),
        ("gelu", torch.ops.aten.gelu.default, {"approximate": "tanh"}),
        ("softplus", torch.ops.aten.softplus.default, {"beta": 2, "threshold": 1}),
        ("elu", torch.ops.aten.elu.default, {"alpha": 0.7, "scale": 1.2, "input_scale": 0.8}),
        ("celu", torch.ops.aten.celu.default, {"alpha": 0.4}),
        ("pow", torch.ops.aten.pow.Tensor_Scalar, {"exponent": 3}),
        ("hardswish", torch.ops.aten.hardswish.default, {}),
        ("sin", torch.ops.aten.sin.default, {}),
    ],
)
@pytest.mark.parametrize(("radius", "gap"), [(0.0, 1e-3), (1e-3, 1e-3), (0.5, 0.1), (3.0, 0.5)])
def test_rule_of_a_function_with_its_settings(op, function, settings, radius, gap):
    generator = torch.Generator().manual_seed(0)
    step = make_step(op, function, [value(0)], (1, 16), **settings)
    check_rule(step, [sample_pairs(generator, (1, 16), radius=radius, gap=gap)], generator)
