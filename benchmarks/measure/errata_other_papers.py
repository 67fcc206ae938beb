"""Simulations behind the errata of Yang et al. 2023, Yao et al. 2019, Lin et al. 2020 and Chijiwa et al. 2021."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from errata_comparison import SEED, Comparison, mean_and_error, measurement
from scipy.optimize import minimize_scalar
from scipy.special import gammaln
from scipy.stats import halfnorm

from pomona.theory import balanced, convergence, gip, iterand

# ---- Yang et al., 2023: Gradients Index Pruning


def simulate_mask_loss(draw: np.random.Generator, theta: float, d: int, m: int) -> tuple[float, float]:
    """Return the mean of ‖g − g ⊙ I‖² and its standard error, for masks of the mechanism and gradients of N(0, 1)."""
    draws = 1000
    i = np.arange(min(m, d - m) + 1)  # how many of the top m are replaced
    if math.isinf(theta):
        p = 1.0 * (i == 0)
    else:
        log_a = -2 * gammaln(i + 1) - gammaln(m - i + 1) - gammaln(d - m - i + 1) - 2 * theta * i
        p = np.exp(log_a - log_a.max())
    lost = []
    for swapped in draw.choice(i, size=draws, p=p / p.sum()):
        energy = np.sort(draw.standard_normal(d) ** 2)
        kept, cut = draw.permutation(d - m)[:swapped], d - m + draw.permutation(m)[:swapped]
        lost.append(energy[: d - m].sum() - energy[kept].sum() + energy[cut].sum())
    return mean_and_error(np.array(lost))


def compare_losses(draw: np.random.Generator, thetas: tuple[float, ...]) -> Iterator[Comparison]:
    """Yield a comparison for three shares k and each θ."""
    d = 10_000
    for k in (0.1, 0.3, 0.7):
        for theta in thetas:
            m = round(k * d)
            case = f"k = {k}, θ = {theta:g}".replace("inf", "∞")
            right, printed = (gip.pruning_mse(theta, d, m, **form) for form in ({"exact": False}, {"printed": True}))
            yield Comparison(case, *simulate_mask_loss(draw, theta, d, m), right, printed)


@measurement
def measure_top_k_loss(draw: np.random.Generator) -> Iterator[Comparison]:
    """Compare the squared loss of the exact top-k with equation (30)."""
    yield from compare_losses(draw, (math.inf,))


@measurement
def measure_noisy_top_k_loss(draw: np.random.Generator) -> Iterator[Comparison]:
    """Compare the squared loss of the randomized top-k with equations (34) and (37)."""
    yield from compare_losses(draw, (1.0, 2.0))


# ---- Yao et al., 2019: Balanced Sparsity

SCALES = 0.7, 1.3  # σ_w (or σ_i) and σ_x


@measurement
def measure_product_law(draw: np.random.Generator) -> Iterator[Comparison]:
    """Compare the characteristic function of a product of two Gaussians with (A.8)."""
    z = np.prod([draw.normal(0, s, 1_000_000) for s in SCALES], axis=0)
    for t in (0.5, 1.0, 2.0):
        right = float(balanced.characteristic(t, 1.0, *SCALES))
        yield Comparison(f"t = {t:g}", *mean_and_error(np.cos(t * z)), right, math.prod(SCALES) / math.sqrt(1 + t**2))


@measurement
def measure_mean_effect(draw: np.random.Generator) -> Iterator[Comparison]:
    """Compare the characteristic function of a product with one nonzero mean with (A.7)."""
    s_i, s_x = SCALES
    z = draw.normal(1, s_i, 1_000_000) * draw.normal(0, s_x, 1_000_000)
    for t in (0.5, 1.0, 2.0):
        v = 1 + (s_i * s_x * t) ** 2
        right = math.exp(-((s_x * t) ** 2) / (2 * v)) / math.sqrt(v)
        yield Comparison(f"t = {t:g}", *mean_and_error(np.cos(t * z)), right, v**-0.5)


@measurement
def measure_order_statistic_variance(draw: np.random.Generator) -> Iterator[Comparison]:
    """Compare the variance of the k-th smallest magnitude, times 10⁹, with (A.3)."""
    n, draws = 4096, 20_000
    for k in (200, 2048):
        # Rényi: the k-th smallest of n uniform draws is the share of k of n + 1 exponential gaps.
        head = draw.gamma(k, size=draws)
        x = 0.02 * halfnorm.ppf(head / (head + draw.gamma(n - k + 1, size=draws)))
        right, printed = (float(balanced.asymptotic(k, n, 0.02, printed=p)[1]) for p in (False, True))
        variance = float(x.var())
        yield Comparison(f"k = {k}", *(1e9 * v for v in (variance, variance * math.sqrt(2 / draws), right, printed)))


@measurement
def measure_output_variance(draw: np.random.Generator) -> Iterator[Comparison]:
    """Compare the variance that pruning adds to an output with (B.2) and (B.3)."""
    size, repeats = 256 * 256, 20
    for sparsity, block in ((0.5, None), (0.5, 32), (0.5, 8), (0.9, 32)):
        columns = block or size
        r = round(sparsity * columns)
        drawn = []
        for _ in range(repeats):
            w = np.abs(draw.normal(0, SCALES[0], (size // columns, columns)))
            removed = np.partition(w, r - 1, axis=1)[:, :r]
            drawn.append(np.mean((removed * draw.normal(0, SCALES[1], removed.shape)) ** 2))
        right = balanced.output_variance(sparsity, *SCALES, block)
        printed = balanced.output_variance_printed(sparsity, *SCALES, size, size // block if block else None)
        case = f"sparsity {sparsity:g}, {f'blocks of {block}' if block else 'no blocks'}"
        yield Comparison(case, *mean_and_error(np.array(drawn)), right, printed)


@measurement
def measure_block_ranks(draw: np.random.Generator) -> Iterator[Comparison]:
    """Compare the energy removed from small blocks with the ranks of (A.9)."""
    size, blocks = 65_536, 2_000_000
    for block in (2, 4, 8):
        half = block // 2
        removed = np.partition(np.abs(draw.standard_normal((blocks, block))), half - 1, axis=1)[:, :half]
        mu, var = balanced.asymptotic(np.arange(1, half + 1) * (size // block), size)
        right = balanced.removed_second_moment(0.5, block=block)
        yield Comparison(
            f"blocks of {block}", *mean_and_error((removed**2).mean(1)), right, float((mu**2 + var).mean())
        )


# ---- Lin et al., 2020: Dynamic Pruning with Feedback


@measurement
def measure_optimal_rate(draw: np.random.Generator) -> Iterator[Comparison]:
    """Compare the smallest right-hand side of Theorem 4.2 with its value at both learning rates."""
    for T in (99, 9999):
        constants: dict[str, Any] = {"L": 4.0, "G": 1.0, "gap": 2.0, "T": T, "delta": 0.0, "norm": 0.0}
        least = minimize_scalar(
            lambda g, constants=constants: convergence.nonconvex(**constants, gamma=g).bound, (1e-3, 1e-1), tol=1e-12
        )
        right, printed = (convergence.nonconvex(**constants, printed=p).bound for p in (False, True))
        yield Comparison(f"T = {T}", float(least.fun), 0.0, right, printed)


# ---- Chijiwa et al., 2021: IteRand


@measurement
def measure_pair_failure(draw: np.random.Generator) -> Iterator[Comparison]:
    """Compare the probability that no unit fits a weight with (11) and (12)."""
    for R, units in ((2, 20), (10, 1), (20, 1)):
        drawn = iterand.failure_simulated(1.0, 0.25, R, units, draws=40_000, seed=SEED)
        right, printed = iterand.failure(1.0, 0.25, R, units), iterand.failure_printed(R=R, units=units, tau=0.25)
        yield Comparison(f"R = {R}, d′ = {units}", *drawn, right, printed)


@measurement
def measure_lemma_failure(draw: np.random.Generator) -> Iterator[Comparison]:
    """Compare the failure probability of Lemma A.4 at its smallest width with δ."""
    epsilon, draws = 0.1, 4_000_000
    for delta in (1e-3, 1e-4):
        R = math.ceil(4 / epsilon * math.sqrt(math.log(2 / delta)))
        top = 2 * draw.uniform(size=(2, 2, draws)) ** (1 / R) - 1  # the largest of R, for u and v of both units
        low = (top + 1) * (1 - draw.uniform(size=top.shape) ** (1 / (R - 1))) - 1  # the smallest, given the largest
        plus, minus = 1 - top.prod(0) <= epsilon, 1 - low.prod(0) <= epsilon
        failed = mean_and_error(1.0 - ((plus[0] & minus[1]) | (plus[1] & minus[0])))
        right = 1 - (1 - iterand.failure(1.0, epsilon / 2, R, 1)) ** 2
        yield Comparison(f"δ = {delta:g}, R = {R}", *failed, right, delta)


@measurement
def measure_tolerance_sum(draw: np.random.Generator) -> Iterator[Comparison]:
    """Compare the largest error of a unit within the tolerances of Lemma A.3 with its bound."""
    for epsilon in (0.2, 0.8):
        u, v = 1 - draw.uniform(0, epsilon / 2, (2, 1_000_000))
        largest = float(np.abs(1 - u * v).max())
        yield Comparison(f"ε = {epsilon}", largest, 0.0, epsilon * (1 - epsilon / 4), epsilon / 2)


@measurement
def measure_layer_input(draw: np.random.Generator) -> Iterator[Comparison]:
    """Compare the largest input of the second layer with (22)."""
    for inputs in (4, 16, 64):
        corners = np.concatenate([np.ones((1, inputs)), draw.choice([-1.0, 1.0], (999, inputs))])
        first = iterand.forward([np.full((1, inputs), inputs**-0.5)], corners)
        yield Comparison(f"d_0 = {inputs}", float(np.abs(first).max()), 0.0, math.sqrt(inputs), 1.0)


@measurement
def measure_theorem_failure(draw: np.random.Generator) -> Iterator[Comparison]:
    """Compare how often a network of the printed widths misses its target with Theorem A.1."""
    epsilon, delta, R = 0.5, 0.1, 30
    for inputs, seeds in ((6, 1500), (9, 500)):
        first = draw.standard_normal((1, inputs))
        target = [first / np.linalg.norm(first), np.ones((1, 1))]
        widths = iterand.widths([inputs, 1, 1], epsilon, delta, R, printed=True)
        far = [iterand.build(target, epsilon, R, widths, seed).gap(1000) > epsilon for seed in range(seeds)]
        right = 1 - iterand.success(target, epsilon, R, widths)
        case = f"d_0 = {inputs}, widths {widths[0]:,} and {widths[1]}"
        yield Comparison(case, *mean_and_error(np.array(far, float)), right, delta)
