"""Patterns: masks worked out by hand, and properties that hold for any scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pomona as pm
from pomona.masking import matrix_shape
from pomona.patterns import PATTERNS, Pattern

INF = math.inf


def masks_as_lists(pattern: Pattern, sparsity: float, *scores: Sequence) -> list[list]:
    """Return the selected masks as nested lists of zeros and ones."""
    return [
        m.int().tolist() for m in pattern.select_masks([torch.tensor(s, dtype=torch.float64) for s in scores], sparsity)
    ]


# ---- by hand


def test_unstructured() -> None:
    assert masks_as_lists(pm.Unstructured(), 0.5, [[4.0, 1, 3], [2, 5, 6]]) == [[[1, 0, 0], [0, 1, 1]]]
    assert masks_as_lists(pm.Unstructured(), 0.5, [[4.0, 1]], [[3.0, 2]]) == [
        [[1, 0]],
        [[1, 0]],
    ]  # one threshold for both
    assert masks_as_lists(pm.Unstructured(), 0.5, [[9.0, 8]], [[3.0, 2]]) == [[[1, 1]], [[0, 0]]]
    assert masks_as_lists(pm.Unstructured(), 0.0, [[0.0, -INF]]) == [[[1, 1]]]


def test_ties_keep_the_first() -> None:
    assert masks_as_lists(pm.Unstructured(), 0.5, [[1.0, 1], [1, 1]]) == [[[1, 1], [0, 0]]]
    assert masks_as_lists(pm.Filter(), 0.5, [[1.0, 1], [1, 1]]) == [[[1, 1], [0, 0]]]
    assert masks_as_lists(pm.Balanced(block=2), 0.5, [[1.0, 1, 1, 1]]) == [[[1, 0, 1, 0]]]
    assert masks_as_lists(pm.Filter(), 0.5, [[1.0]], [[1.0]]) == [[[1]], [[0]]]


def test_balanced_keeps_the_same_number_in_every_block() -> None:
    rows = [[1.0, 2, 8, 7], [5, 6, 3, 4]]
    assert masks_as_lists(pm.Balanced(block=2), 0.5, rows) == [[[0, 1, 1, 0], [0, 1, 0, 1]]]
    assert masks_as_lists(pm.Balanced(blocks=1), 0.5, rows) == [[[0, 0, 1, 1], [1, 1, 0, 0]]]
    assert masks_as_lists(pm.Balanced(blocks=2), 0.5, rows) == masks_as_lists(pm.Balanced(block=2), 0.5, rows)
    convolution = torch.tensor(rows, dtype=torch.float64).view(2, 1, 2, 2)
    assert pm.Balanced(block=2).select_masks([convolution], 0.5)[0].view(2, 4).int().tolist() == [
        [0, 1, 1, 0],
        [0, 1, 0, 1],
    ]


@pytest.mark.parametrize(
    ("width", "sparsity", "pruned"),
    [
        (4, 0.5, 2),
        (4, 0.375, 2),
        (4, 0.37, 1),
        (4, 0.99, 3),
        (1, 0.9, 0),
        (10, 0.25, 3),
        (10, 0.35, 4),
        (20, 0.075, 2),
        (3, 0, 0),
    ],
)
def test_balanced_rounds_half_up_and_keeps_one(width: int, sparsity: float, pruned: int) -> None:
    mask = pm.Balanced(block=width).select_masks([torch.rand(3, 2 * width)], sparsity)[0]
    assert (mask.view(-1, width).sum(1) == width - pruned).all()


def test_balanced_never_keeps_padding_before_weights() -> None:
    # Blocks (1, 2, 3) and (4, 5, nothing); one of three goes, and of the last the nothing.
    assert masks_as_lists(pm.Balanced(block=3, pad=True), 1 / 3, [[1.0, 2, 3, 4, 5]]) == [[[0, 1, 1, 1, 1]]]
    assert masks_as_lists(pm.Balanced(block=3, pad=True), 2 / 3, [[1.0, 2, 3, 4, 5]]) == [[[0, 0, 1, 0, 1]]]
    assert masks_as_lists(pm.Balanced(blocks=2, pad=True), 2 / 3, [[1.0, 2, 3, 4, 5]]) == [[[0, 0, 1, 0, 1]]]
    assert masks_as_lists(pm.Balanced(block=3, pad=True), 1 / 3, [[1.0, 2, 3, -INF, -INF]]) == [[[0, 1, 1, 1, 1]]]


def test_balanced_distributes_sparsity_over_layers_by_one_threshold() -> None:
    small, large = [[1.0, 2, 3, 4]], [[5.0, 6, 7, 8]]
    # Four of eight go, all of them from the first layer, which keeps one all the same.
    assert masks_as_lists(pm.Balanced(block=4), 0.5, small, large) == [[[0, 0, 0, 1]], [[1, 1, 1, 1]]]
    # Three of eight: 3/4 of the first layer.
    assert masks_as_lists(pm.Balanced(block=2), 3 / 8, small, large) == [[[0, 1, 0, 1]], [[1, 1, 1, 1]]]


def test_balanced_rounds_exact_halves_of_a_layer_up() -> None:
    # 6 of the first layer's 80 go: 1.5 of every 20, which rounds up to 2; in float32 it would not.
    first = torch.arange(1.0, 81).view(1, 80)
    second = 100 + torch.arange(80.0).view(1, 80)
    kept = pm.Balanced(block=20).select_masks([first, second], 6 / 160)
    assert [int((~m).sum()) for m in kept] == [8, 0]


def test_nm() -> None:
    rows = [[1.0, 4, 3, 2], [9, 1, 1, 9]]
    assert masks_as_lists(pm.NM(2, 4), 0.5, rows) == [[[0, 1, 1, 0], [1, 0, 0, 1]]]
    assert masks_as_lists(pm.NM(1, 4), 0.75, rows) == [[[0, 1, 0, 0], [1, 0, 0, 0]]]
    assert pm.NM(1, 4).sparsity == 0.75


def test_nm_keeps_more_below_its_final_sparsity_and_never_fewer() -> None:
    rows = [[1.0, 4, 3, 2]]
    assert masks_as_lists(pm.NM(2, 4), 0.0, rows) == [[[1, 1, 1, 1]]]
    assert masks_as_lists(pm.NM(2, 4), 0.2, rows) == [[[0, 1, 1, 1]]]
    assert masks_as_lists(pm.NM(2, 4), 0.99, rows) == [[[0, 1, 1, 0]]]
    assert masks_as_lists(pm.NM(2, 4), 0.25, rows, [[9.0, 9, 9, 9]]) == [
        [[0, 1, 1, 1]],
        [[1, 1, 1, 0]],
    ]  # the same in all


def test_block() -> None:
    rows = [[3.0, 0, 2, 2], [0, 0, 2, 2], [1, 1, 0, 0], [1, 1, 0, 0]]
    # Tiles by norm: 3, 4 / 2, 0. By the sum of magnitudes: 3, 8 / 4, 0.
    assert masks_as_lists(pm.Block((2, 2)), 0.5, rows) == [[[1, 1, 1, 1], [1, 1, 1, 1], [0] * 4, [0] * 4]]
    assert masks_as_lists(pm.Block((2, 2), norm=1), 0.5, rows) == [
        [[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]
    ]
    assert masks_as_lists(pm.Block((1, 4)), 0.75, rows) == [[[1] * 4, [0] * 4, [0] * 4, [0] * 4]]
    assert masks_as_lists(pm.Block((4, 1)), 0.5, rows) == [[[1, 0, 1, 0]] * 4]  # columns 3.3, 1.4, 2.8, 2.8
    assert masks_as_lists(pm.Block((None, 1)), 0.5, rows) == [[[1, 0, 1, 0]] * 4]
    assert masks_as_lists(pm.Block((1, None)), 0.75, rows) == [[[1] * 4, [0] * 4, [0] * 4, [0] * 4]]


def test_kernel() -> None:
    weights = torch.tensor([[[3.0, 0], [2, 2]], [[1, 1], [0, 0]]]).view(2, 2, 1, 2)  # norms 3, 2.8, 1.4, 0
    assert pm.Kernel().select_masks([weights], 0.5)[0].int().view(4, 2).tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
    assert pm.Kernel(norm=1).select_masks([weights], 0.75)[0].int().view(4, 2).tolist() == [
        [0, 0],
        [1, 1],
        [0, 0],
        [0, 0],
    ]
    assert masks_as_lists(pm.Kernel(), 0.5, [[1.0, 4], [3, 2]]) == [[[0, 1], [1, 0]]]  # in a linear layer every weight


def test_filter() -> None:
    rows = [[3.0, 0], [2, 2], [1, 1]]  # L2: 3, 2.8, 1.4; L1: 3, 4, 2
    assert masks_as_lists(pm.Filter(), 2 / 3, rows) == [[[1, 1], [0, 0], [0, 0]]]
    assert masks_as_lists(pm.Filter(norm=1), 2 / 3, rows) == [[[0, 0], [1, 1], [0, 0]]]


def test_excluded_entries_add_nothing_to_the_norm_of_their_unit() -> None:
    assert masks_as_lists(pm.Filter(), 0.5, [[-INF, 1.0], [2.0, 2.0]]) == [[[0, 0], [1, 1]]]
    assert masks_as_lists(pm.Filter(), 0.5, [[-INF, -INF], [0.0, -INF]]) == [[[0, 0], [1, 1]]]
    assert masks_as_lists(pm.Filter(), 0.5, [[9.0, 9.0], [INF, 0.0]]) == [[[0, 0], [1, 1]]]


def test_filters_of_several_sizes_reach_the_nearest_weight_count() -> None:
    wide, narrow = [[5.0, 0, 0], [1, 0, 0]], [[4.0], [3.0], [2.0]]
    # Ranked 5 (3 weights), 4, 3, 2 (1 each), 1 (3): keeping 3, 4, 5, 6 or all 9.
    assert masks_as_lists(pm.Filter(), 4 / 9, wide, narrow) == [[[1, 1, 1], [0, 0, 0]], [[1], [1], [0]]]
    assert masks_as_lists(pm.Filter(), 2 / 9, wide, narrow) == [[[1, 1, 1], [0, 0, 0]], [[1], [1], [1]]]  # 7 asked: 6
    assert masks_as_lists(pm.Filter(), 8 / 9, wide, narrow) == [
        [[0, 0, 0], [0, 0, 0]],
        [[0], [0], [0]],
    ]  # 1 asked: 0, not 3


def test_filters_can_be_counted_instead_of_weights() -> None:
    wide, narrow = [[5.0, 0, 0], [1, 0, 0]], [[4.0], [3.0], [2.0]]
    assert masks_as_lists(pm.Filter(of="filters"), 0.4, wide, narrow) == [
        [[1, 1, 1], [0, 0, 0]],
        [[1], [1], [0]],
    ]  # 2 of 5
    assert masks_as_lists(pm.Filter(of="filters"), 0.2, wide, narrow) == [[[1, 1, 1], [0, 0, 0]], [[1], [1], [1]]]
    assert masks_as_lists(pm.Filter(of="filters"), 0.8, wide, narrow) == [[[1, 1, 1], [0, 0, 0]], [[0], [0], [0]]]
    with pytest.raises(pm.PomonaError, match="did you mean 'filters'"):
        pm.Filter(of="filter")


def test_norms_are_pruned_with_their_filter_only_on_request() -> None:
    torch.manual_seed(0)
    for norms in (True, False):
        model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Conv2d(4, 4, 3))
        torch.nn.init.ones_(model[1].bias)
        pruner = pm.OneShot(sparsity=0.5, pattern=pm.Filter(norms=norms), include=["0.weight"])
        pruner.attach(model, torch.optim.SGD(model.parameters(), 0.1), total_steps=1)
        pruned = ~model[0].weight.flatten(1).any(1)
        assert pruned.sum() == 2
        for tensor in (model[0].bias, model[1].weight, model[1].bias):
            assert bool(tensor[pruned].any()) is not norms


def test_norms_of_bfloat16_weights_are_computed_in_float32() -> None:
    rows = torch.ones(2, 64, dtype=torch.bfloat16)
    rows[1, 0] = 1.0625  # norms 8 and 8.008, one number in bfloat16
    assert pm.Filter().select_masks([rows], 0.5)[0][:, 0].tolist() == [False, True]


# ---- for any scores

PATTERN = st.sampled_from(
    [
        pm.Unstructured(),
        pm.Balanced(block=4),
        pm.Balanced(blocks=2),
        pm.Balanced(block=5, pad=True),
        pm.NM(2, 4),
        pm.NM(3, 4),
        pm.Block((2, 2)),
        pm.Block((None, 2)),
        pm.Kernel(),
        pm.Filter(norm=1),
    ]
)
SHAPES = st.lists(
    st.tuples(st.sampled_from([2, 4, 6]), st.sampled_from([4, 8, 12]), st.sampled_from([(), (1,), (3,), (2, 2)])).map(
        lambda s: (s[0], s[1], *s[2])
    ),
    min_size=1,
    max_size=3,
)
SPARSITY = st.floats(0, 0.99)


def rows_of_units(pattern: Pattern, tensor: Tensor) -> Tensor:
    """Return the tensor as a matrix with one unit or one balanced block in each row."""
    rows, columns = matrix_shape(tensor.shape)
    if isinstance(pattern, pm.Block):
        high, wide = pattern.shape[0] or rows, pattern.shape[1] or columns
        tiles = tensor.reshape(rows // high, high, columns // wide, wide)
        return tiles.permute(0, 2, 1, 3).reshape(-1, high * wide)
    width = {pm.Unstructured: 1, pm.Filter: columns, pm.Kernel: columns // tensor.shape[1]}.get(type(pattern))
    if isinstance(pattern, pm.NM):
        width = 4
    if isinstance(pattern, pm.Balanced):
        width = pattern.block or columns // 2
        tensor = torch.nn.functional.pad(tensor.reshape(rows, columns), (0, -columns % width))
    return tensor.reshape(-1, width)


def draw_scores(shapes: list[tuple[int, ...]], seed: int, levels: int) -> list[Tensor]:
    """Return random scores of `levels` different values: few levels make many ties."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, levels, shape, generator=generator).double() for shape in shapes]


@settings(deadline=None, max_examples=150)
@given(PATTERN, SHAPES, SPARSITY, st.integers(0, 99), st.sampled_from([3, 1 << 30]))
def test_masks_have_the_structure_and_sparsity(
    pattern: Pattern, shapes: list[tuple[int, ...]], sparsity: float, seed: int, levels: int
) -> None:
    scores = draw_scores(shapes, seed, levels)
    kept = pattern.select_masks(scores, sparsity)
    assert [m.shape for m in kept] == [s.shape for s in scores]
    assert all(m.dtype == torch.bool and m.is_contiguous() for m in kept)
    size = sum(s.numel() for s in scores)
    pruned = sum(int((~m).sum()) for m in kept)
    if isinstance(pattern, (pm.Balanced, pm.NM)):
        for mask in kept:
            counts = rows_of_units(pattern, mask).sum(1)
            full = rows_of_units(pattern, torch.ones_like(mask)).all(1)
            assert counts[full].unique().numel() <= 1
            assert (counts > 0).all()
        if isinstance(pattern, pm.NM):
            exact = Fraction(4) * Fraction(min(sparsity, pattern.sparsity))
            assert abs(pruned / size * 4 - exact) <= 0.5 + 1e-6
        return
    for mask in kept:
        together = rows_of_units(pattern, mask)
        assert torch.equal(together.any(1), together.all(1))
    largest = max(rows_of_units(pattern, s).shape[1] for s in scores)
    assert abs(pruned - round(sparsity * size)) <= largest / 2


@settings(deadline=None, max_examples=150)
@given(PATTERN, SHAPES, SPARSITY, st.integers(0, 99), st.sampled_from([3, 1 << 30]))
def test_kept_units_score_at_least_as_high_as_pruned_ones(
    pattern: Pattern, shapes: list[tuple[int, ...]], sparsity: float, seed: int, levels: int
) -> None:
    """Kept entries score at least as high as pruned ones: within a block, or among the units of all layers."""
    scores = draw_scores(shapes, seed, levels)
    kept = pattern.select_masks(scores, sparsity)
    if isinstance(pattern, (pm.Balanced, pm.NM)):
        for score, mask in zip(scores, kept, strict=True):
            score, mask = rows_of_units(pattern, score), rows_of_units(pattern, mask)
            padding = score == 0
            lowest = score.masked_fill(~mask, INF).amin(1)
            highest = score.masked_fill(mask | padding, -INF).amax(1)
            assert (lowest >= highest).all()
        return
    order = 1 if getattr(pattern, "norm", 2) == 1 else 2
    norms = torch.cat([torch.linalg.vector_norm(rows_of_units(pattern, s), order, 1) for s in scores])
    whole = torch.cat([rows_of_units(pattern, m).all(1) for m in kept])
    if whole.any() and not whole.all():
        assert norms[whole].min() >= norms[~whole].max()


@settings(deadline=None, max_examples=100)
@given(PATTERN, SHAPES, SPARSITY, st.integers(0, 99))
def test_excluded_entries_are_kept_only_as_a_last_resort(
    pattern: Pattern, shapes: list[tuple[int, ...]], sparsity: float, seed: int
) -> None:
    scores = draw_scores(shapes, seed, 1 << 30)
    out = [torch.arange(rows_of_units(pattern, s).shape[0]) % 2 == 1 for s in scores]
    marked = []
    for score, dead in zip(scores, out, strict=True):
        if isinstance(pattern, (pm.Balanced, pm.NM)):
            marked.append(score.masked_fill(torch.rand(score.shape) < 0.5, -INF))
        else:
            rows = rows_of_units(pattern, score).masked_fill(dead[:, None], -INF)
            marked.append(from_rows_of_units(pattern, rows, score.shape))
    kept = pattern.select_masks(marked, sparsity)
    for score, mask in zip(marked, kept, strict=True):
        rows, on = rows_of_units(pattern, score), rows_of_units(pattern, mask)
        if isinstance(pattern, (pm.Balanced, pm.NM)):
            wrongly = (on & (rows == -INF)).any(1) & (~on & (rows > 0)).any(1)
            assert not wrongly.any()
    if not isinstance(pattern, (pm.Balanced, pm.NM)):
        alive = torch.cat([~d for d in out])
        whole = torch.cat([rows_of_units(pattern, m).all(1) for m in kept])
        assert whole[alive].all() or not whole[~alive].any()


def from_rows_of_units(pattern: Pattern, rows: Tensor, shape: torch.Size) -> Tensor:
    """Undo `rows_of_units`."""
    if not isinstance(pattern, pm.Block):
        return rows.reshape(shape)
    height, width = matrix_shape(shape)
    high, wide = pattern.shape[0] or height, pattern.shape[1] or width
    return rows.reshape(height // high, width // wide, high, wide).permute(0, 2, 1, 3).reshape(shape)


# ---- errors


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (pm.Balanced(block=8), r"blocks of 8 do not divide the rows of body\.0 \(6×12\): 4 would fit"),
        (pm.Balanced(blocks=5), r"5 blocks do not divide the rows of body\.0 \(6×12\): 1 would fit"),
        (pm.NM(4, 8), r"groups of 8 do not divide the rows of body\.0 \(6×12\): m=4 would fit"),
        (pm.Block((4, 4)), r"blocks of 4×4 do not divide body\.0 \(6×12\): Block\(\(2, 4\)\) would fit"),
        (pm.Block((None, 8)), r"blocks of 6×8 do not divide body\.0 \(6×12\): Block\(\(None, 4\)\) would fit"),
    ],
)
def test_shape_error_names_the_layer_and_a_pattern_that_fits(pattern: Pattern, message: str) -> None:
    with pytest.raises(pm.PomonaError, match=message) as caught:
        pattern.validate_shape("body.0", torch.Size([6, 3, 2, 2]))
    assert "exclude=['body.0']" in str(caught.value)
    pattern.validate_shape("body.0", torch.Size([8, 40]))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("balanced", "block= or blocks="),
        ("balanced(block=4, blocks=2)", "either block= or blocks=, got block=4, blocks=2"),
        ("balanced(block=0)", "at least one"),
        ("nm(n=4, m=4)", r"needs 0 < n < m, got NM\(4, 4\)"),
        ("nm(n=2)", "m"),
        ("nm", "n"),
        ("block", "shape"),
        ("block(shape=3)", "shape"),
        ("block(shape=(2, 0))", "shape"),
        ("filter(norm=3)", "norm must be 1 or 2, got 3"),
        ("nm(n=2.5, m=4)", "n takes int, got 2.5"),
        ("balansed(block=4)", "unknown pattern 'balansed': did you mean 'balanced'"),
        ("filter(nrm=1)", "unknown option of pattern 'filter' 'nrm': did you mean 'norm'"),
        ("filter(norm=", "not of the form"),
    ],
)
def test_invalid_specs_are_refused(spec: str, message: str) -> None:
    with pytest.raises(pm.PomonaError, match=message):
        PATTERNS.resolve(spec)


def test_a_pattern_can_be_written_in_three_ways() -> None:
    assert (
        PATTERNS.resolve("balanced(block=4)")
        == PATTERNS.resolve({"name": "balanced", "block": 4})
        == pm.Balanced(block=4)
    )
    assert PATTERNS.resolve({"name": "block", "shape": [2, 4]}) == pm.Block((2, 4))


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("2:4", pm.NM(2, 4)),
        (" 1:16 ", pm.NM(1, 16)),
        ("nm(2, 4)", pm.NM(2, 4)),
        ("nm(2, m=4)", pm.NM(2, 4)),
        ("balanced(32)", pm.Balanced(block=32)),
        ("balanced(None, 4)", pm.Balanced(blocks=4)),
        ("filter", pm.Filter()),
        ("filter(1)", pm.Filter(norm=1)),
        ("block(4, 2)", pm.Block((4, 2))),
        ("block(4, 2, 1)", pm.Block((4, 2), norm=1)),
        ("block((4, 2), norm=1)", pm.Block((4, 2), norm=1)),
        ("block([4, 2])", pm.Block((4, 2))),
        ("block(None, 64)", pm.Block((None, 64))),
    ],
)
def test_text_may_leave_the_names_of_options_out(text: str, pattern: Pattern) -> None:
    assert PATTERNS.resolve(text) == pattern


@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from([1, 2]))
def test_text_without_names_is_what_python_makes_of_it(first: int, second: int, norm: int) -> None:
    kept, group = min(first, second), max(first, second) + 1
    assert PATTERNS.resolve(f"{kept}:{group}") == PATTERNS.resolve(f"nm({kept}, {group})") == pm.NM(kept, group)
    assert PATTERNS.resolve(f"balanced({first})") == pm.Balanced(first)
    assert PATTERNS.resolve(f"block({first}, {second}, {norm})") == pm.Block((first, second), norm)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4:2", r"needs 0 < n < m, got NM\(4, 2\)"),
        ("2:", "unknown pattern '2:'"),
        ("nm(2)", "pattern 'nm' needs m"),
        ("nm(2, 4, 8)", "takes only n, m without a name, got 8 too"),
        ("nm(2, 4, n=3)", "got n twice: 2 and 3"),
        ("nm(2.0, 4)", "n takes int, got 2.0"),
        ("block(4)", r"needs a shape \(h, w\) of whole numbers ≥ 1, one of which may be None, got \(4,\)"),
        ("unstructured(3)", "pattern 'unstructured' takes no option without a name, got 3 too"),
        ("Balanced(32)", "did you mean 'balanced'"),
        ("NM(2, 4)", "did you mean 'nm'"),
        ("blanced(32)", "did you mean 'balanced'"),
        ("filters", "did you mean 'filter'"),
    ],
)
def test_wrong_text_is_answered_with_what_is_right(text: str, message: str) -> None:
    with pytest.raises(pm.PomonaError, match=message):
        PATTERNS.resolve(text)


def test_patterns_declare_what_they_rank_and_remove() -> None:
    patterns = [pm.Unstructured(), pm.Balanced(block=4), pm.NM(2, 4), pm.Block((2, 2)), pm.Kernel(), pm.Filter()]
    assert [p.name for p in patterns if p.is_elementwise] == ["unstructured"]
    assert [p.name for p in patterns if p.ranks_units] == ["block", "kernel", "filter"]
    assert [p.name for p in patterns if p.removes_outputs] == ["filter"]
    assert [p.name for p in patterns if p.removes_coupled] == ["filter"]
    assert not pm.Filter(norms=False).removes_coupled
