"""What the documents have wrong, decided by Monte Carlo: writes results/errata.json, and docs/errata.md from it.

python benchmarks/errata.py           # draw, check and write both (about a minute)
python benchmarks/errata.py --page    # write the page again from the record

Every figure is checked as it is made: the right form must agree with what was drawn within four standard
errors (and the tolerance that an erratum states, where its formula is a limit), and the printed one must not.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pages
import record
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import gammaln
from scipy.stats import binom, halfnorm

from pomona.theory import balanced, bounds, convergence, gip, iterand, qian_tables

RECORD, PAGE = pages.RESULTS / "errata.json", pages.DOCS / "errata.md"
SEED = 0
ALPHAS = 0.01, 0.1, 0.5  # of Table 3 of document 004

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """A figure that decides: what was drawn (its standard error; 0 is an exact sum), and what both forms say."""

    case: str
    drawn: float
    error: float
    right: float
    printed: float


@dataclass(frozen=True)
class Erratum:
    """A mistake. A `bound` must not be below what is drawn; a value must agree, up to `slack`."""

    document: str
    place: str
    printed: str
    right: str
    note: str
    rows: Callable[[np.random.Generator], Iterator[Row]]
    bound: bool = False
    slack: float = 0.0

    def decides(self, row: Row) -> bool:
        """Whether the figure bears the right form out, and the printed one not."""
        margin = 4 * row.error + 1e-9 * abs(row.drawn)
        if self.bound:
            return row.right >= row.drawn - margin and row.printed < row.drawn - margin
        return abs(row.right - row.drawn) <= margin + self.slack < abs(row.printed - row.drawn)


ERRATA: list[Erratum] = []


def erratum(document: str, place: str, *, printed: str, right: str, note: str = "", **kind: Any) -> Callable[..., Any]:
    def add(rows: Callable[[np.random.Generator], Iterator[Row]]) -> Callable[..., Any]:
        ERRATA.append(Erratum(document, place, printed, right, note, rows, **kind))
        return rows

    return add


def mean(samples: Array) -> tuple[float, float]:
    """A mean and its standard error."""
    return float(np.mean(samples)), float(np.std(samples) / math.sqrt(len(samples)))


# ---- 000: Gradients Index Pruning


def noisy_top(draw: np.random.Generator, theta: float, d: int, m: int, draws: int = 1000) -> tuple[float, float]:
    """‖g − g ⊙ I‖² by the mechanism itself, on gradients of N(0, 1)."""
    i = np.arange(min(m, d - m) + 1)
    log_a = -2 * gammaln(i + 1) - gammaln(m - i + 1) - gammaln(d - m - i + 1) - (2 * theta * i if theta < 99 else 0)
    p = np.exp(log_a - log_a.max()) if theta < 99 else 1.0 * (i == 0)
    lost = []
    for swapped in draw.choice(i, size=draws, p=p / p.sum()):
        energy = np.sort(draw.standard_normal(d) ** 2)
        kept, cut = draw.permutation(d - m)[:swapped], d - m + draw.permutation(m)[:swapped]
        lost.append(energy[: d - m].sum() - energy[kept].sum() + energy[cut].sum())
    return mean(np.array(lost))


def loss_rows(draw: np.random.Generator, thetas: tuple[float, ...]) -> Iterator[Row]:
    d = 10_000
    for k in (0.1, 0.3, 0.7):
        for theta in thetas:
            m = round(k * d)
            right, printed = (gip.pruning_mse(theta, d, m, printed=printed) for printed in (False, True))
            yield Row(f"k = {k}, θ = {theta:g}".replace("inf", "∞"), *noisy_top(draw, theta, d, m), right, printed)


@erratum(
    "000",
    "(30), the loss of the exact top-k",
    printed="(1 − k) dσ² (1 − k − 2aφ(a))",
    right="dσ² (1 − k − 2aφ(a))",
    note="The integral over [−a, a] carries the mass 1 − k already. d = 10,000 gradients of N(0, 1).",
)
def top_k(draw: np.random.Generator) -> Iterator[Row]:
    yield from loss_rows(draw, (math.inf,))


@erratum(
    "000",
    "(34) and (37), ζ",
    printed="ζ = 1 + 2aφ(a)/k",
    right="ζ = 2aφ(a) / (k (1 − k))",
    note="The printed one belongs to the printed MSE_0; together they are right only at θ = 0. The loss, as above.",
)
def noisy_top_k(draw: np.random.Generator) -> Iterator[Row]:
    yield from loss_rows(draw, (1.0, 2.0))


# ---- 001: Balanced Sparsity

SCALES = 0.7, 1.3  # σ_w (or σ_i) and σ_x


@erratum(
    "001",
    "(A.8), the characteristic function of a product",
    printed="σ_i σ_x (1 + t²)^{−1/2}",
    right="(1 + σ_i² σ_x² t²)^{−1/2}",
    note="For N(0, σ_i²) times N(0, σ_x²), σ_i = 0.7, σ_x = 1.3. At t = 0 the printed one is {zero:.2f} and not 1.",
)
def product(draw: np.random.Generator) -> Iterator[Row]:
    z = np.prod([draw.normal(0, s, 1_000_000) for s in SCALES], axis=0)
    for t in (0.5, 1.0, 2.0):
        right = float(balanced.characteristic(t, 1.0, *SCALES))
        yield Row(f"t = {t:g}", *mean(np.cos(t * z)), right, math.prod(SCALES) / math.sqrt(1 + t**2))


@erratum(
    "001",
    "(A.7), the means",
    printed="μ_i drops out",
    right="v^{−1/2} exp(−μ_i² σ_x² t² / 2v), v = 1 + σ_i² σ_x² t²",
    note="A Gaussian of mean μ is not the sum of one without a mean and of μ. Here μ_i = 1, the scales as above.",
)
def means(draw: np.random.Generator) -> Iterator[Row]:
    s_i, s_x = SCALES
    z = draw.normal(1, s_i, 1_000_000) * draw.normal(0, s_x, 1_000_000)
    for t in (0.5, 1.0, 2.0):
        v = 1 + (s_i * s_x * t) ** 2
        yield Row(f"t = {t:g}", *mean(np.cos(t * z)), math.exp(-((s_x * t) ** 2) / (2 * v)) / math.sqrt(v), v**-0.5)


@erratum(
    "001",
    "(A.3), whose order statistics",
    printed="F and f of the Gaussian W",
    right="F and f of |W|, which is half-normal",
    note="Weights are sorted by magnitude. The variance of the k-th smallest of 4096 of N(0, 0.02²), times 10⁹; the "
    "right form is a limit, so within 2 % of the largest.",
    slack=0.15,
)
def order(draw: np.random.Generator) -> Iterator[Row]:
    n, draws = 4096, 20_000
    for k in (200, 2048):
        # Rényi: the k-th smallest of n uniform draws is the share of k of n + 1 exponential gaps.
        head = draw.gamma(k, size=draws)
        x = 0.02 * halfnorm.ppf(head / (head + draw.gamma(n - k + 1, size=draws)))
        right, printed = (float(balanced.asymptotic(k, n, 0.02, printed=p)[1]) for p in (False, True))
        variance = float(x.var())
        yield Row(f"k = {k}", *(1e9 * v for v in (variance, variance * math.sqrt(2 / draws), right, printed)))


@erratum(
    "001",
    "(B.2) and (B.3), the variance of the output",
    printed="σ_x/r Σ H(i), H the variance of an order statistic",
    right="σ_x² E[dw²] = σ_x²/r Σ (μ_i² + σ_i²), by exact order statistics",
    note="σ_x for its square, a variance for a standard deviation, and no means. A 256 × 256 matrix, σ_w = 0.7, "
    "σ_x = 1.3; without blocks the right form is that of an infinite matrix.",
)
def variance(draw: np.random.Generator) -> Iterator[Row]:
    size, repeats = 256 * 256, 20
    for sparsity, block in ((0.5, None), (0.5, 32), (0.5, 8), (0.9, 32)):
        columns = block or size
        r = round(sparsity * columns)
        drawn = []
        for _ in range(repeats):
            w = np.abs(draw.normal(0, SCALES[0], (size // columns, columns)))
            gone = np.partition(w, r - 1, axis=1)[:, :r]
            drawn.append(np.mean((gone * draw.normal(0, SCALES[1], gone.shape)) ** 2))
        right = balanced.output_variance(sparsity, *SCALES, block)
        printed = balanced.output_variance_printed(sparsity, *SCALES, size, size // block if block else None)
        yield Row(
            f"sparsity {sparsity:g}, {f'blocks of {block}' if block else 'no blocks'}",
            *mean(np.array(drawn)),
            right,
            printed,
        )


@erratum(
    "001",
    "(A.9), ranks of a block for ranks of the matrix",
    printed="the local rank j of b has the law of the global rank j · MK",
    right="it is the j-th order statistic of b draws",
    note="An approximation, and from blocks of 8 on a good one. The energy removed at sparsity 1/2 from weights of "
    "N(0, 1), with (A.9)'s ranks in a matrix of 65,536 and its other mistakes mended, against exact order statistics.",
)
def ranks(draw: np.random.Generator) -> Iterator[Row]:
    size, blocks = 65_536, 2_000_000
    for block in (2, 4, 8):
        half = block // 2
        gone = np.partition(np.abs(draw.standard_normal((blocks, block))), half - 1, axis=1)[:, :half]
        mu, var = balanced.asymptotic(np.arange(1, half + 1) * (size // block), size)
        right = balanced.removed_second_moment(0.5, block=block)
        yield Row(f"blocks of {block}", *mean((gone**2).mean(1)), right, float((mu**2 + var).mean()))


# ---- 002: Dynamic Pruning with Feedback


@erratum(
    "002",
    "Theorem 4.2, the rate that minimizes its right-hand side",
    printed="c/√t with c = √(Δ/(LG²))",
    right="√(2Δ/(LG²(T + 1))), the same at each step",
    note="c/√t is infinite at t = 0, and the proof needs a constant; with √(T + 1) for √t it still lacks a 2. The "
    "right-hand side for L = 4, G = 1, Δ = 2 without pruning, at its least over all rates and at the two.",
)
def rate(draw: np.random.Generator) -> Iterator[Row]:
    for T in (99, 9999):
        told: dict[str, Any] = {"L": 4.0, "G": 1.0, "gap": 2.0, "T": T, "delta": 0.0, "norm": 0.0}
        least = minimize_scalar(
            lambda g, told=told: convergence.nonconvex(**told, gamma=g).bound, (1e-3, 1e-1), tol=1e-12
        )
        right, printed = (convergence.nonconvex(**told, printed=p).bound for p in (False, True))
        yield Row(f"T = {T}", float(least.fun), 0.0, right, printed)


# ---- 003: IteRand


@erratum(
    "003",
    "(11) to (12), R² pairs",
    printed="P(no unit fits) ≤ (1 − ε²/16)^{d′R²}",
    right="(1 − p_u p_v)^{d′}, p = 1 − (1 − ε/4)^R",
    note="Of R draws for u and R for v the R² pairs are not independent. At w = 1, ε = 1/2. The gain of R² is there "
    "only while R is small against 4/ε.",
)
def pairs(draw: np.random.Generator) -> Iterator[Row]:
    for R, units in ((2, 20), (10, 1), (20, 1)):
        drawn = iterand.failure_simulated(1.0, 0.25, R, units, draws=40_000, seed=SEED)
        right, printed = (f(R=R, units=units, tau=0.25) for f in (exact_failure, iterand.failure_printed))
        yield Row(f"R = {R}, d′ = {units}", *drawn, right, printed)


def exact_failure(tau: float, R: int, units: int) -> float:
    return iterand.failure(1.0, tau, R, units)


@erratum(
    "003",
    "Lemma A.4 itself",
    printed="fails with probability ≤ δ for d ≥ 2⌈16/(ε²R²) log(2/δ)⌉",
    right="d′ ≥ log(2/δ) / −log(1 − p_u p_v)",
    note="At w = 1, ε = 0.1, and the least R at which d = 2 is said to do, where the units may have the best of their "
    "R draws and each may take either sign: more than any mask can have. The bound is the exact probability that the "
    "proof's own units fail, which have one sign each and stop at the first draw that fits.",
    bound=True,
)
def lemma(draw: np.random.Generator) -> Iterator[Row]:
    epsilon, draws = 0.1, 4_000_000
    for delta in (1e-3, 1e-4):
        R = math.ceil(4 / epsilon * math.sqrt(math.log(2 / delta)))
        top = 2 * draw.uniform(size=(2, 2, draws)) ** (1 / R) - 1  # the largest of R, for u and v of both units
        low = (top + 1) * (1 - draw.uniform(size=top.shape) ** (1 / (R - 1))) - 1  # the smallest, given the largest
        plus, minus = 1 - top.prod(0) <= epsilon, 1 - low.prod(0) <= epsilon
        failed = mean(1.0 - ((plus[0] & minus[1]) | (plus[1] & minus[0])))
        yield Row(f"δ = {delta:g}, R = {R}", *failed, 1 - (1 - iterand.failure(1.0, epsilon / 2, R, 1)) ** 2, delta)


@erratum(
    "003",
    "Lemma A.3, what the tolerances add up to",
    printed="|w σ(x) − v σ(ux)| ≤ ε/2",
    right="≤ ε (1 − ε/4)",
    note="From |u − 1|, |v − w| ≤ ε/2. The largest |w − uv| of a million draws, w = 1. Lemma A.3's conclusion stands "
    "all the same: of its two units only one answers to any x, so that their errors do not add.",
    bound=True,
)
def tolerances(draw: np.random.Generator) -> Iterator[Row]:
    for epsilon in (0.2, 0.8):
        u, v = 1 - draw.uniform(0, epsilon / 2, (2, 1_000_000))
        yield Row(f"ε = {epsilon}", float(np.abs(1 - u * v).max()), 0.0, epsilon * (1 - epsilon / 4), epsilon / 2)


@erratum(
    "003",
    "(22), what enters a later layer",
    printed="‖x_k‖₂ ≤ 1, so that ‖x̃_k‖_∞ ≤ 2",
    right="‖x_k‖₂ ≤ √d_0, and ‖x̃_k‖_∞ ≤ √d_0 + ε",
    note="‖F_k‖ ≤ 1 keeps the length, but a corner of the cube ‖x‖_∞ ≤ 1 is √d_0 long. Then (21) is needed with "
    "ε/(l (√d_0 + ε)) in place of ε/2l from the second layer on. The largest ‖x_1‖_∞ over a thousand corners, "
    "F_1 = (1, …, 1)/√d_0.",
    bound=True,
)
def reach(draw: np.random.Generator) -> Iterator[Row]:
    for inputs in (4, 16, 64):
        corners = np.concatenate([np.ones((1, inputs)), draw.choice([-1.0, 1.0], (999, inputs))])
        first = iterand.forward([np.full((1, inputs), inputs**-0.5)], corners)
        yield Row(f"d_0 = {inputs}", float(np.abs(first).max()), 0.0, math.sqrt(inputs), 1.0)


@erratum(
    "003",
    "Theorem A.1 at work",
    printed="with these widths ‖f − g_M‖ > ε has probability ≤ δ",
    right="at most the exact probability that the proof's units do not fit",
    note="Both mistakes together: how often a network of the printed widths, its masks chosen as in the proof but with "
    "the best pair of each weight, was found to be farther than ε from the target. ε = 0.5, δ = 0.1, R = 30, a target "
    "with layers d_0, 1, 1. (Masks that add up several pairs might do better; the proof has none.)",
    bound=True,
)
def theorem(draw: np.random.Generator) -> Iterator[Row]:
    epsilon, delta, R = 0.5, 0.1, 30
    for inputs, seeds in ((6, 1500), (9, 500)):
        first = draw.standard_normal((1, inputs))
        target = [first / np.linalg.norm(first), np.ones((1, 1))]
        widths = iterand.widths([inputs, 1, 1], epsilon, delta, R, printed=True)
        far = [iterand.build(target, epsilon, R, widths, seed).gap(1000) > epsilon for seed in range(seeds)]
        right = 1 - iterand.success(target, epsilon, R, widths)
        yield Row(f"d_0 = {inputs}, widths {widths[0]:,} and {widths[1]}", *mean(np.array(far, float)), right, delta)


# ---- 004: a probabilistic approach to pruning


@erratum(
    "004",
    "(3) and (4), a sign and an index",
    printed="α ≤ 1 − (log(d_{k+1} + 1) − log log d_{k+1}) / (log d_{k+1} + log d_k)",
    right="α ≤ 1 − (log(d + 1) + log log d) / (log d_k + log d_{k−1}) for d = d_k and d = d_{k−1}",
    note="Lemma 6 needs ⌊D^(1−α)⌋ ≥ d log d entries to be pruned: how many that is, and how many are pruned at the "
    "largest α allowed. Theorem 3 has the sign right.",
    bound=True,
)
def sign(draw: np.random.Generator) -> Iterator[Row]:
    for d in (128, 1024, 51_000):
        alphas = [bounds.most_alpha((d,) * 5, form) for form in ("corrected", "printed")]
        yield Row(f"d = {d:,}", d * math.log(d), 0.0, *(math.floor(d ** (2 - 2 * alpha)) for alpha in alphas))


@erratum(
    "004",
    "Lemma 5, Chernoff's exponent",
    printed="log P(X ≥ (1 + δ)μ) ≤ −μ δ²/(1 + δ)",
    right="≤ −μ ((1 + δ) log(1 + δ) − δ)",
    note="At δ = 2, as Lemma 6 uses it, by the exact tail of a million events. Lemma 6 then has "
    "1 − n^(−{lemma6:.3f}) for 1 − n^(−1/3).",
    bound=True,
)
def chernoff(draw: np.random.Generator) -> Iterator[Row]:
    for mu in (100, 200):
        tail = float(binom.logsf(3 * mu - 1, 10**6, mu / 10**6))
        yield Row(f"μ = {mu}", tail, 0.0, *(bounds.lemma5(mu, 2.0, printed=printed) for printed in (False, True)))


@erratum(
    "004",
    "Random pruning with replacement",
    printed="N draws prune the share N/D",
    right="1 − (1 − 1/D)^N",
    note="The share of a d × d matrix that N = ⌊d^(2−α)⌋ draws hit, as many as in Table 3.",
)
def replacement(draw: np.random.Generator) -> Iterator[Row]:
    d = 32
    for alpha in ALPHAS:
        N = math.floor(d ** (2 - alpha))
        hit = np.array([len(np.unique(draw.integers(d * d, size=N))) / d**2 for _ in range(4000)])
        yield Row(f"d = {d}, α = {alpha}", *mean(hit), bounds.distinct(N, d**2), N / d**2)


@erratum(
    "004",
    "Table 3, the rows with α",
    printed="A is as in (19): what Theorem 2 removes, ⌊D^(1−α)⌋ = ⌊d^(2−2α)⌋ draws",
    right="the norm of a row of it is √(1 − (1 − 1/D)^N)",
    note="The printed rows are those of what is *kept* after ⌊d^(2−α)⌋ draws, which is Theorem 3's count: its norm of "
    "a row is {kept}, and a little more is printed, since the largest of 32 is taken. d = 32, weights of N(0, 1/d); "
    "the root of the mean square over rows and 2000 matrices.",
)
def table_3(draw: np.random.Generator) -> Iterator[Row]:
    d, draws = 32, 2000
    for alpha in ALPHAS:
        N = math.floor(d ** (2 - 2 * alpha))
        hit = np.zeros((draws, d * d), dtype=bool)
        np.put_along_axis(hit, draw.integers(d * d, size=(draws, N)), True, axis=1)
        square, error = mean((np.where(hit, draw.standard_normal(hit.shape), 0) ** 2).sum(1) / d**2)
        root = math.sqrt(square)
        printed = qian_tables.PRINTED_TABLE3["N(0, 1/d)", alpha, d][0]
        yield Row(f"α = {alpha}", root, error / (2 * root), math.sqrt(bounds.distinct(N, d**2)), printed)


@erratum(
    "004",
    "Table 3, the constant of Lemma 4",
    printed="C is about 0.63 (of square matrices)",
    right="(1 + √y) / (1 + √y + (κy)^(1/4)) for m × n, y = m/n, E w⁴ = κ (E w²)²",
    note="A matrix of one row is as long as its norm, so that no C below 1 will do for all shapes. ‖A‖ over the three "
    "terms, mean of 20 matrices of U[−1, 1]; the right form is the limit for wide matrices, so within 0.01.",
    slack=0.01,
)
def constant(draw: np.random.Generator) -> Iterator[Row]:
    printed = qian_tables.PRINTED_TABLE3["U(−√3/√d, √3/√d)", None, 512][-1]
    for m, n in ((1, 10**6), (10, 40_960), (64, 1024)):
        right = bounds.oblong(bounds.LATALA, m / n)
        terms = math.sqrt(n / 3) + math.sqrt(m / 3) + (m * n / 5) ** 0.25
        norms = np.array([np.linalg.norm(draw.uniform(-1, 1, (m, n)), 2) for _ in range(20)])
        yield Row(f"{m} × {n:,}", *mean(norms / terms), right, printed)


@erratum(
    "004",
    "Theorem 3, the last layer",
    printed="E‖W_l‖ ≤ C_5/p, “by a similar derivation to (36)–(37)”",
    right="E‖W_l‖ ≤ C (√C_1 + √(C_1 d_l/d)/p + (C_2 d_l/d)^(1/4)/√p)",
    note="It is a matrix of d_l × p²d and no convolution: one of its rows alone is √C_1 long, at any p. So ‖W_l‖ ≤ "
    "p^(−β_1) is not likely but all but impossible where p^(−β_1) < √C_1. Gaussian entries, d = 32, d_l = 10, "
    "C_1 = 0.1, C_2 = 3 C_1², C = {C:.3f} for the square layers and as above for this one, 100 matrices each. "
    "`bounds.cnn` has what Markov's inequality gives from the right form, with the same probability.",
    bound=True,
)
def last_layer(draw: np.random.Generator) -> Iterator[Row]:
    d, classes, C1, C = 32, 10, 0.1, bounds.LATALA
    C2 = 3 * C1**2
    for p in (8, 16, 32):
        layers = (draw.normal(0, math.sqrt(C1 / d) / p, (classes, d * p**2)) for _ in range(100))
        found = mean(np.array([np.linalg.norm(W, 2) for W in layers]))
        yield Row(
            f"p = {p}",
            *found,
            bounds.Moments(C1, C2).expected(classes, d * p**2),
            C * (2 * math.sqrt(C1) + C2**0.25) / p,
        )


@erratum(
    "004",
    "E.2, no entry drawn twice",
    printed="d²/(d²N) (as held; no reading of it is right)",
    right="D! / ((D − N)! D^N), D = d²",
    note="Nearly nought for any N that matters, so that E.2's way from with to without replacement says nothing.",
)
def repeats(draw: np.random.Generator) -> Iterator[Row]:
    D = 1024
    for N in (8, 32, 64):
        fresh = np.diff(np.sort(draw.integers(D, size=(200_000, N)), axis=1), axis=1).all(1)
        yield Row(f"d = 32, N = {N}", *mean(fresh.astype(float)), math.exp(bounds.no_repeat(N, D)), 1 / N)


@erratum(
    "004",
    "Theorem 4 (Chibisov), u_n",
    printed="u_n = nF/√m, of the m-th largest",
    right="u_n = (nF − m)/√m, of the m-th smallest, F of |W|",
    note="P(X_(m) < x) where the right u_n is −2, 0 and 2, for n = 10⁸ and m = 10⁴; a limit, so within 0.01.",
    slack=0.01,
)
def chibisov(draw: np.random.Generator) -> Iterator[Row]:
    n, m = 10**8, 10**4
    head = draw.gamma(m, size=200_000)
    uniform = head / (head + draw.gamma(n - m + 1, size=head.shape))
    for u in (-2.0, 0.0, 2.0):
        x = (m + u * math.sqrt(m)) / n
        limits = (bounds.theorem4(x, m, n, float, printed=printed) for printed in (False, True))
        yield Row(f"u = {u:g}", *mean((uniform < x).astype(float)), *limits)


@erratum(
    "004",
    "(37), the expectation of a maximum",
    printed="E max ‖P^{(u,v)}‖ ≤ max E ‖P^{(u,v)}‖",
    right="E max ‖P^{(u,v)}‖ ≤ Σ E ‖F_{ij}‖",
    note="The inequality is the other way round, but the sum over the q² taps that follows bounds both, so that the "
    "result stands. Kernels 3 × 3 of N(0, 1/(p²d)), 2000 of each.",
    bound=True,
)
def maximum(draw: np.random.Generator) -> Iterator[Row]:
    q, draws = 3, 2000
    for d, p in ((8, 8), (4, 16)):
        kernels = draw.normal(0, 1 / (p * math.sqrt(d)), (draws, d, d, q, q))
        frequencies = np.fft.fft2(kernels, (p, p)).transpose(0, 3, 4, 1, 2)
        norms = np.linalg.norm(frequencies, 2, axis=(-2, -1)).reshape(draws, -1)
        taps = np.linalg.norm(kernels.transpose(0, 3, 4, 1, 2), 2, axis=(-2, -1))
        yield Row(f"d = {d}, p = {p}", *mean(norms.max(1)), float(taps.mean(0).sum()), float(norms.mean(0).max()))


# ---- the page

TITLES = {
    "000": "000: Gradients Index Pruning (Yang et al., 2023), `pomona.theory.gip`",
    "001": "001: Balanced Sparsity (Yao et al., AAAI 2019), `pomona.theory.balanced`",
    "002": "002: Dynamic Pruning with Feedback (Lin et al., ICLR 2020), `pomona.theory.convergence`",
    "003": "003: IteRand (Chijiwa et al., NeurIPS 2021), `pomona.theory.iterand`",
    "004": "004: A Probabilistic Approach to Pruning (Qian and Klabjan, ICML 2021), `pomona.theory.bounds`",
}

SLIPS = {
    "000": (
        "(31) has the sizes exchanged: |C_0| = (1 − k)d and |C_1| = kd, as (32), (34) and (36) have it.",
        "The sums run to min(kd, (1 − k)d); the terms beyond are zero. I_t is I_0, and ζ_i in (37) is ζ·i.",
        "Not a mistake of the appendix, but of its use: at the published settings (d = 2.75 million, k = 0.1, "
        "ε = 1.4·10⁻⁴ a step) θ is {theta:.2g}, and {lost:.4f} of the top-k are lost, where chance loses 0.9.",
    ),
    "001": ("H is a variance and stands for a standard deviation in (A.8).",),
    "002": (
        "Strong convexity is ⟨∇f(w), w − v⟩ ≥ f(w) − f(v) + (μ/2)‖w − v‖², which the proof uses; the printed signs "
        "would have 2 ≤ 0 for f(w) = w² at w = 1, v = 0.",
        "Table 3: 75.95 − 74.55 is 1.40, printed 1.44. ResNet-32's dense accuracy is 93.83 in Tables 1, 2 and 4, and "
        "93.52 in Table 5.",
        "More in [convergence.md](convergence.md).",
    ),
    "003": (
        "A.4 ends with log(δ/2) for log(2/δ); (9), (11) and (14) want ∄, and (9) the exponent d′; A.5 has d for d_1.",
        "45,000 images in batches of 128 are 352 iterations an epoch, printed 351.",
        "*Not* a mistake: A.5 chooses ũ anew for each output k although the outputs share the unit. What it asks of ũ "
        "is the same for each k, so that one that will do for any will do for all, and outputs need no units of their "
        "own. `iterand.build` uses a unit for several outputs, and `iterand.failure` counts the dependence exactly.",
    ),
    "004": (
        "γ is defined as the share that is kept, then ⌊γD⌋ entries are removed, and γ_1 = γ_l = 1 keeps all. What the "
        "theorems use is a pruned share D^(−α).",
        "Theorem 2's 1 − δ ≥ p is ≤; (I) in its proof needs the product to k + 1; Theorem 3's √d is p_0 √d_0; 𝓜 = 1 "
        "marks what is pruned.",
        "Latała's inequality wants independent entries; those that magnitude pruning removes are so only given the "
        "threshold.",
        "Right, but loose: bounding each removed entry by the largest gives c_2 d^(−2α) for ‖W − W*‖₂, which is near "
        "2Kρ^(3/2)/√3 with ρ = d^(−2α): at d = {width} and α = {alpha} {drawn:.4f} was drawn, the estimate is "
        "{near:.4f} and the bound, with C = 0.63, {loose:.3f}.",
    ),
}

HEAD = """# What the documents have wrong

This page is written by `python benchmarks/errata.py`, which draws every figure on it (seed {seed}), checks that the
right form agrees and that the printed one does not, and keeps them in `results/errata.json`. The library computes
the right forms, and the printed ones where it is asked to (`printed=True`, `…_printed`). ± is one standard error; a
figure without it is an exact sum, or the largest of its draws.
"""


def figures(draw: np.random.Generator) -> dict[str, Any]:
    """What notes and remarks quote."""
    d = 2_750_000
    theta = gip.theta_for_epsilon(1.4e-4, d, d // 10)
    kept = [math.sqrt(1 - bounds.distinct(math.floor(32 ** (2 - a)), 32**2)) for a in ALPHAS]
    width, alpha, C = 512, 0.1, 0.63
    W = draw.uniform(-1, 1, (width, width)) / math.sqrt(width)
    share = width ** (-2 * alpha)
    removed = np.where(np.abs(W) <= np.quantile(np.abs(W), share), W, 0)
    return {
        "theta": theta,
        "lost": gip.expected_swaps(theta, d, d // 10) / (d // 10),
        "zero": math.prod(SCALES),
        "lemma6": -math.log(bounds.lemma6(10)) / math.log(10),
        "kept": ", ".join(f"{k:.3f}" for k in kept[:-1]) + f" and {kept[-1]:.3f}",
        "C": bounds.LATALA,
        "width": width,
        "alpha": alpha,
        "drawn": float(np.linalg.norm(removed, 2)),
        "near": bounds.removed_norm(width, width, share, bounds.Uniform(K=1.0)),
        "loose": C * (2 * math.sqrt(2) + 24**0.25) * share,
    }


def measure() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All errata with their figures; refuses one that is not borne out."""
    found = []
    for each in ERRATA:
        rows = list(each.rows(np.random.default_rng(SEED)))
        for row in rows:
            if not each.decides(row):
                raise SystemExit(f"{each.document} {each.place}: {row} does not decide.")
        facts = {k: v for k, v in vars(each).items() if k != "rows"}
        found.append(facts | {"rows": [asdict(row) for row in rows]})
    return found, figures(np.random.default_rng(SEED))


def page() -> str:
    """The whole page, from the record."""
    kept = pages.read(RECORD)
    parts = [HEAD.format(seed=SEED)]
    for document, title in TITLES.items():
        parts.append(f"## {title}\n")
        for each in (e for e in kept["errata"] if e["document"] == document):
            kind = "bound" if each["bound"] else "right"
            parts.append(f"**{each['place']}.** Printed: {each['printed']}. Right: {each['right']}.\n")
            parts.append(each["note"].format_map(kept["figures"]) + "\n")
            parts.append(f"| | drawn | {kind} | printed |\n|---|---|---|---|")
            parts += [line(row) for row in each["rows"]]
            parts.append("")
        parts += [f"- {slip.format_map(kept['figures'])}" for slip in SLIPS[document]]
        parts.append("")
    versions = ", ".join(f"{name} {kept['versions'][name]}" for name in ("numpy", "scipy"))
    parts.append(f"## Source\n\n{pages.made(kept)}, {versions}.\n")
    return "\n".join(parts)


def line(row: dict[str, Any]) -> str:
    error = f" ± {row['error']:.1g}" if row["error"] else ""
    return f"| {row['case']} | {row['drawn']:.5g}{error} | {row['right']:.5g} | {row['printed']:.5g} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--page", action="store_true", help="only write the page, from the record")
    if not parser.parse_args().page:
        errata, quoted = measure()
        record.write(RECORD, seed=SEED, errata=errata, figures=quoted)
    pages.write(PAGE, page())


if __name__ == "__main__":
    main()
