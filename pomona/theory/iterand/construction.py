"""The construction of Theorem A.1 of Chijiwa et al. (2021): a random network, its resampled weights and its masks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...errors import require
from .failure_probability import Array, failure, require_valid_parameters
from .hidden_widths import reaches, tolerance, widths

NORM_ROUNDING = 1e-12  # by which a Frobenius norm may exceed 1


@dataclass(frozen=True)
class Subnetwork:
    """A random network's matrices after resampling, its masks, and the target that they approximate."""

    target: Sequence[Array]
    weights: Sequence[Array]
    masks: Sequence[NDArray[np.bool_]]
    fits: bool  # whether a unit was found for every weight of the target

    def pairs(self) -> Iterator[tuple[Array, Array]]:
        """Yield for each layer of the target its two pruned matrices, without unused units."""
        pruned = [np.where(mask, G, 0) for G, mask in zip(self.weights, self.masks, strict=True)]
        for hidden, out, mask in zip(pruned[::2], pruned[1::2], self.masks[1::2], strict=True):
            used = mask.any(0)
            yield hidden[used], out[:, used]

    def __call__(self, x: Array) -> Array:
        """Return g_M (equation 3) of the rows of x."""
        return forward([matrix for pair in self.pairs() for matrix in pair], x)

    def gap(self, points: int = 10_000, seed: int = 0) -> float:
        """Return the largest ‖f(x) − g_M(x)‖₂ at random points, and at all of {−1, 0, 1}^d_0 if these are few.

        One layer is linear in each orthant, so its supremum is at one of the latter.
        """
        inputs, generator = self.target[0].shape[1], np.random.default_rng(seed)
        x = generator.uniform(-1, 1, (points, inputs))
        x[::2] = np.sign(x[::2])
        if 3**inputs <= points:
            x = np.concatenate([x, np.array(list(itertools.product((-1.0, 0.0, 1.0), repeat=inputs)))])
        return float(np.linalg.norm(forward(self.target, x) - self(x), axis=1).max())

    def certificate(self) -> float:
        """Return an upper bound of ‖f(x) − g_M(x)‖₂ over the whole cube, from the errors of the matrices."""
        size, error, reach = math.sqrt(self.target[0].shape[1]), 0.0, 1.0
        for F, (hidden, out) in zip(self.target, self.pairs(), strict=True):
            # For each coordinate only the units of its sign are active: two matrices, from which x picks the columns.
            deviations = np.stack([F - s * out @ np.maximum(s * hidden, 0) for s in (1, -1)])
            step = float(np.linalg.norm(deviations, axis=1).max(0).sum()) * reach
            norm = float(np.linalg.norm(F, 2))
            error, size = norm * error + step, norm * size
            reach = size + error
        return error


class LayerTarget(NamedTuple):
    """One layer of the target: its matrix, the tolerance τ of its weights, and the number of units for each weight."""

    matrix: Array
    tau: float
    units: int


def build(target: Sequence[ArrayLike], epsilon: float, R: int, widths: Sequence[int], seed: int = 0) -> Subnetwork:
    """Return Theorem A.1's construction: a random network of these hidden widths, resampled up to R times, with masks.

    An entry is resampled until it is within τ of the value that the proof needs, or R draws are used. Each weight of
    the target then takes, among its units, the one whose product is nearest.
    """
    require_valid_parameters(R=R)
    generator, layers = np.random.default_rng(seed), layer_targets(target, epsilon, widths)
    weights, masks, fits = [], [], True
    for F, tau, units in layers:
        outputs, inputs = F.shape
        # The units in order: for each input `units` of sign +, then `units` of sign −.
        column, sign = np.repeat(np.arange(inputs), 2 * units), np.tile(np.repeat([1.0, -1.0], units), inputs)
        own_input = np.arange(inputs) == column[:, None]  # the input that each unit serves
        wanted = F[:, column] * sign
        first = resample(np.where(own_input, sign[:, None], np.nan), tau, R, generator)
        second = resample(wanted, tau, R, generator)

        u = first[own_input] * sign
        close = ((np.abs(u - 1) <= tau) & (np.abs(second - wanted) <= tau)).reshape(outputs, -1, units)
        fits &= bool(close.any(-1).all())
        # A unit of the wrong sign would do harm. Where all are, the weight gets no unit.
        errors = np.where(u > 0, np.abs(second * u - wanted), np.inf).reshape(outputs, -1, units)
        nearest = (np.arange(units) == errors.argmin(-1)[..., None]) & np.isfinite(errors)

        kept = nearest.reshape(outputs, -1)
        weights += [first, second]
        masks += [own_input & kept.any(0)[:, None], kept]
    return Subnetwork([layer.matrix for layer in layers], weights, masks, fits)


def resample(target: Array, tau: float, R: int, generator: np.random.Generator) -> Array:
    """Return draws of U[−1, 1], each resampled up to R − 1 times until it is within τ of its target.

    An entry whose target is NaN is drawn once.
    """
    drawn = generator.uniform(-1, 1, target.shape)
    missing = np.flatnonzero(np.abs(drawn - target) > tau)
    for _ in range(R - 1):
        if not len(missing):
            break
        drawn.flat[missing] = generator.uniform(-1, 1, len(missing))
        missing = missing[np.abs(drawn.flat[missing] - target.flat[missing]) > tau]
    return drawn


def success(target: Sequence[ArrayLike], epsilon: float, R: int, widths: Sequence[int]) -> float:
    """Return the exact probability that `build` fits, a product over independent layers, inputs and signs."""
    require_valid_parameters(R=R)
    return math.prod(
        (1 - failure(w, tau, R, units)) ** 2 for F, tau, units in layer_targets(target, epsilon, widths) for w in F.T
    )


@dataclass(frozen=True)
class Trial:
    """The results of building one target in several random networks."""

    widths: list[int]
    success: float  # the exact probability that one network fits
    fits: int  # the number of networks that fit
    seeds: int  # the number of networks
    gap: float  # the largest gap of all networks
    certificate: float  # the largest certificate of those that fit, at most ε


def trial(
    sizes: Sequence[int], epsilon: float, delta: float, R: int, *, seeds: int = 10, printed: bool = False
) -> Trial:
    """Return the results for a random target of norm 1 in `seeds` networks of the corrected (or `printed`) widths."""
    require_valid_parameters(seeds=seeds)
    generator = np.random.default_rng(0)
    matrices = [generator.standard_normal((o, i)) for i, o in itertools.pairwise(sizes)]
    target = [F / np.linalg.norm(F) for F in matrices]
    hidden = widths(sizes, epsilon, delta, R, printed=printed)
    networks = [build(target, epsilon, R, hidden, seed) for seed in range(seeds)]
    return Trial(
        widths=hidden,
        success=success(target, epsilon, R, hidden),
        fits=sum(network.fits for network in networks),
        seeds=seeds,
        gap=max(network.gap() for network in networks),
        certificate=max((network.certificate() for network in networks if network.fits), default=math.nan),
    )


def forward(matrices: Sequence[Array], x: Array) -> Array:
    """Return F_l σ(… F_1 x) of the rows of x."""
    for F in matrices[:-1]:
        x = np.maximum(x @ F.T, 0)
    return x @ matrices[-1].T


def layer_targets(target: Sequence[ArrayLike], epsilon: float, widths: Sequence[int]) -> list[LayerTarget]:
    """Validate a target and hidden widths, and return the layers with their tolerances and numbers of units."""
    require_valid_parameters(epsilon=epsilon)
    matrices = [np.atleast_2d(np.asarray(F, dtype=float)) for F in target]
    require(
        len(widths) == len(matrices) > 0,
        f"a target of {len(matrices)} layers needs as many hidden widths, and one at least, got {len(widths)}.",
    )
    sizes, layers = [matrices[0].shape[1], *(len(F) for F in matrices)], []
    for k, (F, hidden, reach) in enumerate(zip(matrices, widths, reaches(sizes, epsilon), strict=True), 1):
        (outputs, inputs), norm = F.shape, float(np.linalg.norm(F))
        require(
            norm <= 1 + NORM_ROUNDING,
            f"F_{k} has the Frobenius norm {norm:.4g}, and the theorem allows 1: scale it.",
        )
        require(inputs == sizes[k - 1], f"F_{k} takes {inputs} inputs, and there are {sizes[k - 1]}.")
        require(
            hidden > 0 and hidden % (2 * inputs) == 0,
            f"hidden layer {k} has {hidden} units, and its {inputs} inputs with two signs need a multiple of "
            f"{2 * inputs}: take what widths() gives.",
        )
        tau = tolerance(inputs, outputs, len(matrices), epsilon, reach)
        layers.append(LayerTarget(F, tau, hidden // (2 * inputs)))
    return layers
