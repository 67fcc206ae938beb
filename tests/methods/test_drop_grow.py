"""Dropping weights, growing them and dividing growth between layers, with exact counts."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import Net, make_sgd, train
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference_methods import keep_largest
from torch import Tensor

import pomona as pm
from pomona.methods import _drop_grow, make_pruner

shapes = st.one_of(
    st.tuples(st.integers(1, 5), st.integers(1, 9)),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 40)),
)


@st.composite
def layers(draw: Any) -> tuple[Tensor, Tensor]:
    """Draw a score, often with ties, and a mask with any number of kept entries."""
    shape = draw(shapes)
    size = math.prod(shape)
    kind = draw(st.sampled_from(["distinct", "ties", "zero"]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    score = {
        "distinct": generator.random(size),
        "ties": generator.integers(0, 3, size).astype(float),
        "zero": np.zeros(size),
    }[kind]
    mask = keep_largest(generator.random(size), draw(st.integers(0, size)))
    return torch.from_numpy(score).reshape(shape), torch.from_numpy(mask).reshape(shape)


@settings(max_examples=300, deadline=None)
@given(layers(), st.data())
def test_drop_removes_the_lowest_to_the_exact_count(layer: tuple[Tensor, Tensor], data: st.DataObject) -> None:
    score, mask = layer
    active = int(mask.sum())
    count = data.draw(st.integers(0, active))
    kept = _drop_grow.drop_lowest(pm.Unstructured(), score, mask, count)
    assert int(kept.sum()) == active - count
    assert not (kept & ~mask).any()
    expected = keep_largest(np.where(mask.numpy(), score.numpy(), -np.inf), active - count)
    assert np.array_equal(kept.numpy(), expected)


@settings(max_examples=300, deadline=None)
@given(layers(), st.data())
def test_grow_adds_the_highest_to_the_exact_count(layer: tuple[Tensor, Tensor], data: st.DataObject) -> None:
    score, mask = layer
    active = data.draw(st.integers(int(mask.sum()), mask.numel()))
    new = _drop_grow.grow_highest(pm.Unstructured(), score, mask, active)
    assert int(new.sum()) == active
    assert not (mask & ~new).any(), "a kept entry was dropped"
    expected = keep_largest(np.where(mask.numpy(), np.inf, score.numpy()), active)
    assert np.array_equal(new.numpy(), expected)


def test_counts_of_a_large_layer_are_exact() -> None:
    size = 3_000_001
    mask = torch.zeros(size, dtype=torch.bool)
    mask[:1_234_567] = True
    score = torch.rand(size, generator=torch.Generator().manual_seed(0))
    kept = _drop_grow.drop_lowest(pm.Unstructured(), score, mask, 123_457)
    assert int(kept.sum()) == 1_111_110
    assert int(_drop_grow.grow_highest(pm.Unstructured(), score, kept, 1_234_567).sum()) == 1_234_567


@pytest.mark.parametrize(("share", "count", "part"), [(0.3, 10, 3), (0.29, 100, 29), (0.3, 9, 2), (0.57, 100, 57)])
def test_floor_share_by_hand(share: float, count: int, part: int) -> None:
    assert _drop_grow.floor_share(share, count) == part  # 0.29 · 100 is 28.999999999999996 in floating point


# ---- dividing


@pytest.mark.parametrize(
    ("total", "weights", "room", "shares"),
    [
        (10, [1, 1], [9, 9], [5, 5]),
        (10, [3, 1], [9, 9], [8, 2]),  # 7.5 and 2.5: one is left over, remainders are equal, the earlier layer gets it
        (10, [1, 3], [9, 9], [3, 7]),  # 2.5 and 7.5, likewise
        (7, [1, 1, 1], [9, 9, 9], [3, 2, 2]),
        (10, [8, 1, 1], [2, 9, 9], [2, 4, 4]),  # the others share what the first has no room for
        (10, [6, 3, 1], [2, 9, 9], [2, 6, 2]),  # in proportion: 8 as 3 : 1
        (10, [6, 3, 1], [2, 5, 9], [2, 5, 3]),
        (5, [0, 0], [9, 9], [3, 2]),  # all weights are zero: equal shares
        (5, [1, 0], [3, 9], [3, 2]),
        (9, [1, 1], [0, 9], [0, 9]),
        (0, [1, 1], [3, 3], [0, 0]),
        (6, [1e-300, 1e300], [3, 3], [3, 3]),
    ],
)
def test_shares_by_hand(total: int, weights: list[float], room: list[int], shares: list[int]) -> None:
    names = "abc"[: len(weights)]
    actual = _drop_grow.divide_growth(
        total, dict(zip(names, weights, strict=True)), dict(zip(names, room, strict=True))
    )
    assert [actual[name] for name in names] == shares


@pytest.mark.parametrize(
    ("total", "weights", "room", "shares"),
    [
        (10, [6, 3, 1], [2, 9, 9], [2, 5, 3]),  # 6, 3, 1: four over, 3 + 2 and 1 + 2 (in proportion 6 and 2)
        (10, [6, 3, 1], [2, 4, 9], [2, 4, 4]),
        (12, [6, 3, 3, 0], [3, 9, 9, 9], [3, 4, 4, 1]),  # three over, one each
    ],
)
def test_even_shares_by_hand(total: int, weights: list[float], room: list[int], shares: list[int]) -> None:
    names = "abcd"[: len(weights)]
    rooms = dict(zip(names, room, strict=True))
    actual = _drop_grow.divide_growth(total, dict(zip(names, weights, strict=True)), rooms, evenly=True)
    assert [actual[name] for name in names] == shares


def test_more_growth_than_room_is_refused() -> None:
    with pytest.raises(pm.PomonaError, match="7 weights must grow and there is room for 6"):
        _drop_grow.divide_growth(7, {"a": 1.0, "b": 1.0}, {"a": 3, "b": 3})


weights = st.one_of(
    st.just(0.0), st.floats(1e-12, 1e12), st.sampled_from([1.0, 1 / 3, 0.1]), st.integers(0, 10**9).map(float)
)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(weights, st.integers(0, 10**7)), min_size=1, max_size=60), st.floats(0, 1), st.booleans())
def test_shares_are_exact_proportional_and_fit(layers: list[tuple[float, int]], part: float, evenly: bool) -> None:
    room = {f"layer{i}": r for i, (_, r) in enumerate(layers)}
    asked = {f"layer{i}": w for i, (w, _) in enumerate(layers)}
    total = int(part * sum(room.values()))
    shares = _drop_grow.divide_growth(total, asked, room, evenly=evenly)
    assert shares.keys() == asked.keys()
    assert sum(shares.values()) == total
    assert all(isinstance(shares[n], int) and 0 <= shares[n] <= room[n] for n in room)
    whole = sum(Fraction(w) for w in asked.values())
    if whole == 0:
        return
    fair = {n: total * Fraction(w) / whole for n, w in asked.items()}
    if all(fair[n] <= room[n] for n in room):
        assert all(abs(shares[n] - fair[n]) <= 1 for n in room), "a share is further off than one"
    unfilled = [n for n in room if shares[n] < room[n]]
    for n in unfilled:
        # A layer with room left gets at least its proportional share.
        assert shares[n] >= math.floor(fair[n]) - 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(weights, st.integers(0, 50)), min_size=1, max_size=6), st.integers(1, 9), st.floats(0, 1))
def test_shares_are_multiples_of_the_unit_size(layers: list[tuple[float, int]], quantum: int, part: float) -> None:
    room = {f"layer{i}": r * quantum for i, (_, r) in enumerate(layers)}
    asked = {f"layer{i}": w for i, (w, _) in enumerate(layers)}
    total = int(part * sum(room.values()))
    shares = _drop_grow.divide_growth(total, asked, room, dict.fromkeys(room, quantum))
    assert all(value % quantum == 0 and 0 <= value <= room[n] for n, value in shares.items())
    assert 2 * abs(total - sum(shares.values())) <= quantum, "the sum is not the nearest that whole units give"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(weights, st.integers(0, 30), st.integers(1, 9), st.floats(0, 1)), min_size=1, max_size=6),
    st.floats(0, 1),
)
def test_shares_complete_units_that_are_partly_kept(layers: list[tuple[float, int, int, float]], part: float) -> None:
    """Layers with units of several sizes and any number of kept weights end at whole units, near the sum asked for."""
    sizes = {f"layer{i}": units * quantum for i, (_, units, quantum, _) in enumerate(layers)}
    quanta = {f"layer{i}": quantum for i, (_, _, quantum, _) in enumerate(layers)}
    base = {f"layer{i}": int(share * sizes[f"layer{i}"]) for i, (*_, share) in enumerate(layers)}
    asked = {f"layer{i}": weight for i, (weight, *_) in enumerate(layers)}
    room = {name: sizes[name] - base[name] for name in sizes}
    total = int(part * sum(room.values()))
    shares = _drop_grow.divide_growth(total, asked, room, quanta, base)
    assert all((base[n] + shares[n]) % quanta[n] == 0 and 0 <= shares[n] <= room[n] for n in sizes)
    least = sum(-base[n] % quanta[n] for n in sizes)  # what completes the units that are partly kept
    assert abs(sum(shares.values()) - max(total, least)) <= max(quanta.values()) / 2


# ---- methods in training


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["set", "rigl", "sparse_momentum", "dsr"]),
    st.sampled_from([0.0, 0.02, 0.3, 0.5, 0.9, 0.98, 0.999]),
    st.sampled_from([0.01, 0.3, 0.5, 0.99]),
    st.tuples(st.integers(1, 9), st.integers(1, 7), st.integers(1, 8)),
    st.integers(0, 5),
)
def test_any_sparsity_and_share_keeps_the_count(
    name: str, sparsity: float, share: float, widths: tuple[int, int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    sizes = (5, *widths, 3)
    model = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in pairwise(sizes))).double()
    options: dict[str, Any] = {"sparsity": sparsity, "every": 1, "seed": seed, "include": [str(i) for i in range(4)]}
    options |= {
        "set": {"share": share},
        "rigl": {"share": share, "until": 1.0},
        "sparse_momentum": {"rate": share, "floor": 0.0},
        "dsr": {"churn": share, "threshold": share},
    }[name]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruner = make_pruner({"name": name, **options})
    try:
        pruner.attach(model, optimizer, total_steps=6)
    except pm.PomonaError as error:
        assume("so that no layer is empty" not in str(error) and "would start with none" not in str(error))
        raise
    total = sum(int(mask.sum()) for mask in pruner.masks().values())
    x = torch.randn(4, 5, dtype=torch.float64)
    for _ in range(6):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        assert sum(int(mask.sum()) for mask in pruner.masks().values()) == total
        assert not any(model.get_parameter(n)[~mask].any() for n, mask in pruner.masks().items())


PATTERNS = [
    (pm.Unstructured(), 0.5),
    (pm.NM(2, 4), None),
    (pm.Balanced(block=4), 0.5),
    (pm.Balanced(block=4), 0.75),  # one is kept in each block
    (pm.Block((2, 2)), 0.5),
    (pm.Kernel(), 0.5),
    (pm.Filter(), 0.5),
]


@pytest.mark.parametrize(("pattern", "sparsity"), PATTERNS, ids=lambda value: str(value))
@pytest.mark.parametrize("name", ["set", "rigl", "sparse_momentum", "dsr"])
def test_every_pattern_changes_its_mask_and_keeps_its_count(name: str, pattern: Any, sparsity: float | None) -> None:
    options: dict[str, Any] = {"pattern": pattern, "every": 4, "allocation": "uniform", "sparsity": sparsity}
    if name == "rigl":
        options |= {"until": 1.0, "share": 0.5}
    if name == "dsr":
        options |= {"threshold": 0.05, "churn": 0.3}
    if pattern.removes_outputs:
        with pytest.raises(pm.PomonaError, match="a filter of zeros behind a ReLU never learns"):
            make_pruner({"name": name, **options})
        return
    if pattern.sparsity is not None and name in ("dsr", "sparse_momentum"):
        with pytest.raises(pm.PomonaError, match="moves weights between layers"):
            make_pruner({"name": name, **options})
        return
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = make_pruner({"name": name, **options}).attach(model, optimizer, total_steps=40)
    kept = {n: int(mask.sum()) for n, mask in pruner.masks().items()}
    quanta = {pattern.unit_size(mask.shape) for mask in pruner.masks().values()}
    # Where layers have units of several sizes, some counts cannot be reached when weights move between layers.
    slack = max(quanta) / 2 if len(quanta) > 1 else 0
    for t in range(40):
        train(model, optimizer, [t])
        now = {n: int(mask.sum()) for n, mask in pruner.masks().items()}
        if name in ("set", "rigl"):
            assert now == kept
        assert abs(sum(now.values()) - sum(kept.values())) <= slack
        for n, mask in pruner.masks().items():
            assert has_pattern(pattern, mask), f"the mask of {n} does not have the pattern"
            assert not model.get_parameter(n)[~mask].any()
    flips = [entry["flips"] for entry in pruner.history[1:]]
    assert sum(map(bool, flips)) >= len(flips) // 2, f"the masks hardly change: {flips}"


def has_pattern(pattern: Any, mask: Tensor) -> bool:
    """Return whether a mask has the structure of a pattern."""
    rows = mask.reshape(len(mask), -1)
    if isinstance(pattern, pm.NM):
        return bool((rows.reshape(-1, 4).sum(1) == 2).all())
    if isinstance(pattern, pm.Balanced):
        return len(rows.reshape(-1, pattern.block).sum(1).unique()) == 1
    if isinstance(pattern, pm.Block):
        units = rows.unflatten(1, (-1, 2)).unflatten(0, (-1, 2)).movedim(2, 1).flatten(2)
    elif isinstance(pattern, pm.Kernel):
        units = mask.reshape(*mask.shape[:2], -1)
    elif isinstance(pattern, pm.Filter):
        units = rows
    else:
        return True
    return torch.equal(units.any(-1), units.all(-1))
