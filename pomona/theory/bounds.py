"""How much may be pruned before the promise is gone: Qian & Klabjan, ICML 2021.

F(x) = W_l σ(W_{l−1} … σ(W_1 x)) loses N_k = ⌊D_k^{1−α}⌋ of the D_k weights of its layers 1 < k < l, a fraction
ρ = D_k^{−α}: the smallest (Theorem 1), any (Theorem 2), or whole 2-D kernels of a convolution (Theorem 3). Each
theorem bounds sup ‖f − F‖ over a ball or cube of inputs, with a probability over the draw of the weights. Each is here
in three forms:

    printed=True    the document's numbers, for comparison. Some do not hold.
    (default)       the document's statement with its mistakes mended (docs/errata.md).
    sharp=True      the same events with the best proof: at any width, for the confidence 1 − δ that is asked for.

Where nothing is promised (a probability of 0 or less) the bound is `vacuous`. What is not printed of Theorem 1 is
proven with all its constants (see `laws`). Theorems 2 and 3 rest on the constant C of Latała's inequality (Lemma 4), of
which only lower bounds are known; `LATALA` is the largest that is measured for square matrices (Table 3), and `oblong`
makes of it what others need.

What Theorem 1 needs beyond Lemma 3: given the smallest magnitude T that stays, the removed entries are independent and
uniform on [−T, T], and zeros elsewhere only make the expected norm smaller: ‖W − W*‖ is bounded as ‖W‖ is, at scale T.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.optimize import minimize, minimize_scalar
from scipy.special import ndtri
from torch import nn

from ..errors import PomonaError, require
from .laws import (
    KURTOSIS,
    LATALA,
    Gaussian,
    Law,
    Moments,
    Uniform,
    crowded,
    distinct,
    latala,
    lemma1,
    lemma3,
    lemma5,
    lemma6,
    no_repeat,
    oblong,
    positive,
    quantile,
    theorem4,
)

__all__ = [
    "EXTENSIONS",
    "FORMS",
    "LATALA",
    "Bound",
    "Estimate",
    "Gaussian",
    "Law",
    "Moments",
    "TooNarrow",
    "Uniform",
    "cnn",
    "distinct",
    "estimate",
    "fraction_per_round",
    "largest",
    "least_pruning",
    "lemma1",
    "lemma3",
    "lemma5",
    "lemma6",
    "magnitude",
    "most_alpha",
    "narrowest",
    "no_repeat",
    "oblong",
    "random",
    "removed_norm",
    "theorem4",
]

FORMS: dict[str, dict[str, bool]] = {"printed": {"printed": True}, "corrected": {}, "sharp": {"sharp": True}}
WIDEST = 10**60  # beyond which no width is looked for


@dataclass(frozen=True)
class Bound:
    """sup ‖f − F‖ ≤ error, with at least this probability."""

    name: str
    form: str
    error: float
    probability: float
    widths: tuple[int, ...]
    alpha: float
    pruned: tuple[int, ...]  # N_k of the layers 1 < k < l
    constants: Mapping[str, float] = field(default_factory=dict)
    repeated: bool = False  # whether the N_k are draws with replacement, of which some hit nothing new

    @property
    def vacuous(self) -> bool:
        """Whether the theorem says nothing."""
        return self.probability <= 0

    @property
    def proven(self) -> bool:
        """Whether it rests on proven constants alone, and not on the measured C of Lemma 4."""
        return "C" not in self.constants

    @property
    def sparsity(self) -> float:
        """The pruned fraction of the layers 1 < k < l together; the expected one of draws with replacement."""
        D = sizes(self.widths)
        gone = [distinct(n, d) * d if self.repeated else n for n, d in zip(self.pruned, D, strict=True)]
        return sum(gone) / sum(D)

    def meets(self, epsilon: float, delta: float) -> bool:
        """Whether it promises an error of at most ε with probability at least 1 − δ."""
        return self.error <= epsilon and self.probability >= 1 - delta - 1e-12 and not self.vacuous

    def loss_gap(self, lipschitz: float = math.sqrt(2)) -> float:
        """How far the losses of f and F can be apart, for a loss with this constant; √2 is cross-entropy's."""
        return lipschitz * self.error


Theorem = Callable[..., Bound]


# ---- Theorems 1 to 3


def magnitude(
    widths: Sequence[int],
    *,
    alpha: float | None = None,
    sparsity: float | None = None,
    delta: float = 0.05,
    law: Uniform | None = None,
    lipschitz: float | Sequence[float] = 1.0,
    radius: float = 1.0,
    C: float = LATALA,
    c0: float | None = None,
    delta0: float | None = None,
    printed: bool = False,
    sharp: bool = False,
) -> Bound:
    """Theorem 1: the smallest N_k of a layer's uniform weights go.

    ‖W_k‖ ≤ c0 but for e^(−4 δ0 d) (Lemma 3), where c0 = K (√(π/2) + τ), δ0 = τ²/32, and τ is such that all l norms fail
    with probability δ/10, unless both are given. ‖W_k − W_k*‖ ≤ t = d^−α but for c2 d^−α (Markov), where the document
    has c2 = C K (2√2 + 24^¼) and E‖W_k − W_k*‖ is at most √(π/2) K (N + 1)/(D + 1). Sharp: all norms from their
    tails, layer by layer, and assumption (ii) is not needed.
    """
    law, form = law or Uniform(), form_of(printed, sharp)
    widths, alpha, pruned = setting(widths, alpha, sparsity, form, delta, radius=radius, C=C)
    depth, d, inner = len(widths) - 1, min(widths[1:-1]), shapes(widths)[1:-1]
    reach = radius * steepness(lipschitz, depth - 1)
    if sharp:
        norms = [law.exceeded(law.expected(*s), max(s), delta / (2 * depth)) for s in shapes(widths)]
        share = delta / (4 * (depth - 2))
        removed = [
            quantile(N, s[0] * s[1], share) * law.exceeded(law.expected(*s), max(s), share)
            for N, s in zip(pruned, inner, strict=True)
        ]
        constants = {"largest ‖W‖": max(norms), "largest ‖removed‖": max(removed)}
        return Bound("Theorem 1", form, reach * propagate(norms, removed), 1 - delta, widths, alpha, pruned, constants)
    require((c0 is None) == (delta0 is None), "c0 and delta0 belong together (Lemma 3): give both or neither.")
    if c0 is None or delta0 is None:
        c0, delta0 = lemma3(law, depth, d, delta)
    t, rare = d**-alpha, math.exp(-4 * delta0 * d)
    if printed:
        c2 = C * law.K * (2 * math.sqrt(2) + 24**0.25)
        error = (2 ** (depth - 2) - 1) * t * reach * c0 ** (depth - 1)
        probability = (1 - 2 * rare) * (1 - (depth - 2) * c2 * t - (depth + 1) * (depth - 2) * rare)
        probability = probability if t <= c0 else 0.0  # (29)
    else:
        # D^(1−α) for its floor N: so the probability rises with α without a step.
        expected = [
            law.expected(*s) * (D ** (1 - alpha) + 1) / (D + 1) for s, D in zip(inner, sizes(widths), strict=True)
        ]
        c2 = max(expected) / t**2
        error = reach * propagate([c0] * depth, [t] * (depth - 2))
        probability = 1 - sum(expected) / t - depth * rare
    constants = {"C": C} if printed else {}
    constants |= {"c0": c0, "delta0": delta0, "c2": c2, "C1": 1 / c0, "C2": error / t if t else 0.0}
    constants |= {"C3": (depth**2 - 2) * c2, "C4": math.log(depth**2 - 2) / (4 * delta0), "C5": 1 / (4 * delta0)}
    return Bound("Theorem 1", form, error, probability, widths, alpha, pruned, constants)


def random(
    widths: Sequence[int],
    *,
    alpha: float | None = None,
    sparsity: float | None = None,
    delta: float = 0.05,
    law: Law | None = None,
    norms: Sequence[float] | None = None,
    deltas: Sequence[float] | None = None,
    lipschitz: float | Sequence[float] = 1.0,
    radius: float = 1.0,
    C: float = LATALA,
    replacement: bool = True,
    printed: bool = False,
    sharp: bool = False,
) -> Bound:
    """Theorem 2: N_k weights of a layer, drawn with replacement, go.

    Assumption (iv), ‖W_k‖ ≤ N_k but for δ_k, is taken from the law with Σ δ_k = δ/4, unless `norms` and `deltas` are
    given. ‖W_k − W_k*‖ ≤ d^(−α/4) but for c2 d^(−α/4), c2 = C (2 √(3 K1) + K2^¼), if no row or column loses more than
    three times its share (Lemma 6). Sharp: shares and norms from their tails. Without `replacement` (E.2) the draws
    are distinct; rows and columns are then not independent, and their failures add up.
    """
    law, form = law or Uniform(), form_of(printed, sharp)
    widths, alpha, pruned = setting(widths, alpha, sparsity, form, delta, repeated=replacement, radius=radius, C=C)
    depth, d, inner = len(widths) - 1, min(widths[1:-1]), shapes(widths)[1:-1]
    reach = radius * steepness(lipschitz, depth - 1)
    N, fails = assumed_norms(law, widths, norms, deltas, delta)
    if sharp:
        # A quarter of δ for the norms, a quarter for the shares of rows and columns, the rest for what is removed.
        require(sum(fails) < delta, cannot_meet(delta, sum(fails)))
        left = delta - sum(fails)
        crowd, slip = left / (6 * (depth - 2)), 2 * left / (3 * (depth - 2))
        removed = [removed_at_random(law, C, s, n, crowd, slip) for n, s in zip(pruned, inner, strict=True)]
        constants = {"C": C, "largest ‖W‖": max(N), "largest ‖removed‖": max(removed)}
        return Bound(
            "Theorem 2", form, reach * propagate(N, removed), 1 - delta, widths, alpha, pruned, constants, replacement
        )
    check_crowding(widths, alpha, form)
    t, c2 = d ** (-alpha / 4), C * (2 * math.sqrt(3 * law.K1) + law.K2**0.25)
    if printed:
        error = (2 ** (depth - 2) - 1) * t * reach * math.prod(N)
        lost = sum((depth - k) * f for k, f in enumerate(fails[:-1], 1))
        probability = (1 - d ** (-1 / 3)) ** (2 * (depth - 2)) * (1 - fails[-1]) * (1 - (depth - 2) * c2 * t - lost)
        probability = probability if t <= min(N[1:-1]) else 0.0  # (15)
        if not replacement:
            probability *= math.prod(math.exp(no_repeat(n, a * b)) for n, (a, b) in zip(pruned, inner, strict=True))
    else:
        error = reach * propagate(N, [t] * (depth - 2))
        unfair = [lemma6(side) for s in inner for side in s]
        fair = math.prod(1 - u for u in unfair) if replacement else 1 - sum(unfair)
        probability = fair * (1 - (depth - 2) * c2 * t - sum(fails))
    constants = {"C": C, "c2": c2, "C1": 1 / min(N[1:-1]), "C2": error / t}
    constants |= {"C3": 3.0 * (depth - 2), "C4": 3 * c2 * (depth - 2), "delta0": delta - sum(fails)}
    return Bound("Theorem 2", form, error, probability, widths, alpha, pruned, constants, replacement)


def cnn(
    widths: Sequence[int],
    *,
    image: int,
    kernel: int = 3,
    alpha: float | None = None,
    sparsity: float | None = None,
    delta: float = 0.05,
    C1: float = 1.0,
    C2: float = 3.0,
    beta1: float | None = None,
    beta2: float | None = None,
    lipschitz: float | Sequence[float] = 1.0,
    radius: float = 1.0,
    C: float = LATALA,
    printed: bool = False,
    sharp: bool = False,
) -> Bound:
    """Theorem 3: ⌊d^(2−α)⌋ kernels of each convolution d → d go, drawn with replacement; inputs lie in [0, radius]^n.

    `widths` are the channels (d0, d, …, d) of the image and of the l − 1 convolutions, and the classes d_l. Weights
    have E w² ≤ C1/p²d and E w⁴ ≤ C2/p⁴d². ‖W_k‖ ≤ p^−β1 but for C3 q²/p^(1−β1), ‖W_k − W_k*‖ ≤ d^−β2 but for
    C4 q²/p d^(β2−α/4); β1 and β2 are given, or chosen for the smallest error at confidence 1 − δ.

    The last layer's norm cannot be below p^−β1 as the document has it: one of its rows alone has norm √C1. It is
    bounded by E‖W_l‖ p^(1−β1) / C5 here, with the same probability. Sharp: Markov's inequality at the best levels.
    """
    positive(image=image, kernel=kernel, C1=C1, C2=C2)
    channels, form = {*widths[1:-1]}, form_of(printed, sharp)
    require(len(channels) == 1, f"Theorem 3 has one number d of channels for all convolutions, got {[*widths[1:-1]]}.")
    widths, alpha, pruned = setting(widths, alpha, sparsity, form, delta, top=2.0, repeated=True, radius=radius, C=C)
    if widths[0] > widths[1]:
        raise TooNarrow(f"assumption (ii) needs as many channels as the image has, but {widths[1]} < {widths[0]}.")
    depth, d, p, q = len(widths) - 1, widths[1], image, kernel
    law = Moments(C1, C2 if printed else max(C2, KURTOSIS * C1**2), C)
    plain, kept = (C * (2 * math.sqrt(rows * C1) + law.K2**0.25) for rows in (1, 3))
    last = law.expected(widths[-1], p * p * d)
    cube = radius * p * math.sqrt(d if printed else widths[0])
    reach = cube * steepness(lipschitz, depth - 1)
    constants = {"C": C, "C3": plain, "C4": kept, "C5": plain if not sharp else last}
    if sharp:
        crowd = delta / 4 / (2 * (depth - 2))
        most = crowded(pruned[0], d, crowd)
        means = (q**2 / p * plain, q**2 / p * latala(law, C, d, d, most, most, pruned[0]), last)
        error, levels = best_levels(means, depth, delta * 3 / 4)
        constants |= dict(zip(("‖W‖", "‖removed‖", "‖W_l‖"), levels, strict=True))
        return Bound("Theorem 3", form, reach * error, 1 - delta, widths, alpha, pruned, constants, True)
    check_crowding(widths, alpha, "kernels")
    fair = (1 - (d ** (-1 / 3) if printed else lemma6(d))) ** (2 * (depth - 2))
    pairs = (depth**2 - depth - 2) / 2 if printed else depth - 1

    def at(b1: float, b2: float) -> tuple[float, float]:
        """Error and probability."""
        one, gone = p**-b1, d**-b2
        end = one if printed else last * p ** (1 - b1) / plain
        error = reach * end * one * ((one + gone) ** (depth - 2) - one ** (depth - 2))
        lost = (depth - 2) * kept * q**2 / p * d ** (b2 - alpha / 4) + (pairs * q**2 + 1) * plain * p ** (b1 - 1)
        return error, fair * (1 - lost)

    b1, b2 = best_betas(at, alpha, delta, beta1, beta2)
    error, probability = at(b1, b2)
    constants |= {"beta1": b1, "beta2": b2}
    return Bound("Theorem 3", form, error, probability, widths, alpha, pruned, constants, True)


# ---- solvers


def largest(theorem: Theorem, widths: Sequence[int], epsilon: float, delta: float, **options: Any) -> Bound | None:
    """The bound that prunes most, of those that promise an error of at most ε with probability 1 − δ; None if none.

    Its `sparsity` is the answer. More pruning is never safer, so a bisection finds it.
    """
    positive(epsilon=epsilon)

    def at(alpha: float) -> Bound:
        return theorem(widths, alpha=alpha, delta=delta, **options)

    low, high = 1e-9, least_pruning(theorem, tuple(widths), options)
    if high <= low or not at(high).meets(epsilon, delta):
        return None
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if at(middle).meets(epsilon, delta) else (middle, high)
    return at(high)


def narrowest(
    theorem: Theorem,
    widths: Sequence[int],
    epsilon: float = math.inf,
    delta: float | None = None,
    *,
    alpha: float | None = None,
    sparsity: float | None = None,
    **options: Any,
) -> int | None:
    """The smallest width of all hidden layers with which ε and δ are promised; None if no width will do.

    Without ε and δ: the smallest at which the theorem is not vacuous; without α, at the largest it allows, with which
    least is pruned. At a fixed sparsity t = ρ^½ (or ρ^⅛) does not fall with the width, so that often none will do.
    """
    require(epsilon > 0, f"epsilon must be positive, got {epsilon:g}.")
    given = options | ({} if delta is None else {"delta": delta})
    form = form_of(options.get("printed", False), options.get("sharp", False))

    def enough(width: int) -> bool:
        grown, a = widened(widths, width), alpha
        if alpha is None and sparsity is None:
            a = least_pruning(theorem, grown, options)
            if a <= 0:
                return False
        try:
            found = theorem(grown, alpha=a, sparsity=sparsity, **given)
        except TooNarrow:
            return False
        return found.meets(epsilon, 1.0 if delta is None else delta)

    low = max(widths[0], widths[-1], 2) if form != "sharp" else 2
    high = low
    while not enough(high):
        low, high = high, 2 * high
        if high > WIDEST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low if enough(low) else high


def least_pruning(theorem: Theorem, widths: tuple[int, ...], options: Mapping[str, Any]) -> float:
    """The largest α of a theorem: one weight or kernel, or what Lemma 6 needs; 0 or less where there is none."""
    form = form_of(options.get("printed", False), options.get("sharp", False))
    if form == "sharp" or theorem is magnitude:
        return (2.0 if theorem is cnn else 1.0) * (1 - 1e-12)
    return most_alpha(widths, "kernels" if theorem is cnn else form) * (1 - 1e-12)


def widened(widths: Sequence[int], width: int) -> tuple[int, ...]:
    """The same network with all hidden layers this wide."""
    return (widths[0], *[width] * (len(widths) - 2), widths[-1])


def fraction_per_round(
    model: nn.Module | Sequence[int],
    epsilon: float,
    delta: float,
    *,
    theorem: Theorem = magnitude,
    sharp: bool = True,
    **options: Any,
) -> float | None:
    """The share of the inner weights that one round of iterative pruning may take; None if the theorem allows none.

    The widths are those of the model's linear layers, and K is read from its weights: √3 × their standard deviation
    × √n, the largest of the inner layers. Biases are not counted, as in the document. The promise is for networks drawn
    like this one; what holds for this one itself is `certificate.largest`.
    """
    widths, K = (tuple(model), None) if not isinstance(model, nn.Module) else measured(model)
    if K is not None and "law" not in options:
        options["law"] = Uniform(K)
    found = largest(theorem, widths, epsilon, delta, sharp=sharp, **options)
    return None if found is None else found.sparsity


def measured(model: nn.Module) -> tuple[tuple[int, ...], float]:
    """The widths of a chain of linear layers, and the K that has the largest variance of its inner ones."""
    other = [m for m in model.modules() if isinstance(m, (nn.modules.conv._ConvNd, nn.RNNBase))]
    if other:
        raise PomonaError(
            f"the theorem is about chains of linear layers, and the model has {type(other[0]).__name__}: "
            "take pomona.theory.certificate for it."
        )
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    fits = all(a.out_features == b.in_features for a, b in pairwise(layers))
    require(len(layers) >= 3 and fits, f"the theorem needs a chain of three linear layers or more, got {len(layers)}.")
    inner = [m.weight.detach() for m in layers[1:-1]]
    K = max(float((3 * w.double().pow(2).mean() * max(w.shape)).sqrt()) for w in inner)
    return (layers[0].in_features, *(m.out_features for m in layers)), K


# ---- asymptotic extensions


@dataclass(frozen=True)
class Estimate:
    """What an extension of appendices C and E makes likely for wide layers: no bound."""

    name: str
    removed: float  # ‖W − W*‖ of a layer
    error: float
    label: str = "asymptotic"


EXTENSIONS = ("C.1", "C.2", "E.2", "E.3")


def estimate(
    extension: str,
    widths: Sequence[int],
    *,
    alpha: float | None = None,
    sparsity: float | None = None,
    law: Uniform | Gaussian | None = None,
    kernel: int = 3,
    lipschitz: float | Sequence[float] = 1.0,
    radius: float = 1.0,
    C: float = LATALA,
) -> Estimate:
    """How far f may be from F where the theorems do not reach, for wide layers.

    C.1: magnitude pruning of any law, every removed entry as large as the threshold (Chibisov's limit), and Lemma 4.
    C.2: 2-D kernels of least L1 norm; the norm is normal, a block's norm at most its kernel's, and Lemma 4.
    E.2: random pruning without replacement, √ρ of what a layer has.
    E.3: global magnitude pruning, as much as three times its share in one layer.
    """
    if extension not in EXTENSIONS:
        raise PomonaError(f"unknown extension '{extension}': choose one of {', '.join(EXTENSIONS)}.")
    law = law or Gaussian()
    top = 2.0 if extension == "C.2" else 1.0
    widths, alpha, pruned = setting(widths, alpha, sparsity, "sharp", 0.5, top=top, radius=radius, C=C)
    depth, inner = len(widths) - 1, shapes(widths)[1:-1]
    rates = [min(1.0, (3 if extension == "E.3" else 1) * n / (a * b)) for n, (a, b) in zip(pruned, inner, strict=True)]
    norms = [law.expected(*s) for s in shapes(widths)]
    if extension == "C.2":
        removed = [
            C * 3 * math.sqrt(a) * smallest_kernels(law, kernel, a, r) for r, (a, _) in zip(rates, inner, strict=True)
        ]
        norms = [kernel * n for n in norms]  # each tap has its share of a fan-in of q² n
    elif extension == "E.2":
        removed = [math.sqrt(r) * law.expected(*s) for r, s in zip(rates, inner, strict=True)]
    else:
        removed = [3 * C * math.sqrt(max(s)) * magnitude_at(law, r, max(s)) for r, s in zip(rates, inner, strict=True)]
    error = radius * steepness(lipschitz, depth - 1) * propagate(norms, removed)
    return Estimate(extension, max(removed), error)


def removed_norm(rows: int, columns: int, sparsity: float, law: Uniform | Gaussian | None = None) -> float:
    """What ‖W − W*‖ tends to when the smallest go: (√rows + √columns) √E[w²; removed].

    For uniform weights in a square matrix 2 K ρ^(3/2) / √3, where the document has c2 ρ.
    """
    law = law or Uniform()
    n = max(rows, columns)
    edge = magnitude_at(law, sparsity, n)
    if isinstance(law, Uniform):
        second = sparsity * edge**2 / 3
    else:
        z = edge * math.sqrt(n / law.K)
        second = law.K / n * (sparsity - 2 * z * math.exp(-(z**2) / 2) / math.sqrt(2 * math.pi))
    return (math.sqrt(rows) + math.sqrt(columns)) * math.sqrt(second)


def magnitude_at(law: Uniform | Gaussian, sparsity: float, n: int) -> float:
    """The magnitude below which a share `sparsity` of the weights lies."""
    if isinstance(law, Uniform):
        return law.K * sparsity / math.sqrt(n)
    return math.sqrt(law.K / n) * float(ndtri((1 + sparsity) / 2)) if sparsity < 1 else math.inf


def smallest_kernels(law: Uniform | Gaussian, kernel: int, channels: int, sparsity: float) -> float:
    """The L1 norm below which a share `sparsity` of the q × q kernels lies, by the central limit theorem."""
    taps, second = kernel**2, law.K1 / channels / kernel**2
    mean = math.sqrt(second) * (math.sqrt(3) / 2 if isinstance(law, Uniform) else math.sqrt(2 / math.pi))
    return max(0.0, taps * mean + math.sqrt(taps * (second - mean**2)) * float(ndtri(sparsity)))


# ---- what they share


class TooNarrow(PomonaError):
    """Widths that break an assumption, and wider ones might not."""


def shapes(widths: Sequence[int]) -> list[tuple[int, int]]:
    """Rows and columns of each layer's matrix."""
    return [(b, a) for a, b in pairwise(widths)]


def sizes(widths: Sequence[int]) -> list[int]:
    """D_k of the layers 1 < k < l."""
    return [a * b for a, b in shapes(widths)[1:-1]]


def propagate(norms: Sequence[float], removed: Sequence[float]) -> float:
    """Π (‖W_k‖ + ‖W_k − W_k*‖) − Π ‖W_k‖ with nothing removed from the first and last layer.

    As a sum of what each layer adds, for the difference of the products would cancel.
    """
    before, gap = norms[0], 0.0
    for norm, gone in zip(norms[1:-1], removed, strict=True):
        before, gap = before * norm, gap * (norm + gone) + before * gone
    return gap * norms[-1]


def setting(
    widths: Sequence[int],
    alpha: float | None,
    sparsity: float | None,
    form: str,
    delta: float,
    top: float = 1.0,
    repeated: bool = False,
    **positives: float,
) -> tuple[tuple[int, ...], float, tuple[int, ...]]:
    """Checked widths, α and N_k. A sparsity is that of the smallest pruned layer, and of `repeated` draws expected."""
    positive(**positives)
    require(0 < delta < 1, f"delta is a probability between 0 and 1, got {delta:g}.")
    widths = tuple(int(w) for w in widths)
    require(
        len(widths) >= 4 and min(widths) >= 1,
        f"a network of the theorems has three layers or more, and so four widths (d_0, …, d_l), got {list(widths)}.",
    )
    d, ends = min(widths[1:-1]), max(widths[0], widths[-1])
    if form != "sharp" and d < ends:
        raise TooNarrow(
            f"assumption (ii) needs hidden layers as wide as the input and the output, but {d} < {ends}: "
            f"widen them to {ends}, or take the sharp form, which does without."
        )
    if sparsity is not None:
        require(alpha is None, "alpha and sparsity say the same (ρ = D^−α): give one.")
        require(0 < sparsity < 1, f"sparsity must lie between 0 and 1, got {sparsity:g}.")
        share = -math.log1p(-sparsity) if repeated else sparsity
        require(
            share < 1,
            f"D draws with replacement prune 63.2 % on average, and {sparsity:.1%} are asked for: draw distinct ones.",
        )
        alpha = -top * math.log(share) / math.log(max(2, min(sizes(widths))))
        if alpha >= top:
            raise TooNarrow(
                f"a share of {sparsity:g} is less than one of the {min(sizes(widths)):,} weights of a layer."
            )
    if alpha is None:
        raise PomonaError("say how much is pruned: alpha, or sparsity.")
    require(
        0 < alpha < top,
        f"alpha must lie between 0, where all is pruned, and {top:g}, where one {'weight' if top == 1 else 'kernel'} "
        f"is, got {alpha:g}.",
    )
    # D^(1−α) may be far beyond the integers that floats hold exactly; there one more or less does not matter.
    return widths, alpha, tuple(min(D, int(D ** (1 - alpha / top) * (1 + 1e-12))) for D in sizes(widths))


def form_of(printed: bool, sharp: bool) -> str:
    require(not (printed and sharp), "the printed form has its own constants: leave out sharp or printed.")
    return "printed" if printed else "sharp" if sharp else "corrected"


def steepness(lipschitz: float | Sequence[float], count: int) -> float:
    """L_1 … L_{l−1} multiplied, of one constant for all activations or one for each."""
    each = [lipschitz] * count if isinstance(lipschitz, (int, float)) else [float(L) for L in lipschitz]
    require(len(each) == count, f"there are {count} activations, and so as many Lipschitz constants, got {len(each)}.")
    positive(**{f"lipschitz {k}": L for k, L in enumerate(each, 1)})
    return math.prod(each)


def most_alpha(widths: tuple[int, ...], form: str = "corrected") -> float:
    """The largest α with enough draws for Lemma 6: conditions (3) and (4), or Theorem 3's ("kernels")."""
    if form == "kernels":
        d = widths[1]
        return 2 - (math.log(d + 1) + math.log(math.log(max(d, 3)))) / math.log(max(d, 2))
    if form == "printed":  # with a minus, and one layer too far
        sides = [(side, a * b) for a, b in pairwise(widths[2:]) for side in (a, b)]
        sign = -1
    else:
        sides = [(side, a * b) for a, b in shapes(widths)[1:-1] for side in (a, b)]
        sign = 1
    return min(1 - (math.log(s + 1) + sign * math.log(math.log(max(s, 2)))) / math.log(max(D, 2)) for s, D in sides)


def check_crowding(widths: tuple[int, ...], alpha: float, form: str) -> None:
    """Refuse an α that prunes too little for Lemma 6 to hold."""
    limit = most_alpha(widths, form)
    if alpha <= limit:
        return
    low = high = min(widths[1:-1])
    while high <= WIDEST and most_alpha(widened(widths, high), form) < alpha:
        low, high = high, 2 * high
    while high <= WIDEST and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if most_alpha(widened(widths, middle), form) >= alpha else (middle, high)
    what = "Theorem 3's condition on α" if form == "kernels" else "conditions (3) and (4)"
    way = f"hidden layers of {high:,} would do" if high <= WIDEST else "no width would do"
    raise TooNarrow(
        f"{what}: alpha={alpha:g} prunes too little for rows and columns to lose alike; at these widths it may be at "
        f"most {limit:.4f}, and {way}; the sharp form does without."
    )


def assumed_norms(
    law: Law, widths: tuple[int, ...], norms: Sequence[float] | None, deltas: Sequence[float] | None, delta: float
) -> tuple[list[float], list[float]]:
    """N_k and δ_k of assumption (iv)."""
    depth = len(widths) - 1
    if norms is None:
        require(deltas is None, "deltas are the probabilities with which norms fail: give both or neither.")
        share = delta / (4 * depth)
        return [law.exceeded(law.expected(*s), max(s), share) for s in shapes(widths)], [share] * depth
    fails = [0.0] * depth if deltas is None else [float(f) for f in deltas]
    require(
        len(norms) == len(fails) == depth,
        f"assumption (iv) has a norm and a delta for each of the {depth} layers, got {len(norms)} and {len(fails)}.",
    )
    positive(**{f"norm {k}": n for k, n in enumerate(norms, 1)})
    require(sum(fails) < delta, cannot_meet(delta, sum(fails)))
    return [float(n) for n in norms], fails


def cannot_meet(delta: float, lost: float) -> str:
    return (
        f"delta={delta:g} cannot be met (5): the norms alone fail with {lost:g}; give a larger delta, or larger norms."
    )


def removed_at_random(law: Law, C: float, shape: tuple[int, int], count: int, crowd: float, slip: float) -> float:
    """What ‖W − W*‖ exceeds with probability `slip`, if no row or column is more crowded than all but `crowd` are."""
    rows, columns = shape
    in_row, in_column = crowded(count, rows, crowd), crowded(count, columns, crowd)
    by_lemma4 = latala(law, C, rows, columns, min(in_row, columns), min(in_column, rows), count)
    # Zeros make no expected norm larger.
    return law.exceeded(min(by_lemma4, law.expected(rows, columns)), max(shape), slip)


def best_levels(means: Sequence[float], depth: int, delta: float) -> tuple[float, list[float]]:
    """Levels of ‖W‖, ‖removed‖ and ‖W_l‖ that all hold but for δ by Markov, with the smallest error."""
    counts = np.array([depth - 1, depth - 2, 1])

    def levels(logits: Any) -> Any:
        share = np.exp(np.append(logits, 0.0) - np.max(np.append(logits, 0.0)))
        return counts * np.array(means) / (delta * share / share.sum())

    def error(found: Any) -> float:
        norm, gone, last = found
        return float(propagate([norm] * (depth - 1) + [last], [gone] * (depth - 2)))

    found = minimize(lambda x: math.log(error(levels(x))), np.zeros(2), method="Nelder-Mead")
    return error(levels(found.x)), [float(v) for v in levels(found.x)]


def best_betas(
    at: Callable[[float, float], tuple[float, float]],
    alpha: float,
    delta: float,
    beta1: float | None,
    beta2: float | None,
) -> tuple[float, float]:
    """β1 and β2 as given, else those with the smallest error at confidence 1 − δ, else with the highest probability.

    Both make the error smaller and the bound less likely.
    """
    tiny, top = 1e-9, alpha / 4
    require(beta1 is None or 0 < beta1 < 1, f"beta1 must lie between 0 and 1, got {beta1}.")
    require(beta2 is None or 0 < beta2 < top, f"beta2 must lie between 0 and α/4 = {top:g}, got {beta2}.")
    likeliest = (tiny if beta1 is None else beta1, tiny * top if beta2 is None else beta2)
    if at(*likeliest)[1] < 1 - delta:
        return likeliest

    def second(b1: float) -> float:
        """The largest β2 that leaves the confidence."""
        if beta2 is not None:
            return beta2
        low, high = tiny * top, top * (1 - tiny)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if at(b1, middle)[1] >= 1 - delta else (low, middle)
        return low

    def cost(b1: float) -> float:
        error, probability = at(b1, second(b1))
        return math.log(error) if probability >= 1 - delta else 1e6 - probability

    b1 = beta1 if beta1 is not None else float(minimize_scalar(cost, bounds=(tiny, 1 - tiny), method="bounded").x)
    if beta1 is None and at(b1, second(b1))[1] < 1 - delta:
        b1 = tiny
    return b1, second(b1)
