"""Allocation of sparsity to layers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

import pomona as pm
from pomona.allocation import erk_sparsities, select, uniform_sparsities, validate_allocation

SHAPES = st.lists(st.lists(st.integers(1, 64), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8)


def test_erk_worked_out_by_hand() -> None:
    # Densities ∝ (10+10)/100 and (20+30)/600: 0.2 ε and ε/12. At 80 % of 700 weights, 140 are left:
    # 20 ε + 50 ε = 140, so ε = 2, densities 0.4 and 1/6.
    assert erk_sparsities([(10, 10), (20, 30)], 0.8) == pytest.approx([0.6, 5 / 6])
    # At 30 %: ε = 7 would give the first layer 1.4; it stays dense and the second has 390 of 600.
    assert erk_sparsities([(10, 10), (20, 30)], 0.3) == pytest.approx([0, 1 - 390 / 600])


@settings(deadline=None)
@given(SHAPES, st.floats(0, 0.999))
def test_erk_solves_its_equation(shapes: list[tuple[int, ...]], sparsity: float) -> None:
    """Densities are min(1, ε Σ dims / Π dims), with the ε that a root finder gives."""
    sizes = [math.prod(shape) for shape in shapes]
    raw = [sum(shape) / size for shape, size in zip(shapes, sizes, strict=True)]
    wanted = (1 - sparsity) * sum(sizes)

    def excess(epsilon: float) -> float:
        return sum(min(1, epsilon * r) * n for r, n in zip(raw, sizes, strict=True)) - wanted

    sparsities = erk_sparsities(shapes, sparsity)
    epsilon = brentq(excess, 0, 1.001 / min(raw), xtol=1e-14) if excess(1 / min(raw)) > 0 else 1 / min(raw)
    assert sparsities == pytest.approx([1 - min(1, epsilon * r) for r in raw], abs=1e-6)
    assert sum((1 - s) * n for s, n in zip(sparsities, sizes, strict=True)) == pytest.approx(wanted)
    assert all(-1e-12 <= sparsity < 1 for sparsity in sparsities)


@settings(deadline=None)
@given(SHAPES, st.floats(0, 0.99), st.floats(0, 0.99))
def test_erk_sparsities_rise_with_the_overall_sparsity(shapes: list[tuple[int, ...]], one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert all(a <= b + 1e-9 for a, b in zip(erk_sparsities(shapes, low), erk_sparsities(shapes, high), strict=True))


def test_global_and_uniform_selection() -> None:
    scores = {"a": torch.tensor([[1.0, 2, 3, 4]]), "b": torch.tensor([[5.0, 6, 7, 8]])}
    over_all = select(scores, 0.5, pm.Unstructured(), "global(floor=0)")
    by_layer = select(scores, 0.5, pm.Unstructured(), "uniform")
    assert {k: m.int().tolist() for k, m in over_all.items()} == {"a": [[0, 0, 0, 0]], "b": [[1, 1, 1, 1]]}
    assert {k: m.int().tolist() for k, m in by_layer.items()} == {"a": [[0, 0, 1, 1]], "b": [[0, 0, 1, 1]]}
    assert uniform_sparsities([(2, 2), (3, 3)], 0.7) == [0.7, 0.7]


def test_invalid_allocations_are_refused() -> None:
    validate_allocation("erk")
    with pytest.raises(pm.PomonaError, match="unknown allocation 'erks': did you mean 'erk'"):
        pm.DPF(allocation="erks")
    with pytest.raises(pm.PomonaError, match="not erk"):
        pm.DPF(pattern=pm.NM(2, 4), allocation="erk")
