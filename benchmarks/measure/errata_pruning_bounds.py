"""Simulations behind the errata of Qian and Klabjan (2021), "A Probabilistic Approach to Pruning"."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from errata_comparison import Comparison, mean_and_error, measurement
from scipy.stats import binom

from pomona.theory import bounds, qian_tables

ALPHAS = 0.01, 0.1, 0.5  # of Table 3


@measurement
def measure_required_entries(draw: np.random.Generator) -> Iterator[Comparison]:
    """Compare the number of entries that Lemma 6 needs with those that (3) and (4) allow to prune."""
    for d in (128, 1024, 51_000):
        alphas = [bounds.most_alpha((d,) * 5, form) for form in ("corrected", "printed")]
        yield Comparison(f"d = {d:,}", d * math.log(d), 0.0, *(math.floor(d ** (2 - 2 * alpha)) for alpha in alphas))


@measurement
def measure_chernoff_tail(draw: np.random.Generator) -> Iterator[Comparison]:
    """Compare the logarithm of a binomial tail with Lemma 5."""
    for mu in (100, 200):
        tail = float(binom.logsf(3 * mu - 1, 10**6, mu / 10**6))
        yield Comparison(
            f"μ = {mu}", tail, 0.0, *(bounds.lemma5(mu, 2.0, printed=printed) for printed in (False, True))
        )


@measurement
def measure_share_hit(draw: np.random.Generator) -> Iterator[Comparison]:
    """Compare the share of entries hit by draws with replacement with N/D."""
    d = 32
    for alpha in ALPHAS:
        N = math.floor(d ** (2 - alpha))
        hit = np.array([len(np.unique(draw.integers(d * d, size=N))) / d**2 for _ in range(4000)])
        yield Comparison(f"d = {d}, α = {alpha}", *mean_and_error(hit), bounds.distinct(N, d**2), N / d**2)


@measurement
def measure_removed_row_norm(draw: np.random.Generator) -> Iterator[Comparison]:
    """Compare the norm of a row of the removed part with Table 3."""
    d, draws = 32, 2000
    for alpha in ALPHAS:
        N = math.floor(d ** (2 - 2 * alpha))
        hit = np.zeros((draws, d * d), dtype=bool)
        np.put_along_axis(hit, draw.integers(d * d, size=(draws, N)), True, axis=1)
        square, error = mean_and_error((np.where(hit, draw.standard_normal(hit.shape), 0) ** 2).sum(1) / d**2)
        root = math.sqrt(square)
        printed = qian_tables.PRINTED_TABLE3["N(0, 1/d)", alpha, d][0]
        yield Comparison(f"α = {alpha}", root, error / (2 * root), math.sqrt(bounds.distinct(N, d**2)), printed)


@measurement
def measure_norm_constant(draw: np.random.Generator) -> Iterator[Comparison]:
    """Compare the norm of oblong matrices, over the three terms of Lemma 4, with the constant of Table 3."""
    printed = qian_tables.PRINTED_TABLE3["U(−√3/√d, √3/√d)", None, 512][-1]
    for m, n in ((1, 10**6), (10, 40_960), (64, 1024)):
        right = bounds.oblong(bounds.LATALA, m / n)
        terms = math.sqrt(n / 3) + math.sqrt(m / 3) + (m * n / 5) ** 0.25
        norms = np.array([np.linalg.norm(draw.uniform(-1, 1, (m, n)), 2) for _ in range(20)])
        yield Comparison(f"{m} × {n:,}", *mean_and_error(norms / terms), right, printed)


@measurement
def measure_last_layer_norm(draw: np.random.Generator) -> Iterator[Comparison]:
    """Compare the norm of the last layer of Theorem 3 with C_5/p."""
    d, classes, C1, C = 32, 10, 0.1, bounds.LATALA
    C2 = 3 * C1**2
    for p in (8, 16, 32):
        layers = (draw.normal(0, math.sqrt(C1 / d) / p, (classes, d * p**2)) for _ in range(100))
        found = mean_and_error(np.array([np.linalg.norm(W, 2) for W in layers]))
        yield Comparison(
            f"p = {p}",
            *found,
            bounds.Moments(C1, C2).expected(classes, d * p**2),
            C * (2 * math.sqrt(C1) + C2**0.25) / p,
        )


@measurement
def measure_no_repeat_probability(draw: np.random.Generator) -> Iterator[Comparison]:
    """Compare the probability that N draws hit N entries with the exact one; E.2's own form cannot be verified."""
    D = 1024
    for N in (8, 32, 64):
        fresh = np.diff(np.sort(draw.integers(D, size=(200_000, N)), axis=1), axis=1).all(1)
        right = math.exp(bounds.no_repeat(N, D))
        yield Comparison(f"d = 32, N = {N}", *mean_and_error(fresh.astype(float)), right, None)


@measurement
def measure_chibisov_limit(draw: np.random.Generator) -> Iterator[Comparison]:
    """Compare the distribution of a small order statistic with Theorem 4."""
    n, m = 10**8, 10**4
    head = draw.gamma(m, size=200_000)
    uniform = head / (head + draw.gamma(n - m + 1, size=head.shape))
    for u in (-2.0, 0.0, 2.0):
        x = (m + u * math.sqrt(m)) / n
        limits = (bounds.theorem4(x, m, n, float, printed=printed) for printed in (False, True))
        yield Comparison(f"u = {u:g}", *mean_and_error((uniform < x).astype(float)), *limits)


@measurement
def measure_maximum_norm(draw: np.random.Generator) -> Iterator[Comparison]:
    """Compare the expected maximum over frequencies with (37)."""
    q, draws = 3, 2000
    for d, p in ((8, 8), (4, 16)):
        kernels = draw.normal(0, 1 / (p * math.sqrt(d)), (draws, d, d, q, q))
        frequencies = np.fft.fft2(kernels, (p, p)).transpose(0, 3, 4, 1, 2)
        norms = np.linalg.norm(frequencies, 2, axis=(-2, -1)).reshape(draws, -1)
        taps = np.linalg.norm(kernels.transpose(0, 3, 4, 1, 2), 2, axis=(-2, -1))
        yield Comparison(
            f"d = {d}, p = {p}", *mean_and_error(norms.max(1)), float(taps.mean(0).sum()), float(norms.mean(0).max())
        )
