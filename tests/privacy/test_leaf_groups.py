"""Index groups within parameters: the authors' sizes, that no group spans two parameters, and the cost of a draw."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from private_training import make_budget, make_data, make_step

from pomona.errors import PomonaError
from pomona.privacy import IndexMechanism, Source
from pomona.privacy.index_mechanism import leaf_group_size


@pytest.mark.parametrize(
    ("entries", "group", "size"),
    [
        (512, 256, 256),
        (320, 256, 160),
        (576, 256, 192),
        (432, 256, 216),
        (10, 256, 10),
        (300, 128, 100),
        (257, 256, 129),
    ],
)
def test_group_sizes_are_the_authors(entries, group, size):
    assert leaf_group_size(entries, group) == size


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 700), min_size=1, max_size=6), st.integers(1, 256), st.floats(0.01, 1.0))
def test_groups_tile_each_parameter_and_keep_something_of_it(leaves, group, keep):
    mechanism = IndexMechanism(keep, theta=0.0, group=group, leaves=tuple(leaves))
    sizes, kept = mechanism.groups(sum(leaves))
    assert set(itertools.accumulate(leaves)) <= set(itertools.accumulate(sizes))
    assert all(1 <= m <= n for m, n in zip(kept, sizes, strict=True))
    gradient = torch.randn(sum(leaves), generator=torch.Generator().manual_seed(1))
    mask = mechanism.sample(gradient, Source(seed=1))
    assert [int(part.sum()) for part in mask.split(sizes)] == kept


def test_exact_top_k_is_taken_within_each_parameter():
    mechanism = IndexMechanism(0.5, theta=math.inf, group=256, leaves=(4, 2))
    mask = mechanism.sample(torch.tensor([1.0, -5.0, 3.0, 2.0, 0.1, -0.2]))
    assert mask.tolist() == [False, True, True, False, False, True]


def test_a_draw_costs_what_it_says_by_enumeration():
    """P(I | I₀) over all index sets of two parameters of 3 and 2 entries: the largest log-ratio is the stated ε."""
    mechanism = IndexMechanism(0.34, epsilon=1.2, group=8, leaves=(3, 2))
    sizes, kept = mechanism.groups(5)
    assert (sizes, kept) == ([3, 2], [1, 1])
    theta = mechanism.theta_for(5)
    sets = list(itertools.product(range(3), range(2)))

    def probabilities(center):
        weights = [math.exp(-2 * theta * sum(a != b for a, b in zip(one, center, strict=True))) for one in sets]
        return [weight / sum(weights) for weight in weights]

    ratios = [
        math.log(p / q)
        for one, other in itertools.product(sets, sets)
        for p, q in zip(probabilities(one), probabilities(other), strict=True)
    ]
    assert max(ratios) == pytest.approx(1.2) == pytest.approx(mechanism.cost(5))
    gradient, drawn = torch.tensor([9.0, 1.0, 1.0, 1.0, 9.0]), Counter()
    source = Source(seed=7)
    for _ in range(4000):
        mask = mechanism.sample(gradient, source)
        drawn[int(mask[:3].nonzero()), int(mask[3:].nonzero())] += 1
    for one, probability in zip(sets, probabilities((0, 1)), strict=True):
        assert drawn[one] / 4000 == pytest.approx(probability, abs=5 * math.sqrt(probability / 4000))


def test_a_step_draws_within_each_parameter():
    model, step = make_step(
        noiseless=True, method="gip", keep=0.25, schedule="constant", grouping="parameter", group=64,
        budget=make_budget(share=0.1, index=1.0),
    )  # fmt: skip
    x, y = make_data()
    rows = step.draw()
    before = [p.detach().clone() for p in model.parameters()]
    step(x[rows], y[rows])
    moved = [int((p != old).sum()) for p, old in zip(model.parameters(), before, strict=True)]
    sizes, kept = step.mechanism(0).groups(step.size)
    limits, start = [], 0
    for parameter in model.parameters():
        count = 0
        while count < parameter.numel():
            count, start = count + sizes[start], start + 1
        limits.append(start)
    expected = [sum(kept[a:b]) for a, b in zip([0, *limits], limits, strict=False)]
    assert all(0 < found <= limit for found, limit in zip(moved, expected, strict=True))
    assert step.options()["grouping"] == "parameter"


def test_bad_groupings_are_refused():
    with pytest.raises(PomonaError, match="did you mean 'parameter'"):
        make_step(grouping="parameters")
    with pytest.raises(PomonaError, match="needs the size of a group"):
        make_step(grouping="parameter", group=None)
    with pytest.raises(PomonaError, match="keep is a share"):
        IndexMechanism(3, theta=0.0, leaves=(4,))
    with pytest.raises(PomonaError, match="have 4 entries, and the gradient has 5"):
        IndexMechanism(0.5, theta=0.0, leaves=(4,)).sample(torch.ones(5))
