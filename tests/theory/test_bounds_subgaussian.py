"""Sub-Gaussian and dependent weights (Lemma 2 and E.1 of Qian & Klabjan, 2021): the constants, and simulations.

Monte-Carlo tests have a fixed seed.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import keep_smallest, spectral_norm
from scipy import stats

from pomona.errors import PomonaError
from pomona.theory import bounds
from pomona.theory.bounds import CorrelatedGaussian, DependentRows, Gaussian, SubGaussian
from pomona.theory.bounds.extensions import correlated_norm
from pomona.theory.bounds.theorem2 import removed_norm_level

SHAPES = [(40, 40), (20, 80), (80, 20)]
Array = np.ndarray


# ---- the constant of Lemma 2


def log_gaussian_excess(u: Array, std: float) -> Array:
    """Return log E(G − u)₊ of a Gaussian of this standard deviation."""
    z = u / std
    return np.log(std) + stats.norm.logpdf(z) + np.log1p(-z * np.exp(stats.norm.logsf(z) - stats.norm.logpdf(z)))


def test_both_bounds_of_the_excess_are_below_the_dominating_gaussian() -> None:
    """On a fine grid up to 12 standard deviations, with the slack of the grid's step; 1.35 would not be enough."""
    u = np.linspace(0, 12, 120_001)
    v = (u + np.sqrt(u**2 + 4)) / 2  # the best v: v − u − 1/v = 0
    by_variance = -np.log(2 * (np.sqrt(1 + u**2) + u))
    by_definition = v**2 / 2 - u * v - 1 - np.log(v)
    excess = np.minimum(by_variance, by_definition)
    margin = log_gaussian_excess(u, bounds.DOMINATION) - excess
    # Both sides fall by less than 13 per unit, so that nothing happens between two points.
    assert margin.min() > 13 * (u[1] - u[0])
    assert (log_gaussian_excess(u, 1.35) < excess).any()
    assert (np.diff(margin[u > 2]) > 0).all()  # and beyond the grid the margin only grows


@given(st.floats(0.02, 0.98), st.floats(0, 6))
@settings(max_examples=100, deadline=None)
def test_centred_coins_are_below_the_gaussian_in_the_convex_order(p: float, u: float) -> None:
    """A centred Bernoulli(p) has the variance proxy (1 − 2p) / 2 log((1 − p)/p), by Kearns and Saul."""
    proxy = 0.25 if abs(p - 0.5) < 1e-6 else (1 - 2 * p) / (2 * math.log((1 - p) / p))
    t = u * math.sqrt(proxy)
    excess = p * max(1 - p - t, 0) + (1 - p) * max(-p - t, 0)
    assert excess <= math.exp(log_gaussian_excess(np.array(t), bounds.DOMINATION * math.sqrt(proxy))) + 1e-15


# ---- norms of random matrices


def draw_signs(draw: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Return random signs, which have the variance proxy 1."""
    return draw.choice([-1.0, 1.0], shape)


def draw_mixed(draw: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Return entries of three laws of proxy 1, side by side: signs, uniform, and a rare coin."""
    p = 0.02
    coin = (draw.random(shape) < p) - p
    rare = coin / math.sqrt((1 - 2 * p) / (2 * math.log((1 - p) / p)))
    which = draw.integers(3, size=shape)
    return np.choose(which, [draw_signs(draw, shape), draw.uniform(-math.sqrt(3), math.sqrt(3), shape), rare])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [draw_signs, draw_mixed])
def test_norms_of_subgaussian_matrices_respect_lemma_2(make, shape: tuple[int, int]) -> None:
    """200 matrices: the mean is below `expected`, and a share 0.2 at most exceeds the level of 0.2."""
    draw, law = np.random.default_rng(0), SubGaussian(2.0)
    scale = math.sqrt(law.K / max(shape))
    found = np.array([spectral_norm(scale * make(draw, shape)) for _ in range(200)])
    assert found.mean() <= law.expected(*shape)
    assert (found > bounds.norm_level(law, shape, 0.2)).mean() <= 0.2
    if make is draw_signs:  # whose variance is the proxy: the bound is within its constant of the truth
        assert law.expected(*shape) < 1.1 * bounds.DOMINATION * found.mean()


def draw_autoregression(draw: np.random.Generator, shape: tuple[int, int], r: float = 0.6) -> tuple[Array, float]:
    """Return a Gaussian matrix with correlations r^|i−j| along rows and columns, and its largest eigenvalue."""
    roots, largest = [], 1.0
    for size in shape:
        covariance = r ** np.abs(np.subtract.outer(np.arange(size), np.arange(size)))
        roots.append(np.linalg.cholesky(covariance))
        largest *= float(np.linalg.eigvalsh(covariance)[-1])
    return roots[0] @ draw.standard_normal(shape) @ roots[1].T, largest


@pytest.mark.parametrize("shape", SHAPES)
def test_correlated_gaussian_weights_respect_the_bounds_of_independent_ones(shape: tuple[int, int]) -> None:
    """200 matrices scaled so that the largest eigenvalue of their covariance is K/n, whole and with zeros."""
    draw, n = np.random.default_rng(1), max(shape)
    law = CorrelatedGaussian(1.0)
    mask = draw.random(shape) < 0.05
    whole, part = [], []
    for _ in range(200):
        W, largest = draw_autoregression(draw, shape)
        W /= math.sqrt(n * largest)
        whole.append(spectral_norm(W))
        part.append(spectral_norm(W * mask))
    assert np.mean(whole) <= law.expected(*shape)
    assert np.mean(np.array(whole) > bounds.norm_level(law, shape, 0.2)) <= 0.2
    in_row, in_column = int(mask.sum(1).max()), int(mask.sum(0).max())
    mean = bounds.latala(law, bounds.LATALA, *shape, in_row, in_column, int(mask.sum()))
    assert np.mean(part) <= mean
    assert np.mean(np.array(part) > law.exceeded(mean, n, 0.2)) <= 0.2
    assert bounds.CorrelatedGaussian(2.0).expected(3, 5) == Gaussian(2.0).expected(3, 5)


def draw_sphere_rows(draw: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Return rows that are uniform on a sphere of radius √columns: dependent entries, of variance proxy 1."""
    rows = draw.standard_normal(shape)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True) * math.sqrt(shape[1])


def draw_repeated_columns(draw: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Return Gaussian rows whose two halves are the same, scaled to variance proxy 1: a pair has the eigenvalue 2."""
    half = draw.standard_normal((shape[0], shape[1] // 2))
    return np.hstack([half, half]) / math.sqrt(2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [draw_sphere_rows, draw_repeated_columns])
def test_norms_of_matrices_with_dependent_rows_respect_the_net(make, shape: tuple[int, int]) -> None:
    """100 matrices of dependent entries, whole and with zeros: no norm is above the level of probability 0.2."""
    draw, law = np.random.default_rng(2), DependentRows(0.5)
    mask, level = draw.random(shape) < 0.02, bounds.norm_level(law, shape, 0.2)
    for _ in range(100):
        W = make(draw, shape) * math.sqrt(law.K / max(shape))
        assert spectral_norm(W) <= level
        assert spectral_norm(W * mask) <= law.removed_level(*shape, int(mask.sum()), 0.2)
    assert law.removed_level(*shape, int(mask.sum()), 0.2) < level


def test_the_net_matches_a_hand_computation() -> None:
    """At ε = ½ a net has 5^columns points and the cosine 7/8; the best ε is a little better."""
    shape, failure = (30, 50), 0.1
    by_hand = (math.sqrt(30) + math.sqrt(2 * (50 * math.log(5) + math.log(10)))) / (7 / 8) / math.sqrt(50)
    level = DependentRows(4.0).norm_level(*shape, failure)
    assert 0.95 * by_hand < level / 2 <= by_hand
    few = DependentRows(4.0).removed_level(*shape, 9, failure)
    assert few == pytest.approx(2 * (3 + math.sqrt(2 * math.log(10))) / math.sqrt(50))
    assert DependentRows(4.0).removed_level(*shape, 1500, failure) == level


# ---- Theorem 2 with these laws


def test_theorem_2_for_subgaussian_weights_is_that_of_the_dominating_gaussian() -> None:
    widths = (32, 4096, 4096, 10)
    for form in bounds.FORMS.values():
        ours = bounds.random(widths, alpha=0.2, law=SubGaussian(2.0), **form)
        theirs = bounds.random(widths, alpha=0.2, law=Gaussian(2.0 * bounds.DOMINATION**2), **form)
        assert (ours.error, ours.probability) == (theirs.error, theirs.probability)


@pytest.mark.parametrize("law", [SubGaussian(1.0), DependentRows(1.0)])
def test_linear_networks_of_signs_are_as_close_as_theorem_2_says(law: SubGaussian | DependentRows) -> None:
    """30 networks of random signs, pruned at random: sup ‖f − F‖ is the norm of the difference of two products."""
    draw, widths = np.random.default_rng(3), (16, 64, 64, 64, 8)
    bound = bounds.random(widths, alpha=0.4, law=law, sharp=True, delta=0.1)
    assert bound.proven is isinstance(law, DependentRows)
    for _ in range(30):
        dense = pruned = np.eye(16)
        for k, shape in enumerate(bounds.network.layer_shapes(widths)):
            W = draw_signs(draw, shape) / math.sqrt(max(shape))
            dense = W @ dense
            if 0 < k < len(widths) - 2:
                W = W.copy()
                W.flat[draw.integers(W.size, size=bound.pruned[k - 1])] = 0
            pruned = W @ pruned
        assert spectral_norm(dense - pruned) <= bound.error


def test_removed_weights_of_signs_are_below_their_level() -> None:
    """100 matrices of 64 × 64 signs, 200 draws of entries that stay: a share 0.2 at most exceeds the level."""
    draw, shape, law = np.random.default_rng(4), (64, 64), SubGaussian(1.0)
    level = removed_norm_level(law, bounds.LATALA, shape, 200, 0.05, 0.15)
    above = 0
    for _ in range(100):
        removed = np.zeros(shape)
        positions = draw.integers(removed.size, size=200)
        removed.flat[positions] = draw_signs(draw, shape).flat[positions] / 8
        above += spectral_norm(removed) > level
    assert above <= 20
    assert level < bounds.norm_level(law, shape, 0.15)


def test_what_the_lemmas_do_not_cover_is_refused() -> None:
    widths = (32, 64, 64, 10)
    for law in (SubGaussian(), Gaussian(), CorrelatedGaussian(), DependentRows()):
        with pytest.raises(bounds.NotCovered, match=f"needs uniform weights, not {type(law).__name__}"):
            bounds.magnitude(widths, alpha=0.2, law=law)
    for form in ("printed", "corrected"):
        with pytest.raises(bounds.NotCovered, match="Lemma 4 needs independent weights"):
            bounds.random(widths, alpha=0.2, law=DependentRows(), **bounds.FORMS[form])
    for law in (SubGaussian, DependentRows, CorrelatedGaussian):
        with pytest.raises(PomonaError, match="K must be positive"):
            law(-1.0)


# ---- E.1: magnitude pruning of equally correlated weights


def test_without_correlation_e1_is_the_limit_of_independent_weights() -> None:
    assert correlated_norm(64, 256, 1 / 256, 0.0, 0.3) == pytest.approx(
        bounds.removed_norm(64, 256, 0.3, Gaussian(1.0)), rel=1e-6
    )
    assert correlated_norm(64, 256, 1 / 256, 0.0) == pytest.approx(Gaussian(1.0).expected(64, 256), rel=1e-6)


@pytest.mark.parametrize("correlation", [0.005, 0.05, 0.5])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_norms_of_equally_correlated_weights_are_near_the_estimate(correlation: float, share: float) -> None:
    """The estimate adds the norms of a matrix of rank one and of a random one, so it is up to √2 too large."""
    draw, d = np.random.default_rng(5), 96
    found = []
    for _ in range(300):
        common, own = draw.standard_normal(), draw.standard_normal((d, d))
        W = (math.sqrt(correlation) * common + math.sqrt(1 - correlation) * own) / math.sqrt(d)
        found.append(spectral_norm(keep_smallest(W, round(share * d * d))))
    error = np.std(found) / math.sqrt(len(found))
    estimate = correlated_norm(d, d, 1 / d, correlation, share)
    assert np.mean(found) - 4 * error <= estimate <= math.sqrt(2) * np.mean(found) + 4 * error


def test_e1_refuses_other_laws_and_correlations() -> None:
    widths = (32, 64, 64, 10)
    with pytest.raises(PomonaError, match="E.1 is about Gaussian weights, not Uniform"):
        bounds.estimate("E.1", widths, sparsity=0.3, law=bounds.Uniform())
    for correlation in (-0.1, 1.0):
        with pytest.raises(PomonaError, match="a correlation of all weights lies between 0 and 1"):
            bounds.estimate("E.1", widths, sparsity=0.3, correlation=correlation)
    errors = [bounds.estimate("E.1", widths, sparsity=0.3, correlation=r).error for r in (0, 0.01, 0.1)]
    assert errors == sorted(errors)
