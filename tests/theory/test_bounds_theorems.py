"""Theorems 1 to 3 of Qian & Klabjan (2021): by hand, by Monte Carlo, and against printed forms that are wrong.

Monte-Carlo tests have a fixed seed; "within 4 standard errors" is the error bar unless a test says another.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import keep_smallest, spectral_norm

from pomona.errors import PomonaError
from pomona.theory import bounds, spectral
from pomona.theory.bounds import FORMS, Gaussian, Moments, Uniform, cnn, magnitude, random
from pomona.theory.bounds.network import layer_shapes
from pomona.theory.bounds.theorem2 import removed_norm_level

NET = (64, 1024, 1024, 10)


# ---- formulas by hand


def test_printed_theorem_1_matches_a_hand_computation() -> None:
    """Four layers of width 256, α = 1/2: d^−α = 1/16; c0 = 2, δ0 = 0.01, C = 0.6, K = 1."""
    one = magnitude((256,) * 5, alpha=0.5, law=Uniform(1.0), C=0.6, c0=2.0, delta0=0.01, lipschitz=1.5, printed=True)
    rare = math.exp(-4 * 0.01 * 256)
    c2 = 0.6 * (2 * math.sqrt(2) + 24**0.25)
    assert one.pruned == (256, 256)
    assert one.sparsity == 1 / 256
    assert one.error == pytest.approx(3 / 16 * 1.5**3 * 2**3)
    assert one.probability == pytest.approx((1 - 2 * rare) * (1 - 2 * c2 / 16 - 5 * 2 * rare))
    assert one.constants["c2"] == pytest.approx(c2)
    assert one.constants["C3"] == pytest.approx(14 * c2)
    assert one.constants["C5"] == pytest.approx(25)


def test_corrected_theorem_1_matches_a_hand_computation() -> None:
    one = magnitude((256,) * 5, alpha=0.5, law=Uniform(1.0), c0=2.0, delta0=0.01)
    expected = math.sqrt(math.pi / 2) * 257 / 65537
    assert one.error == pytest.approx(4 * ((2 + 1 / 16) ** 2 - 4))
    assert one.probability == pytest.approx(1 - 2 * 16 * expected - 4 * math.exp(-10.24))


def test_printed_theorem_2_matches_a_hand_computation() -> None:
    one = random(
        (81,) * 4, alpha=0.4, law=Moments(1.0, 1.8, 0.6), C=0.6, norms=[2, 3, 4], deltas=[0.01] * 3, printed=True
    )
    t, c2 = 81**-0.1, 0.6 * (2 * math.sqrt(3) + 1.8**0.25)
    assert one.error == pytest.approx(t * 24)
    assert one.probability == pytest.approx((1 - 81 ** (-1 / 3)) ** 2 * 0.99 * (1 - c2 * t - 0.03))


def test_printed_theorem_3_matches_a_hand_computation() -> None:
    """(11) with p = p0 = 4096, q = 1, d = 256, l = 3, β1 = 0.5, β2 = 0.05, α = 0.4."""
    one = cnn(
        (3, 256, 256, 10), image=4096, kernel=1, alpha=0.4, C1=1.0, C2=1.0, beta1=0.5, beta2=0.05, C=1.0, printed=True
    )
    b, g = 4096**-0.5, 256**-0.05
    assert one.error == pytest.approx(b * 4096 * 16 * (b * (b + g) - b**2))
    lost = (2 * math.sqrt(3) + 1) / 4096 * 256 ** (0.05 - 0.1) + (2 + 1) * 3 / 4096**0.5
    assert one.probability == pytest.approx((1 - 256 ** (-1 / 3)) ** 2 * (1 - lost))
    assert one.pruned == (math.floor(256**1.6),)


def test_corrected_theorem_3_uses_the_input_channels_and_the_last_norm() -> None:
    given = {"image": 4096, "kernel": 1, "alpha": 0.4, "C1": 1.0, "C2": 16.0, "beta1": 0.5, "beta2": 0.05, "C": 1.0}
    one, other = (cnn((3, 256, 256, 10), **FORMS[form], **given) for form in ("corrected", "printed"))
    last = (1 + math.sqrt(10 / 256) / 4096 + (160 / 256) ** 0.25 / 64) * 4096**0.5 / 4
    assert one.error == pytest.approx(other.error * math.sqrt(3 / 256) * last / 4096**-0.5)


def test_last_layer_of_theorem_3_exceeds_its_printed_norm() -> None:
    """Entries with E w² = C1/p²d: ‖W_l‖ ≤ p^−β1 is said to have probability 1 − C5/p^(1−β1) = 0.78, and never holds.

    40 Gaussian layers of seed 0: p = 16, d = 32, ten classes, C1 = 0.1, β1 = 0.6. The corrected level holds.
    """
    draw, p, d, classes, C1, b = np.random.default_rng(0), 16, 32, 10, 0.1, 0.6
    found = np.array([spectral_norm(draw.normal(0, math.sqrt(C1 / d) / p, (classes, d * p**2))) for _ in range(40)])
    C3 = bounds.LATALA * (2 * math.sqrt(C1) + (3 * C1**2) ** 0.25)
    stated = 1 - C3 / p ** (1 - b)
    assert stated > 0.78
    assert np.mean(found <= p**-b) == 0
    level = Moments(C1, 3 * C1**2).expected(classes, d * p**2)
    terms = math.sqrt(C1) + math.sqrt(C1 * classes / d) / p + (3 * C1**2 * classes / d) ** 0.25 / 4
    assert level == pytest.approx(bounds.oblong(bounds.LATALA, classes / (d * p**2)) * terms)
    assert bounds.LATALA * terms < np.mean(found) <= level  # the C of square matrices is too small here
    assert np.mean(found <= level * p ** (1 - b) / C3) >= stated


# ---- Monte Carlo


@pytest.mark.parametrize(("widths", "alpha"), [((8, 64, 64, 4), 0.2), ((20, 30, 60, 30, 5), 0.4)])
def test_sharp_theorem_1_holds_in_all_draws(widths: tuple[int, ...], alpha: float) -> None:
    """30 networks of seed 0 at δ = 0.1: at most 3 + 3 may exceed it, and none does."""
    draw, one = np.random.default_rng(0), magnitude(widths, alpha=alpha, delta=0.1, sharp=True)
    for _ in range(30):
        layers = [draw.uniform(-1, 1, s) * math.sqrt(3 / max(s)) for s in layer_shapes(widths)]
        removed = [spectral_norm(keep_smallest(W, N)) for W, N in zip(layers[1:-1], one.pruned, strict=True)]
        assert bounds.propagated_error([spectral_norm(W) for W in layers], removed) <= one.error


def test_sharp_theorem_2_holds_in_all_draws() -> None:
    """30 Gaussian networks of seed 0, removed at random with replacement."""
    draw, widths = np.random.default_rng(0), (8, 64, 64, 4)
    one = random(widths, alpha=0.2, delta=0.1, law=Gaussian(1.0), sharp=True)
    for _ in range(30):
        layers = [draw.normal(0, 1 / math.sqrt(max(s)), s) for s in layer_shapes(widths)]
        mask = np.zeros(64 * 64, dtype=bool)
        mask[draw.integers(64 * 64, size=one.pruned[0])] = True
        removed = [spectral_norm(layers[1] * mask.reshape(64, 64))]
        assert bounds.propagated_error([spectral_norm(W) for W in layers], removed) <= one.error


def test_sharp_theorem_2_holds_for_a_layer_of_few_rows() -> None:
    """20 × 100,000 uniform weights of seed 0, a fifth of them drawn. The C of square matrices would be too small."""
    draw, law, rows, columns = np.random.default_rng(0), Uniform(), 20, 100_000
    mask = np.zeros(rows * columns)
    mask[draw.integers(mask.size, size=mask.size // 5)] = math.sqrt(3 / columns)
    found = spectral_norm(draw.uniform(-1, 1, (rows, columns)) * mask.reshape(rows, columns))
    level = removed_norm_level(law, bounds.LATALA, (rows, columns), mask.size // 5, 0.01, 0.01)
    tail = law.exceeded(0.0, columns, 0.01)
    square = bounds.LATALA / bounds.oblong(bounds.LATALA, rows / columns)
    assert square * (level - tail) + tail < found <= level


def test_sharp_theorem_3_holds_in_all_draws() -> None:
    """20 Gaussian networks of seed 0: 8 channels on circular 6×6, 3×3 kernels drawn with replacement, δ = 0.2."""
    draw, d, p, q, classes = np.random.default_rng(0), 8, 6, 3, 4
    one = cnn((3, d, d, classes), image=p, kernel=q, alpha=0.6, delta=0.2, sharp=True)
    scale, cube = 1 / (p * math.sqrt(d)), p * math.sqrt(3)
    for _ in range(20):
        first, inner = (draw.normal(0, scale, (d, c, q, q)) for c in (3, d))
        mask = np.zeros(d * d, dtype=bool)
        mask[draw.integers(d * d, size=one.pruned[0])] = True
        removed = inner * mask.reshape(d, d, 1, 1)
        norms = [spectral.conv_norm(torch.from_numpy(W), p) for W in (first, inner, removed)]
        last = spectral_norm(draw.normal(0, scale, (classes, d * p**2)))
        assert cube * bounds.propagated_error([*norms[:2], last], [norms[2]]) <= one.error


def test_only_the_corrected_condition_prunes_enough() -> None:
    """(3) and (4) should give ⌊D^(1−α)⌋ ≥ d log d: at d = 128 the printed α = 0.662 prunes 26, and 622 are needed."""
    needed = 128 * math.log(128)
    alphas = {form: bounds.most_alpha((128,) * 4, form) for form in ("printed", "corrected")}
    assert alphas == pytest.approx({"printed": 0.66195, "corrected": 0.33644}, abs=1e-5)
    assert math.floor(128 ** (2 * (1 - alphas["printed"]))) == 26 < needed
    assert math.floor(128 ** (2 * (1 - alphas["corrected"]))) >= needed
    assert bounds.most_alpha((1, 128, 128, 1), "kernels") == pytest.approx(0.6729, abs=1e-4)
    assert bounds.most_alpha((1, 1024, 1024, 1), "kernels") == pytest.approx(0.7205, abs=1e-4)


# ---- properties


@given(
    theorem=st.sampled_from([magnitude, random]),
    form=st.sampled_from(sorted(FORMS)),
    alpha=st.floats(0.05, 0.3),
    depth=st.integers(3, 8),
    width=st.integers(256, 4096),
)
@settings(max_examples=60, deadline=None)
def test_error_grows_with_radius_lipschitz_and_pruning(
    theorem: bounds.Theorem, form: str, alpha: float, depth: int, width: int
) -> None:
    widths = (10, *[width] * (depth - 1), 10)
    one = theorem(widths, alpha=alpha, **FORMS[form])
    assert theorem(widths, alpha=alpha, **FORMS[form], radius=3.0).error == pytest.approx(3 * one.error)
    twice = theorem(widths, alpha=alpha, **FORMS[form], lipschitz=2.0)
    assert twice.error == pytest.approx(2 ** (depth - 1) * one.error)
    less = theorem(widths, alpha=0.9 * alpha, **FORMS[form])
    assert less.error >= one.error
    assert less.probability <= one.probability + 1e-12
    assert one.loss_gap() == pytest.approx(math.sqrt(2) * one.error)


@given(st.lists(st.floats(0.1, 5), min_size=3, max_size=6), st.floats(0, 2))
@settings(max_examples=50, deadline=None)
def test_propagated_error_equals_the_difference_of_products(norms: list[float], removed: float) -> None:
    inner = norms[1:-1]
    products = math.prod(n + removed for n in inner) - math.prod(inner)
    assert bounds.propagated_error(norms, [removed] * len(inner)) == pytest.approx(
        norms[0] * norms[-1] * products, abs=1e-9
    )


def test_sparsity_counts_distinct_entries() -> None:
    """With replacement some draws repeat, so the same sparsity takes more of them than without."""
    repeated, distinct = (random(NET, sparsity=0.5, replacement=r, sharp=True) for r in (True, False))
    assert repeated.sparsity == pytest.approx(0.5, rel=1e-4)
    assert distinct.sparsity == pytest.approx(0.5, rel=1e-4)
    assert repeated.pruned[0] / 1024**2 == pytest.approx(math.log(2), rel=1e-4)
    kernels = cnn((3, 64, 64, 64, 10), image=32, sparsity=0.3, sharp=True)
    assert kernels.sparsity == pytest.approx(0.3, abs=1e-3)
    with pytest.raises(PomonaError, match="63.2 % on average, and 70.0% are asked for: draw distinct ones"):
        random(NET, sparsity=0.7)


def test_without_replacement_failures_of_rows_and_columns_add() -> None:
    wide = (10, 10**8, 10**8, 10)
    with_it, without = (random(wide, alpha=0.3, replacement=r, norms=[1.0] * 3) for r in (True, False))
    assert without.error == with_it.error
    assert without.probability < with_it.probability


# ---- invalid arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": 1.0}, "between 0, where all is pruned, and 1"),
        ({"alpha": 0.0}, "got 0"),
        ({}, "say how much is pruned"),
        ({"alpha": 0.2, "sparsity": 0.1}, "give one"),
        ({"sparsity": 1.5}, "sparsity must lie between 0 and 1, got 1.5"),
        ({"sparsity": 1e-9}, "less than one of the 1,048,576 weights"),
        ({"alpha": 0.2, "delta": 0.0}, "between 0 and 1, got 0"),
        ({"alpha": 0.2, "printed": True, "sharp": True}, "leave out sharp or printed"),
        ({"alpha": 0.2, "radius": -1.0}, "radius must be positive"),
        ({"alpha": 0.2, "lipschitz": math.inf}, "lipschitz 1 must be positive and finite"),
        ({"alpha": 0.2, "lipschitz": [1.0]}, "2 activations, and so as many Lipschitz constants, got 1"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, float], message: str) -> None:
    for theorem in (magnitude, random):
        with pytest.raises(PomonaError, match=message):
            theorem(NET, **arguments)


def test_error_for_too_narrow_layers_names_a_sufficient_width() -> None:
    with pytest.raises(PomonaError, match=r"assumption \(ii\).*100 < 784: widen them to 784"):
        magnitude((784, 300, 100, 10), alpha=0.2)
    assert not magnitude((784, 300, 100, 10), alpha=0.2, sharp=True).vacuous
    with pytest.raises(
        PomonaError, match=r"\(3\) and \(4\): alpha=0.35 .* at most 0.3364, and hidden layers of 387 would"
    ):
        random((10, 128, 128, 10), alpha=0.35)
    assert random((10, 387, 387, 10), alpha=0.35).vacuous
    with pytest.raises(PomonaError, match="hidden layers of 387 would"):
        random((10, 386, 386, 10), alpha=0.35)
    with pytest.raises(PomonaError, match="no width would do"):
        random((10, 128, 128, 10), alpha=0.6)
    with pytest.raises(
        PomonaError, match="no width would do"
    ):  # the printed condition depends on the outputs, whose number is fixed
        random((64, 1024, 1024, 10), alpha=0.5, printed=True)
    with pytest.raises(PomonaError, match="four widths"):
        magnitude((10, 20, 10), alpha=0.2)
    with pytest.raises(PomonaError, match="as many channels as the image has, but 8 < 9"):
        cnn((9, 8, 8, 4), image=32, alpha=0.2, sharp=True)
    with pytest.raises(PomonaError, match="one number d of channels"):
        cnn((3, 64, 128, 10), image=32, alpha=0.2)


def test_delta_below_the_failure_of_the_norms_is_refused() -> None:
    with pytest.raises(PomonaError, match="delta=0.05 cannot be met .* fail with 0.3"):
        random(NET, alpha=0.2, norms=[1.0] * 3, deltas=[0.1] * 3)
    with pytest.raises(PomonaError, match="3 layers, got 2 and 3"):
        random(NET, alpha=0.2, norms=[1.0] * 2, deltas=[0.01] * 3)
    with pytest.raises(PomonaError, match="give both or neither"):
        magnitude(NET, alpha=0.2, c0=2.0)
    with pytest.raises(PomonaError, match="K2 ≥ 4"):
        Moments(2.0, 1.0)


@pytest.mark.parametrize("depth", [3, 4, 6])
def test_theorem_2_counts_uneven_masks_once(depth: int) -> None:
    """Even masks are a factor of the probability; the term 2(k−1) d^(−1/3) of statement (II) would count them again."""
    d, alpha, fail = 10**9, 0.3, 0.001
    given = {"alpha": alpha, "law": Moments(1.0, 1.8), "norms": [2.0] * depth, "deltas": [fail] * depth, "delta": 0.9}
    markov = (depth - 2) * bounds.LATALA * (2 * math.sqrt(3) + 1.8**0.25) * d ** (-alpha / 4)
    ours, theirs = (random((d,) * (depth + 1), **FORMS[form], **given) for form in ("corrected", "printed"))
    even = (1 - d ** (-1 / 3)) ** (2 * (depth - 2))
    lost = sum((depth - i) * fail for i in range(1, depth))
    assert theirs.probability == pytest.approx(even * (1 - fail) * (1 - markov - lost), rel=1e-12)
    even = (1 - d ** -(3 * math.log(3) - 3)) ** (2 * (depth - 2))
    assert ours.probability == pytest.approx(even * (1 - markov - depth * fail), rel=1e-12)
