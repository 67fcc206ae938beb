"""Solvers for the theorems of Qian & Klabjan (2021): largest sparsity, smallest width, and a model's share."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pomona.errors import PomonaError
from pomona.theory import bounds
from pomona.theory.bounds import FORMS, Moments, Uniform, cnn, largest, magnitude, narrowest, random

NET = (64, 1024, 1024, 10)


def test_theorem_2_is_vacuous_below_a_width_of_fifty_thousand() -> None:
    """At three layers, with norms known for certain."""
    known = {"law": Moments(), "norms": [1.0] * 3}
    width = narrowest(random, (1, 1, 1, 1), **known)
    assert width is not None
    assert 40_000 < width < 70_000
    for d, vacuous in ((width, False), (width - 1, True)):
        alpha = bounds.most_alpha((1, d, d, 1))
        assert random((1, d, d, 1), alpha=alpha, **known).vacuous is vacuous


@pytest.mark.parametrize("theorem", [magnitude, random])
@pytest.mark.parametrize("form", sorted(FORMS))
@given(epsilon=st.floats(0.05, 20), delta=st.floats(0.01, 0.5))
@settings(max_examples=8, deadline=None)
def test_largest_returns_the_largest_sparsity(theorem: bounds.Theorem, form: str, epsilon: float, delta: float) -> None:
    found = largest(theorem, NET, epsilon, delta, **FORMS[form])
    if found is None:
        return
    assert found.meets(epsilon, delta)
    if found.alpha > 1e-4:
        assert not theorem(NET, alpha=0.999 * found.alpha, delta=delta, **FORMS[form]).meets(epsilon, delta)


def test_theorem_2_allows_no_sparsity_in_the_practical_range() -> None:
    assert largest(random, NET, 100.0, 0.5) is None
    assert largest(random, NET, 100.0, 0.5, sharp=True) is not None


@pytest.mark.parametrize("form", sorted(FORMS))
def test_narrowest_returns_the_smallest_width(form: str) -> None:
    width = narrowest(magnitude, (4, 4, 4, 4), 1.0, 0.1, alpha=0.4, **FORMS[form])
    assert width is not None
    wide, narrow = ((4, d, d, 4) for d in (width, width - 1))
    assert magnitude(wide, alpha=0.4, delta=0.1, **FORMS[form]).meets(1.0, 0.1)
    assert not magnitude(narrow, alpha=0.4, delta=0.1, **FORMS[form]).meets(1.0, 0.1)


def test_printed_closed_form_of_the_width_is_not_below_the_solution() -> None:
    """max{C1^(1/α), (C2/ε)^(1/α), (C3/δ)^(1/α), C4 + C5 log 1/δ}, with c0 and δ0 given."""
    given = {"c0": 2.0, "delta0": 0.01, "printed": True, "law": Uniform(1.0)}
    constants, alpha, epsilon, delta = magnitude((256,) * 4, alpha=0.5, **given).constants, 0.5, 0.5, 0.1
    closed = max(
        constants["C1"] ** (1 / alpha),
        (constants["C2"] / epsilon) ** (1 / alpha),
        (constants["C3"] / delta) ** (1 / alpha),
        constants["C4"] + constants["C5"] * math.log(1 / delta),
    )
    solved = narrowest(magnitude, (4, 4, 4, 4), epsilon, delta, alpha=alpha, **given)
    assert solved is not None
    assert solved <= closed <= 100 * solved


def test_no_width_guarantees_a_fixed_sparsity() -> None:
    assert narrowest(magnitude, (4, 4, 4, 4), 0.1, 0.1, sparsity=0.5) is None
    assert narrowest(magnitude, (4, 4, 4, 4), 100.0, 0.1, sparsity=0.5, sharp=True) is not None


def test_betas_minimize_the_error_at_the_given_confidence() -> None:
    """Compare with a grid where the theorem is not vacuous: a large image, 1×1 kernels."""
    given = {"image": 10**6, "kernel": 1, "alpha": 0.5, "delta": 0.5, "C1": 0.1, "C2": 0.03}
    best = cnn((3, 4096, 4096, 10), **given)
    assert best.probability >= 0.5 - 1e-9
    grid = itertools.product(np.linspace(0.02, 0.98, 25), np.linspace(0.005, 0.12, 12))
    tried = [cnn((3, 4096, 4096, 10), beta1=float(a), beta2=float(b), **given) for a, b in grid]
    assert best.error <= min(one.error for one in tried if one.probability >= 0.5) * 1.001


def test_theorem_3_is_vacuous_for_usual_networks_at_every_width() -> None:
    one = cnn((3, 64, 64, 64, 10), image=32, alpha=0.2)
    assert one.vacuous
    assert narrowest(cnn, (3, 64, 64, 64, 10), image=32, alpha=0.2) is None
    assert not cnn((3, 64, 64, 64, 10), image=32, alpha=0.2, sharp=True).vacuous


def test_fraction_per_round_of_a_model() -> None:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 5)
    )
    nn.init.uniform_(model[3].weight, -0.1, 0.1)
    widths, K = bounds.measure_chain(model)
    assert widths == (20, 300, 300, 5)
    assert pytest.approx(0.1 * math.sqrt(300), rel=0.02) == K
    fraction = bounds.fraction_per_round(model, 1.0, 0.1)
    assert fraction == pytest.approx(largest(magnitude, widths, 1.0, 0.1, sharp=True, law=Uniform(K)).sparsity)
    assert bounds.fraction_per_round(model, 2.0, 0.1) > fraction > 0
    assert bounds.fraction_per_round(model, 1e-9, 0.1) is None
    assert bounds.fraction_per_round(widths, 1.0, 0.1, law=Uniform(K)) == fraction


def test_models_other_than_chains_are_refused() -> None:
    with pytest.raises(PomonaError, match="has Conv2d"):
        bounds.fraction_per_round(nn.Sequential(nn.Conv2d(1, 1, 3)), 1.0, 0.1)
    with pytest.raises(PomonaError, match="three linear layers or more, got 1"):
        bounds.fraction_per_round(nn.Linear(3, 3), 1.0, 0.1)
