"""Rules for products, softmax, norms and embeddings: no pair of sampled values is outside of any bound."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_checks import check_rule, hull_of_samples, make_step, sample_pairs, value

from pomona.errors import PomonaError
from pomona.theory.certificate.attention_steps import MASKED_SOFTMAX
from pomona.theory.certificate.fused_steps import ROOT_MEAN_SQUARE_NORM
from pomona.theory.certificate.intervals import Interval, PairBounds
from pomona.theory.certificate.rules import rule_of
from pomona.theory.certificate.rules.distribution import probabilities
from pomona.theory.certificate.steps import Weight

ATEN = torch.ops.aten


def weight(generator, *shape):
    """Return a weight whose two sides differ."""
    dense = torch.randn(shape, generator=generator, dtype=torch.float64)
    return Weight("weight", dense, dense + 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64))


def masked(generator):
    keep = torch.ones(5, 5, dtype=torch.bool).tril()
    return [value(0), -1, Weight("mask", keep, keep)]


# name: (operation, function, arguments from a generator, shape of the result, shapes of the values)
CASES = {
    "mul": ("mul", ATEN.mul.Tensor, lambda g: [value(0), value(1)], (1, 3, 4), [(1, 3, 4), (1, 3, 4)]),
    "mul_broadcast": ("mul", ATEN.mul.Tensor, lambda g: [value(0), value(1)], (1, 3, 4), [(1, 3, 4), (1, 1, 4)]),
    "square": ("mul", ATEN.mul.Tensor, lambda g: [value(0), value(0)], (1, 4), [(1, 4)]),
    "matmul": (
        "matmul",
        ATEN.matmul.default,
        lambda g: [value(0), value(1)],
        (1, 2, 3, 5),
        [(1, 2, 3, 4), (1, 2, 4, 5)],
    ),
    "matmul_broadcast": (
        "matmul",
        ATEN.matmul.default,
        lambda g: [value(0), value(1)],
        (1, 2, 3, 5),
        [(1, 1, 3, 4), (1, 2, 4, 5)],
    ),
    "outer": ("bmm", ATEN.bmm.default, lambda g: [value(0), value(1)], (1, 3, 5), [(1, 3, 1), (1, 1, 5)]),
    "maximum": ("maximum", ATEN.maximum.default, lambda g: [value(0), value(1)], (1, 3, 4), [(1, 3, 4), (1, 3, 4)]),
    "minimum": ("minimum", ATEN.minimum.default, lambda g: [value(0), value(1)], (1, 3, 4), [(1, 3, 4), (1, 1, 4)]),
    "maximum_constant": ("maximum", ATEN.maximum.default, lambda g: [value(0), weight(g, 4)], (1, 3, 4), [(1, 3, 4)]),
    "minimum_constant": ("minimum", ATEN.minimum.default, lambda g: [weight(g, 4), value(0)], (1, 3, 4), [(1, 3, 4)]),
    "amin": ("amin", ATEN.amin.default, lambda g: [value(0), [-1]], (1, 3), [(1, 3, 4)]),
    "softmax": ("softmax", ATEN.softmax.int, lambda g: [value(0), -1], (1, 3, 6), [(1, 3, 6)]),
    "softmax_first": ("softmax", ATEN.softmax.int, lambda g: [value(0), 1], (1, 4, 3), [(1, 4, 3)]),
    "softmax_one": ("softmax", ATEN.softmax.int, lambda g: [value(0), -1], (1, 3, 1), [(1, 3, 1)]),
    "masked": ("masked_softmax", MASKED_SOFTMAX, masked, (1, 2, 5, 5), [(1, 2, 5, 5)]),
    "log_softmax": ("_log_softmax", ATEN._log_softmax.default, lambda g: [value(0), -1, False], (1, 3, 6), [(1, 3, 6)]),
    "layer_norm": (
        "layer_norm",
        ATEN.layer_norm.default,
        lambda g: [value(0), [6], weight(g, 6), weight(g, 6), 1e-5],
        (1, 3, 6),
        [(1, 3, 6)],
    ),
    "layer_norm_plain": ("layer_norm", ATEN.layer_norm.default, lambda g: [value(0), [2, 4]], (1, 2, 4), [(1, 2, 4)]),
    "layer_norm_two": ("layer_norm", ATEN.layer_norm.default, lambda g: [value(0), [2]], (1, 3, 2), [(1, 3, 2)]),
    "group_norm": (
        "group_norm",
        ATEN.group_norm.default,
        lambda g: [value(0), 2, weight(g, 4), weight(g, 4), 1e-5],
        (1, 4, 3, 3),
        [(1, 4, 3, 3)],
    ),
    "root_mean_square": (
        "root_mean_square_norm",
        ROOT_MEAN_SQUARE_NORM,
        lambda g: [value(0), 1e-6],
        (1, 3, 6),
        [(1, 3, 6)],
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("radius", "gap"), [(0.0, 1e-3), (1e-5, 1e-6), (1e-2, 1e-2), (0.3, 0.1), (3.0, 0.5)])
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_sample_is_outside_of_a_bound(name, radius, gap, seed):
    op, function, arguments, shape, shapes = CASES[name]
    generator = torch.Generator().manual_seed(seed)
    step = make_step(op, function, arguments(generator), shape)
    samples = [sample_pairs(generator, size, radius=radius, gap=gap) for size in shapes]
    check_rule(step, samples if len(step.inputs) == len(samples) else samples * 2, generator)


@pytest.mark.parametrize("op", ["add", "sub", "rsub"])
@pytest.mark.parametrize("alpha", [2.5, -3, 0])
@pytest.mark.parametrize("first", [False, True], ids=["values", "weight first"])
def test_sums_with_a_factor(op, alpha, first):
    generator = torch.Generator().manual_seed(0)
    arguments = [weight(generator, 4), value(0)] if first else [value(0), value(1)]
    step = make_step(op, getattr(ATEN, op).Tensor, arguments, (1, 3, 4), alpha=alpha)
    samples = [sample_pairs(generator, (1, 3, 4), radius=0.3, gap=0.1) for _ in step.inputs]
    bounds = check_rule(step, samples, generator)
    ends = [hull_of_samples(*pair).dense for pair in samples]
    sizes = [abs(alpha) if (op == "rsub") == (k == 0) else 1 for k in range(2)]
    width = sum(c * (end.high - end.low) for c, end in zip(sizes[first:], ends, strict=True))
    torch.testing.assert_close(bounds.dense.high - bounds.dense.low, width)


def test_an_extremum_of_separate_ranges_is_one_of_its_arguments():
    generator = torch.Generator().manual_seed(0)
    small, large = (sample_pairs(generator, (1, 4), centre=0.1, radius=0.1, gap=0.1) for _ in range(2))
    large = large[0] + 10, large[1] + 10
    for op, taken in (("maximum", large), ("minimum", small)):
        step = make_step(op, getattr(ATEN, op).default, [value(0), value(1)], (1, 4))
        bounds = check_rule(step, [small, large], generator)
        torch.testing.assert_close(bounds.gap.high, hull_of_samples(*taken).gap.high)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), radius=st.sampled_from([0.0, 1e-3, 0.2]))
def test_division_by_a_value(seed, radius):
    generator = torch.Generator().manual_seed(seed)
    dense, pruned = sample_pairs(generator, (1, 6), radius=radius, gap=0.05)
    divisor = dense.abs() + 1, pruned.abs() + 1
    step = make_step("div", ATEN.div.Tensor, [value(0), value(1)], (1, 6))
    check_rule(step, [sample_pairs(generator, (1, 6), radius=radius, gap=0.05), divisor], generator)
    one = make_step("div", ATEN.div.Tensor, [weight(generator, 6), value(0)], (1, 6))
    check_rule(one, [divisor], generator)


def test_division_by_zero_is_unbounded_and_not_an_error():
    generator = torch.Generator().manual_seed(0)
    samples = [sample_pairs(generator, (1, 4), radius=5.0), sample_pairs(generator, (1, 4), radius=5.0)]
    bounds = check_rule(make_step("div", ATEN.div.Tensor, [value(0), value(1)], (1, 4)), samples, generator)
    assert bounds.gap.high.isinf().any()


# ---- how tight


def widths(name, *, radius, gap, seed=0):
    """Return the median ratio of a gap's interval to that of the samples."""
    op, function, arguments, shape, shapes = CASES[name]
    generator = torch.Generator().manual_seed(seed)
    step = make_step(op, function, arguments(generator), shape)
    samples = [sample_pairs(generator, size, radius=radius, gap=gap) for size in shapes]
    bounds = rule_of(step).bounds(step, [hull_of_samples(*pair) for pair in samples])
    rows = range(len(samples[0][0]))
    sides = [torch.stack([step.evaluate(side, [pair[side][i] for pair in samples]) for i in rows]) for side in (0, 1)]
    gaps = sides[0] - sides[1]
    return float(((bounds.gap.high - bounds.gap.low) / (gaps.amax(0) - gaps.amin(0))).median())


@pytest.mark.parametrize(
    ("name", "limit"), [("mul", 1.2), ("matmul", 1.6), ("softmax", 1.5), ("log_softmax", 1.3), ("layer_norm_plain", 4)]
)
def test_gap_of_a_small_region_is_nearly_that_of_the_samples(name, limit):
    assert widths(name, radius=1e-3, gap=1e-2) <= limit


def test_probabilities_are_exact_at_the_corners():
    # softmax of two numbers is a sigmoid of their difference: x ∈ [0, 1], y ∈ [−1, 0].
    x = Interval(torch.tensor([[0.0, -1.0]]).double(), torch.tensor([[1.0, 0.0]]).double())
    p = probabilities(x)
    assert p.low[0].tolist() == pytest.approx([0.5, 1 / (1 + math.exp(2))], rel=1e-12)
    assert p.high[0].tolist() == pytest.approx([1 / (1 + math.exp(-2)), 0.5], rel=1e-12)


def test_probabilities_are_known_for_huge_scores():
    x = Interval(torch.tensor([[-1e6, 5.0, -math.inf]]).double(), torch.tensor([[1e6, 7.0, -math.inf]]).double())
    p = probabilities(x)
    assert p.low[0].tolist() == pytest.approx([0, 0, 0])
    assert p.high[0].tolist() == pytest.approx([1, 1, 0])
    assert float(p.high[0, 2]) == 0


def wide(shape, size=1e6):
    interval = Interval(torch.full(shape, -size, dtype=torch.float64), torch.full(shape, size, dtype=torch.float64))
    return PairBounds(interval, interval, interval)


@pytest.mark.parametrize("n", [2, 5, 32])
def test_standardised_values_are_bounded_on_any_region(n):
    step = make_step("layer_norm", ATEN.layer_norm.default, [value(0), [n]], (1, n))
    bounds = rule_of(step).bounds(step, [wide((1, n))])
    assert float(bounds.dense.high.max()) <= math.sqrt(n - 1) * (
        1 + 1e-9
    )  # attained by one entry far from equal others
    extreme = torch.zeros(1, n, dtype=torch.float64)
    extreme[0, 0] = 1e6
    assert float(F.layer_norm(extreme, [n]).max()) >= float(bounds.dense.high.max()) * (1 - 1e-6)


def test_wide_regions_give_numbers():
    for name in ("softmax", "masked", "log_softmax", "layer_norm_plain", "group_norm", "root_mean_square"):
        op, function, arguments, shape, shapes = CASES[name]
        generator = torch.Generator().manual_seed(0)
        step = make_step(op, function, arguments(generator), shape)
        bounds = rule_of(step).bounds(step, [wide(shapes[0])])
        assert not bounds.gap.low.isnan().any(), name
        assert not bounds.dense.high.isnan().any(), name


# ---- embeddings


def test_embedding_of_given_tokens_and_of_all_tokens():
    table = Weight(
        "table", torch.tensor([[1.0, 5], [2, -1], [3, 0]]).double(), torch.tensor([[1.0, 4], [2, -1], [0, 0]]).double()
    )
    step = make_step("embedding", ATEN.embedding.default, [table, value(0)], (1, 2, 2))
    low, high = torch.tensor([[2.0, 0.0]]).double(), torch.tensor([[2.0, 2.0]]).double()
    zero = torch.zeros_like(low)
    tokens = PairBounds(Interval(low, high), Interval(low, high), Interval(zero, zero))
    bounds = rule_of(step).bounds(step, [tokens])
    assert bounds.dense.low[0].tolist() == [[3, 0], [1, -1]]
    assert bounds.dense.high[0].tolist() == [[3, 0], [3, 5]]
    torch.testing.assert_close(bounds.gap.high[0], torch.tensor([[3.0, 0], [3, 1]]).double())
    torch.testing.assert_close(bounds.gap.low[0], torch.tensor([[3.0, 0], [0, 0]]).double())


# ---- refusals


@pytest.mark.parametrize(
    ("op", "function", "arguments", "shape"),
    [
        ("pow", ATEN.pow.Tensor_Tensor, [value(0), value(1)], (1, 4)),
        ("div", ATEN.div.Tensor_mode, [value(0), value(1)], (1, 4)),
        ("sign", ATEN.sign.default, [value(0)], (1, 4)),
        ("gt", ATEN.gt.Scalar, [value(0), 0], (1, 4)),
    ],
)
def test_operation_without_a_bound_is_refused_by_name(op, function, arguments, shape):
    step = make_step(op, function, arguments, shape, **({"rounding_mode": "floor"} if op == "div" else {}))
    with pytest.raises(PomonaError, match=f"'{op}'"):
        rule_of(step)
