"""Theorem 3 of Qian & Klabjan (2021): random pruning of the 2-D kernels of convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.optimize import minimize, minimize_scalar

from ...errors import require
from ..validation import require_positive
from .bound import Bound, TooNarrow, select_form
from .distributions import KURTOSIS, LATALA, Moments, latala
from .lemmas import bin_count_bound, lemma6
from .network import lipschitz_product, propagated_error
from .pruning import KERNELS_ALPHA_LIMIT, require_enough_draws, resolve_pruning

BETA_MARGIN = 1e-9  # distance from the open ends of the intervals of β1 and β2, for β2 relative
BETA_BISECTIONS = 60
INFEASIBLE_COST = 1e6  # above the logarithm of any error


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
    """Return Theorem 3's bound for pruning ⌊d^(2−α)⌋ kernels of each convolution d → d, drawn with replacement.

    Inputs lie in [0, radius]^n. `widths` are the channels (d0, d, …, d) of the image and of the l − 1 convolutions, and
    the classes d_l. Weights have E w² ≤ C1/p²d and E w⁴ ≤ C2/p⁴d². ‖W_k‖ ≤ p^−β1 except with probability
    C3 q²/p^(1−β1), and ‖W_k − W_k*‖ ≤ d^−β2 except with probability C4 q²/p d^(β2−α/4). β1 and β2 are given, or chosen
    for the smallest error at confidence 1 − δ.

    The last layer's norm cannot be below p^−β1 as the paper has it: one of its rows alone has norm √C1. Here it is
    bounded by E‖W_l‖ p^(1−β1) / C5, with the same probability. The sharp form is Markov's inequality at the best
    levels.
    """
    require_positive(image=image, kernel=kernel, C1=C1, C2=C2)
    channels, form = {*widths[1:-1]}, select_form(printed, sharp)
    require(len(channels) == 1, f"Theorem 3 has one number d of channels for all convolutions, got {[*widths[1:-1]]}.")
    widths, alpha, pruned = resolve_pruning(
        widths, alpha, sparsity, form, delta, KERNELS_ALPHA_LIMIT, with_replacement=True, radius=radius, C=C
    )
    if widths[0] > widths[1]:
        raise TooNarrow(f"assumption (ii) needs as many channels as the image has, but {widths[1]} < {widths[0]}.")
    depth, d, p, q = len(widths) - 1, widths[1], image, kernel
    law = Moments(C1, C2 if printed else max(C2, KURTOSIS * C1**2), C)
    plain, kept = (C * (2 * math.sqrt(rows * C1) + law.K2**0.25) for rows in (1, 3))
    last = law.expected(widths[-1], p * p * d)
    cube = radius * p * math.sqrt(d if printed else widths[0])
    scale = cube * lipschitz_product(lipschitz, depth - 1)
    constants = {"C": C, "C3": plain, "C4": kept, "C5": plain if not sharp else last}
    if sharp:
        share_failure = delta / 4 / (2 * (depth - 2))
        most = bin_count_bound(pruned[0], d, share_failure)
        means = (q**2 / p * plain, q**2 / p * latala(law, C, d, d, most, most, pruned[0]), last)
        error, levels = optimal_markov_levels(means, depth, delta * 3 / 4)
        constants |= dict(zip(("‖W‖", "‖removed‖", "‖W_l‖"), levels, strict=True))
        return Bound("Theorem 3", form, scale * error, 1 - delta, widths, alpha, pruned, constants, True)
    require_enough_draws(widths, alpha, "kernels")
    even = (1 - (d ** (-1 / 3) if printed else lemma6(d))) ** (2 * (depth - 2))
    pairs = (depth**2 - depth - 2) / 2 if printed else depth - 1

    def evaluate(b1: float, b2: float) -> tuple[float, float]:
        """Return error and probability at these β1 and β2."""
        norm, removed = p**-b1, d**-b2
        last_norm = norm if printed else last * p ** (1 - b1) / plain
        error = scale * last_norm * norm * ((norm + removed) ** (depth - 2) - norm ** (depth - 2))
        lost = (depth - 2) * kept * q**2 / p * d ** (b2 - alpha / 4) + (pairs * q**2 + 1) * plain * p ** (b1 - 1)
        return error, even * (1 - lost)

    b1, b2 = optimal_betas(evaluate, alpha, delta, beta1, beta2)
    error, probability = evaluate(b1, b2)
    constants |= {"beta1": b1, "beta2": b2}
    return Bound("Theorem 3", form, error, probability, widths, alpha, pruned, constants, True)


def optimal_markov_levels(means: Sequence[float], depth: int, delta: float) -> tuple[float, list[float]]:
    """Return the smallest error by Markov's inequality, and the levels of ‖W‖, ‖removed‖ and ‖W_l‖ behind it.

    `means` are the expectations of the three norms. All levels hold together with probability 1 − δ.
    """
    counts = np.array([depth - 1, depth - 2, 1])

    def levels(logits: Any) -> Any:
        share = np.exp(np.append(logits, 0.0) - np.max(np.append(logits, 0.0)))
        return counts * np.array(means) / (delta * share / share.sum())

    def error(found: Any) -> float:
        norm, removed, last = found
        return float(propagated_error([norm] * (depth - 1) + [last], [removed] * (depth - 2)))

    found = minimize(lambda x: math.log(error(levels(x))), np.zeros(2), method="Nelder-Mead")
    return error(levels(found.x)), [float(v) for v in levels(found.x)]


def optimal_betas(
    evaluate: Callable[[float, float], tuple[float, float]],
    alpha: float,
    delta: float,
    beta1: float | None,
    beta2: float | None,
) -> tuple[float, float]:
    """Return β1 and β2 with the smallest error at confidence 1 − δ; where none has it, those of highest probability.

    A given β1 or β2 is left as it is. `evaluate` maps (β1, β2) to (error, probability); both β make the error smaller
    and the bound less likely.
    """
    limit = alpha / 4
    require(beta1 is None or 0 < beta1 < 1, f"beta1 must lie between 0 and 1, got {beta1}.")
    require(beta2 is None or 0 < beta2 < limit, f"beta2 must lie between 0 and α/4 = {limit:g}, got {beta2}.")
    likeliest = (BETA_MARGIN if beta1 is None else beta1, BETA_MARGIN * limit if beta2 is None else beta2)
    if evaluate(*likeliest)[1] < 1 - delta:
        return likeliest

    def largest_beta2(b1: float) -> float:
        """Return the largest β2 that keeps the confidence."""
        if beta2 is not None:
            return beta2
        low, high = BETA_MARGIN * limit, limit * (1 - BETA_MARGIN)
        for _ in range(BETA_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if evaluate(b1, middle)[1] >= 1 - delta else (low, middle)
        return low

    def cost(b1: float) -> float:
        error, probability = evaluate(b1, largest_beta2(b1))
        return math.log(error) if probability >= 1 - delta else INFEASIBLE_COST - probability

    if beta1 is not None:
        return beta1, largest_beta2(beta1)
    b1 = float(minimize_scalar(cost, bounds=(BETA_MARGIN, 1 - BETA_MARGIN), method="bounded").x)
    if evaluate(b1, largest_beta2(b1))[1] < 1 - delta:
        b1 = BETA_MARGIN
    return b1, largest_beta2(b1)
