"""Asymptotic extensions in appendices C and E of Qian & Klabjan (2021): estimates for wide layers, not bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri
from scipy.stats import ncx2

from ...errors import PomonaError, require
from .distributions import LATALA, Gaussian, Uniform
from .network import layer_shapes, lipschitz_product, propagated_error
from .pruning import KERNELS_ALPHA_LIMIT, WEIGHTS_ALPHA_LIMIT, resolve_pruning

EXTENSIONS = ("C.1", "C.2", "E.1", "E.2", "E.3")
GLOBAL_SHARE = 3  # E.3: global pruning removes at most this multiple of the mean share from one layer


@dataclass(frozen=True)
class Estimate:
    """The error that an extension makes likely for wide layers; it is not a bound."""

    name: str
    removed: float  # ‖W − W*‖ of a layer
    error: float
    label: str = "asymptotic"


def estimate(
    extension: str,
    widths: Sequence[int],
    *,
    alpha: float | None = None,
    sparsity: float | None = None,
    law: Uniform | Gaussian | None = None,
    kernel: int = 3,
    correlation: float = 0.0,
    lipschitz: float | Sequence[float] = 1.0,
    radius: float = 1.0,
    C: float = LATALA,
) -> Estimate:
    """Return an estimate of sup ‖f − F‖ for wide layers, in a case that the theorems do not cover.

    C.1: magnitude pruning of any law, every removed entry as large as the threshold (Chibisov's limit), and Lemma 4.
    C.2: 2-D kernels of least L1 norm; the norm is normal, a block's norm at most its kernel's, and Lemma 4.
    E.1: magnitude pruning of Gaussian weights with an equal `correlation` between any two weights of a layer.
    E.2: random pruning without replacement, which removes √ρ of a layer's norm.
    E.3: global magnitude pruning, up to three times the mean share in one layer.
    """
    if extension not in EXTENSIONS:
        raise PomonaError(f"unknown extension '{extension}': choose one of {', '.join(EXTENSIONS)}.")
    law = law or Gaussian()
    alpha_limit = KERNELS_ALPHA_LIMIT if extension == "C.2" else WEIGHTS_ALPHA_LIMIT
    # Nothing here depends on δ; any valid value passes the check.
    widths, alpha, pruned = resolve_pruning(widths, alpha, sparsity, "sharp", 0.5, alpha_limit, radius=radius, C=C)
    depth, inner = len(widths) - 1, layer_shapes(widths)[1:-1]
    multiple = GLOBAL_SHARE if extension == "E.3" else 1
    shares = [min(1.0, multiple * n / (a * b)) for n, (a, b) in zip(pruned, inner, strict=True)]
    norms = [law.expected(*s) for s in layer_shapes(widths)]
    layers = list(zip(shares, inner, strict=True))
    if extension == "C.2":
        removed = [C * 3 * math.sqrt(rows) * kernel_norm_quantile(law, kernel, rows, r) for r, (rows, _) in layers]
        norms = [kernel * n for n in norms]  # each tap has its share of a fan-in of q² n
    elif extension == "E.1":
        require(
            isinstance(law, Gaussian), f"E.1 is about Gaussian weights, not {type(law).__name__}: leave out the law."
        )
        removed = [correlated_norm(*s, law.K1 / max(s), correlation, r) for r, s in layers]
        norms = [correlated_norm(*s, law.K1 / max(s), correlation) for s in layer_shapes(widths)]
    elif extension == "E.2":
        removed = [math.sqrt(r) * law.expected(*s) for r, s in layers]
    else:
        removed = [3 * C * math.sqrt(max(s)) * magnitude_quantile(law, r, max(s)) for r, s in layers]
    error = radius * lipschitz_product(lipschitz, depth - 1) * propagated_error(norms, removed)
    return Estimate(extension, max(removed), error)


def correlated_norm(rows: int, columns: int, variance: float, correlation: float, share: float = 1.0) -> float:
    """Return an estimate of the mean norm of the `share` of smallest entries of an equally correlated Gaussian matrix.

    The entries are √r Z + √(1 − r) ε with one Z for all, and so independent with mean √r Z once Z is given. Those below
    the threshold have a mean then, which adds a matrix of rank one, and a variance. The result is averaged over Z.
    """
    require(0 <= correlation < 1, f"a correlation of all weights lies between 0 and 1, got {correlation:g}.")
    z = np.linspace(0.0, 8.0, 801)  # the result is even in Z
    weight = np.exp(-(z**2) / 2)
    mean, std = math.sqrt(correlation) * z, math.sqrt(1 - correlation)
    threshold = std * np.sqrt(ncx2.ppf(share, 1, (mean / std) ** 2)) if share < 1 else np.full_like(z, np.inf)
    low, high = (-threshold - mean) / std, (threshold - mean) / std
    inside = ndtr(high) - ndtr(low)
    densities = [np.exp(-(edge**2) / 2) / math.sqrt(2 * math.pi) for edge in (low, high)]
    edges = [np.where(np.isfinite(edge), edge, 0) * f for edge, f in zip((low, high), densities, strict=True)]
    slope = std * (densities[0] - densities[1])
    first = mean * inside + slope
    second = (mean**2 + std**2) * inside + 2 * mean * slope + std**2 * (edges[0] - edges[1])
    spread = np.sqrt(np.maximum(second - first**2, 0))
    norms = math.sqrt(rows * columns) * np.abs(first) + (math.sqrt(rows) + math.sqrt(columns)) * spread
    return math.sqrt(variance) * float(np.trapezoid(norms * weight, z) / np.trapezoid(weight, z))


def removed_norm(rows: int, columns: int, sparsity: float, law: Uniform | Gaussian | None = None) -> float:
    """Return the limit of ‖W − W*‖ when the smallest entries are pruned: (√rows + √columns) √E[w²; removed].

    For uniform weights in a square matrix it is 2 K ρ^(3/2) / √3, where the paper has c2 ρ.
    """
    law = law or Uniform()
    n = max(rows, columns)
    threshold = magnitude_quantile(law, sparsity, n)
    if isinstance(law, Uniform):
        second_moment = sparsity * threshold**2 / 3
    else:
        z = threshold * math.sqrt(n / law.K)
        second_moment = law.K / n * (sparsity - 2 * z * math.exp(-(z**2) / 2) / math.sqrt(2 * math.pi))
    return (math.sqrt(rows) + math.sqrt(columns)) * math.sqrt(second_moment)


def magnitude_quantile(law: Uniform | Gaussian, sparsity: float, n: int) -> float:
    """Return the magnitude below which a share `sparsity` of the weights lies."""
    if isinstance(law, Uniform):
        return law.K * sparsity / math.sqrt(n)
    return math.sqrt(law.K / n) * float(ndtri((1 + sparsity) / 2)) if sparsity < 1 else math.inf


def kernel_norm_quantile(law: Uniform | Gaussian, kernel: int, channels: int, sparsity: float) -> float:
    """Return the L1 norm below which a share `sparsity` of the q × q kernels lies, by the central limit theorem."""
    taps, second_moment = kernel**2, law.K1 / channels / kernel**2
    # E|w| over the root of E w².
    ratio = math.sqrt(3) / 2 if isinstance(law, Uniform) else math.sqrt(2 / math.pi)
    mean = math.sqrt(second_moment) * ratio
    return max(0.0, taps * mean + math.sqrt(taps * (second_moment - mean**2)) * float(ndtri(sparsity)))
