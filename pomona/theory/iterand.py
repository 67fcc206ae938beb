"""How wide a random network must be to hold a target under its masks: Chijiwa et al., NeurIPS 2021, appendix A.

The target is f(x) = F_l σ(F_{l−1} σ(… F_1 x)) with ‖F_i‖_F ≤ 1. The random network g is twice as deep, its
entries are U[−1, 1], and each may be drawn again up to R − 1 times. A weight w of F_i stands on two hidden
units, one for x > 0 and one for x < 0, each chosen from d′ ("units" here):

    w x = w σ(x) − w σ(−x) ≈ v σ(u x) + v′ σ(u′ x),   |u − 1|, |v − w|, |u′ + 1|, |v′ + w| ≤ τ.

Where the document errs, and by how much, is in docs/errata.md. What `width` has instead: the draws of one unit
are no R² independent pairs, so that a unit fits with π = p_u p_v, p = 1 − (1 − τ/2)^R; and what enters a later
layer from the cube is as large as √d_0 + ε, not 2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binom

from ..errors import require

Array = NDArray[np.float64]


# ---- how wide


def width_printed(d_in: int, d_out: int, layers: int, epsilon: float, delta: float, R: int) -> int:
    """Theorem A.1's width of the hidden layer between d_in and d_out, as printed."""
    check(d_in=d_in, d_out=d_out, layers=layers, R=R, epsilon=epsilon, delta=delta)
    tau = epsilon / (4 * layers * d_in * math.sqrt(d_out))
    return 2 * d_in * math.ceil(math.log(2 * layers * d_in * d_out / delta) / (tau * R / 2) ** 2)


def width(
    d_in: int, d_out: int, layers: int, epsilon: float, delta: float, R: int, *, reach: float | None = None
) -> int:
    """The width that the proof needs: for each weight and sign one of the units fits, but for a probability δ/l.

    `reach` bounds the entries of what comes into the layer. By default it is √d_in + ε (1 where there is
    only one layer), which is right wherever the network has no more inputs than this layer; see `widths`.
    """
    check(d_in=d_in, d_out=d_out, layers=layers, R=R, epsilon=epsilon, delta=delta)
    if reach is None:
        reach = 1.0 if layers == 1 else math.sqrt(d_in) + epsilon
    require(0 < reach < math.inf, f"reach bounds what comes into the layer, and must be positive, got {reach:g}.")
    log_missed = float(missed(1.0, tolerance(d_in, d_out, layers, epsilon, reach), R))
    p = -math.expm1(log_missed)
    # log(1 − p²), in the form that keeps its digits.
    log_fails = math.log1p(-p * p) if p < 0.5 else log_missed + math.log1p(p)
    return 2 * d_in * math.ceil(math.log(2 * layers * d_in * d_out / delta) / -log_fails)


def widths(sizes: Sequence[int], epsilon: float, delta: float, R: int, *, printed: bool = False) -> list[int]:
    """The hidden widths of g for a target with layers of these sizes, d_0 … d_l."""
    layers = list(itertools.pairwise(sizes))
    require(bool(layers), f"a network has inputs and outputs, so at least two sizes, got {list(sizes)}.")
    if printed:
        return [width_printed(i, o, len(layers), epsilon, delta, R) for i, o in layers]
    into = reaches(sizes, epsilon)
    return [width(i, o, len(layers), epsilon, delta, R, reach=x) for (i, o), x in zip(layers, into, strict=True)]


def reaches(sizes: Sequence[int], epsilon: float) -> list[float]:
    """What can enter each layer: 1 for the first, and ‖x_0‖₂ + ε ≤ √d_0 + ε for all others."""
    return [1.0] + [math.sqrt(sizes[0]) + epsilon] * (len(sizes) - 2)


def tolerance(d_in: int, d_out: int, layers: int, epsilon: float, reach: float) -> float:
    """τ: half of the error that each weight may have for the layer to stay under ε/l on what enters it.

    |w − uv| ≤ 2τ, and only one of the two units answers to any x, so that their errors do not add.
    """
    return epsilon / (2 * layers * reach * d_in * math.sqrt(d_out))


# ---- how likely


def missed(target: ArrayLike, tau: float, R: int) -> Array:
    """The log-probability that none of R draws of U[−1, 1] comes within τ of the target."""
    w = np.asarray(target, dtype=float)
    largest = float(np.abs(w).max())
    require(largest <= 1, f"a weight must lie in [−1, 1] to be drawn, got {largest:g}: scale the target.")
    return R * np.log1p(-(np.minimum(1, w + tau) - np.maximum(-1, w - tau)) / 2)


def failure(w: ArrayLike, tau: float, R: int, units: int) -> float:
    """The exact probability that for some of the weights w, which share their units' u, no unit fits.

    One weight is the event (11) of Lemma A.4, (1 − p_u p_v)^units. Several are that of Lemma A.5: given a units
    whose u fits, the weights are independent, and all find theirs with probability Π (1 − (1 − p_v)^a).
    """
    check(R=R, units=units, tau=tau)
    a = np.arange(units + 1)
    with np.errstate(divide="ignore"):  # a = 0 fails for sure: log 0
        found = np.log1p(-np.exp(np.multiply.outer(np.atleast_1d(missed(w, tau, R)), a))).sum(0)
    return float(binom.pmf(a, units, -np.expm1(missed(1.0, tau, R))) @ -np.expm1(found))


def failure_printed(tau: float, R: int, units: int) -> float:
    """The document's bound on it, as if the d′R² pairs were independent: (1 − τ²/4)^{d′R²}."""
    check(R=R, units=units, tau=tau)
    return math.exp(units * R**2 * math.log1p(-(tau**2) / 4))


def failure_simulated(
    w: ArrayLike, tau: float, R: int, units: int, draws: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """The share of random units that hold no fit for some of the weights, and its standard error."""
    check(R=R, units=units, tau=tau, draws=draws)
    targets, draw = np.atleast_1d(np.asarray(w, dtype=float)), np.random.default_rng(seed)
    failed = 0
    for _ in range(draws):
        u = (np.abs(draw.uniform(-1, 1, (units, R)) - 1) <= tau).any(-1)
        v = (np.abs(draw.uniform(-1, 1, (len(targets), units, R)) - targets[:, None, None]) <= tau).any(-1)
        failed += not (u & v).any(-1).all()
    share = failed / draws
    return share, math.sqrt(max(share * (1 - share), 1 / draws) / draws)


# ---- the construction


@dataclass(frozen=True)
class Subnetwork:
    """A random network's matrices after their draws, its masks, and the target they are held against."""

    target: Sequence[Array]
    weights: Sequence[Array]
    masks: Sequence[NDArray[np.bool_]]
    fits: bool  # whether every weight of the target found its units

    def pairs(self) -> Iterator[tuple[Array, Array]]:
        """For each layer of the target its two pruned matrices, without the units that nothing uses."""
        pruned = [np.where(mask, G, 0) for G, mask in zip(self.weights, self.masks, strict=True)]
        for hidden, out, mask in zip(pruned[::2], pruned[1::2], self.masks[1::2], strict=True):
            used = mask.any(0)
            yield hidden[used], out[:, used]

    def __call__(self, x: Array) -> Array:
        """g_M (equation 3) of the rows of x."""
        return forward([matrix for pair in self.pairs() for matrix in pair], x)

    def gap(self, points: int = 10_000, seed: int = 0) -> float:
        """The largest ‖f(x) − g_M(x)‖₂ found: at all points of {−1, 0, 1}^d_0, if they are few, and at random ones.

        One layer is linear in each orthant, so that its supremum is at one of these points.
        """
        inputs, draw = self.target[0].shape[1], np.random.default_rng(seed)
        x = draw.uniform(-1, 1, (points, inputs))
        x[::2] = np.sign(x[::2])
        if 3**inputs <= points:
            x = np.concatenate([x, np.array(list(itertools.product((-1.0, 0.0, 1.0), repeat=inputs)))])
        return float(np.linalg.norm(forward(self.target, x) - self(x), axis=1).max())

    def certificate(self) -> float:
        """An upper bound on it over the whole cube, as the proof has it, from the matrices' own errors."""
        size, error, reach = math.sqrt(self.target[0].shape[1]), 0.0, 1.0
        for F, (hidden, out) in zip(self.target, self.pairs(), strict=True):
            # In each coordinate only the units of its own sign answer: two matrices, of which x picks the columns.
            lost = np.stack([F - s * out @ np.maximum(s * hidden, 0) for s in (1, -1)])
            step = float(np.linalg.norm(lost, axis=1).max(0).sum()) * reach
            norm = float(np.linalg.norm(F, 2))
            error, size = norm * error + step, norm * size
            reach = size + error
        return error


def build(target: Sequence[ArrayLike], epsilon: float, R: int, widths: Sequence[int], seed: int = 0) -> Subnetwork:
    """Theorem A.1's construction: a random network of these hidden widths, drawn up to R times, and its masks.

    An entry is drawn again until it is within τ of what the proof wants of it, or R draws are spent. Each weight
    of the target then takes, of its units, the pair whose product is nearest.
    """
    check(R=R)
    draw, parts = np.random.default_rng(seed), plan(target, epsilon, widths)
    weights, masks, fits = [], [], True
    for F, tau, units in parts:
        outputs, inputs = F.shape
        # The units in order: for each input `units` of sign +, then `units` of sign −.
        column, sign = np.repeat(np.arange(inputs), 2 * units), np.tile(np.repeat([1.0, -1.0], units), inputs)
        own = np.arange(inputs) == column[:, None]  # the input that each unit is for
        aim = F[:, column] * sign
        first = resample(np.where(own, sign[:, None], np.nan), tau, R, draw)
        second = resample(aim, tau, R, draw)

        u = first[own] * sign
        good = ((np.abs(u - 1) <= tau) & (np.abs(second - aim) <= tau)).reshape(outputs, -1, units)
        fits &= bool(good.any(-1).all())
        # Where no unit has the right sign any one would do harm, and the weight goes without.
        miss = np.where(u > 0, np.abs(second * u - aim), np.inf).reshape(outputs, -1, units)
        best = (np.arange(units) == miss.argmin(-1)[..., None]) & np.isfinite(miss)

        kept = best.reshape(outputs, -1)
        weights += [first, second]
        masks += [own & kept.any(0)[:, None], kept]
    return Subnetwork([F for F, _, _ in parts], weights, masks, fits)


def resample(target: Array, tau: float, R: int, draw: np.random.Generator) -> Array:
    """U[−1, 1], each entry drawn again up to R − 1 times while it is not within τ of its target; NaN wants nothing."""
    drawn = draw.uniform(-1, 1, target.shape)
    wanting = np.flatnonzero(np.abs(drawn - target) > tau)
    for _ in range(R - 1):
        if not len(wanting):
            break
        drawn.flat[wanting] = draw.uniform(-1, 1, len(wanting))
        wanting = wanting[np.abs(drawn.flat[wanting] - target.flat[wanting]) > tau]
    return drawn


def success(target: Sequence[ArrayLike], epsilon: float, R: int, widths: Sequence[int]) -> float:
    """The exact probability that `build` fits: over layers, inputs and signs, which are independent."""
    check(R=R)
    return math.prod(
        (1 - failure(w, tau, R, units)) ** 2 for F, tau, units in plan(target, epsilon, widths) for w in F.T
    )


@dataclass(frozen=True)
class Trial:
    """What came of building the same target in several random networks."""

    widths: list[int]
    success: float  # the exact probability that one fits
    fits: int  # how many did, of
    seeds: int
    gap: float  # the largest found in any
    certificate: float  # the largest of those that fit, at most ε


def trial(
    sizes: Sequence[int], epsilon: float, delta: float, R: int, *, seeds: int = 10, printed: bool = False
) -> Trial:
    """The theorem at work: a random target of norm 1, built in `seeds` networks of the right (or `printed`) widths."""
    check(seeds=seeds)
    draw = np.random.default_rng(0)
    matrices = [draw.standard_normal((o, i)) for i, o in itertools.pairwise(sizes)]
    target = [F / np.linalg.norm(F) for F in matrices]
    hidden = widths(sizes, epsilon, delta, R, printed=printed)
    built = [build(target, epsilon, R, hidden, seed) for seed in range(seeds)]
    return Trial(
        widths=hidden,
        success=success(target, epsilon, R, hidden),
        fits=sum(network.fits for network in built),
        seeds=seeds,
        gap=max(network.gap() for network in built),
        certificate=max((network.certificate() for network in built if network.fits), default=math.nan),
    )


# ---- what they share


def forward(matrices: Sequence[Array], x: Array) -> Array:
    """F_l σ(… F_1 x) of the rows of x."""
    for F in matrices[:-1]:
        x = np.maximum(x @ F.T, 0)
    return x @ matrices[-1].T


def plan(target: Sequence[ArrayLike], epsilon: float, widths: Sequence[int]) -> list[tuple[Array, float, int]]:
    """For each layer of the target its matrix, the tolerance of its weights, and the units that each chooses from."""
    check(epsilon=epsilon)
    matrices = [np.atleast_2d(np.asarray(F, dtype=float)) for F in target]
    require(
        len(widths) == len(matrices) > 0,
        f"a target of {len(matrices)} layers needs as many hidden widths, and one at least, got {len(widths)}.",
    )
    sizes, found = [matrices[0].shape[1], *(len(F) for F in matrices)], []
    for k, (F, hidden, reach) in enumerate(zip(matrices, widths, reaches(sizes, epsilon), strict=True), 1):
        (outputs, inputs), norm = F.shape, float(np.linalg.norm(F))
        require(norm <= 1 + 1e-12, f"F_{k} has the Frobenius norm {norm:.4g}, and the theorem allows 1: scale it.")
        require(inputs == sizes[k - 1], f"F_{k} takes {inputs} inputs, and there are {sizes[k - 1]}.")
        require(
            hidden > 0 and hidden % (2 * inputs) == 0,
            f"hidden layer {k} has {hidden} units, and its {inputs} inputs with two signs need a multiple of "
            f"{2 * inputs}: take what widths() gives.",
        )
        found.append((F, tolerance(inputs, outputs, len(matrices), epsilon, reach), hidden // (2 * inputs)))
    return found


def check(**given: float) -> None:
    """Refuse shares that are not between 0 and 1, and counts that are not whole."""
    for name, value in given.items():
        if name in ("epsilon", "delta", "tau"):
            require(0 < value < 1, f"{name} must lie between 0 and 1, got {value:g}.")
        else:
            require(value >= 1 and value == int(value), f"{name} is a whole number, at least 1, got {value:g}.")
