"""Solvers for the theorems of Qian & Klabjan (2021): the largest sparsity, the smallest width, and a model's share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from ...errors import PomonaError, require
from ..validation import require_positive
from .bound import Bound, Theorem, TooNarrow, select_form
from .distributions import Uniform
from .network import with_hidden_width
from .pruning import KERNELS_ALPHA_LIMIT, WEIGHTS_ALPHA_LIMIT, WIDEST, most_alpha
from .theorem1 import magnitude
from .theorem3 import cnn

ALPHA_TOLERANCE = 1e-9  # of the bisection over α, and its smallest α
BELOW_LIMIT = 1 - 1e-12  # factor that keeps α below an open limit


def largest(theorem: Theorem, widths: Sequence[int], epsilon: float, delta: float, **options: Any) -> Bound | None:
    """Return the bound that prunes most among those with error at most ε and probability at least 1 − δ, or None.

    Its `sparsity` is the solution. Less pruning is always at least as safe, so a bisection over α finds it.
    """
    require_positive(epsilon=epsilon)

    def bound_at(alpha: float) -> Bound:
        return theorem(widths, alpha=alpha, delta=delta, **options)

    low, high = ALPHA_TOLERANCE, least_pruning(theorem, tuple(widths), options)
    if high <= low or not bound_at(high).meets(epsilon, delta):
        return None
    while high - low > ALPHA_TOLERANCE:
        middle = (low + high) / 2
        low, high = (low, middle) if bound_at(middle).meets(epsilon, delta) else (middle, high)
    return bound_at(high)


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
    """Return the smallest width of all hidden layers at which the theorem guarantees ε and δ, or None if there is none.

    Without ε and δ, return the smallest width at which the theorem is not vacuous. Without α, use the largest that the
    theorem allows, which prunes least. At a fixed sparsity t = ρ^½ (or ρ^⅛) does not fall with the width, so often no
    width is enough.
    """
    require(epsilon > 0, f"epsilon must be positive, got {epsilon:g}.")
    given = options | ({} if delta is None else {"delta": delta})
    form = select_form(options.get("printed", False), options.get("sharp", False))

    def is_enough(width: int) -> bool:
        candidate, a = with_hidden_width(widths, width), alpha
        if alpha is None and sparsity is None:
            a = least_pruning(theorem, candidate, options)
            if a <= 0:
                return False
        try:
            found = theorem(candidate, alpha=a, sparsity=sparsity, **given)
        except TooNarrow:
            return False
        return found.meets(epsilon, 1.0 if delta is None else delta)

    low = max(widths[0], widths[-1], 2) if form != "sharp" else 2
    high = low
    while not is_enough(high):
        low, high = high, 2 * high
        if high > WIDEST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return low if is_enough(low) else high


def least_pruning(theorem: Theorem, widths: tuple[int, ...], options: Mapping[str, Any]) -> float:
    """Return the largest α of a theorem: that of one weight or kernel, or what Lemma 6 needs; 0 or less if none."""
    form = select_form(options.get("printed", False), options.get("sharp", False))
    if form == "sharp" or theorem is magnitude:
        return (KERNELS_ALPHA_LIMIT if theorem is cnn else WEIGHTS_ALPHA_LIMIT) * BELOW_LIMIT
    return most_alpha(widths, "kernels" if theorem is cnn else form) * BELOW_LIMIT


def fraction_per_round(
    model: nn.Module | Sequence[int],
    epsilon: float,
    delta: float,
    *,
    theorem: Theorem = magnitude,
    sharp: bool = True,
    **options: Any,
) -> float | None:
    """Return the share of the inner weights that one round of iterative pruning may remove, or None if there is none.

    `model` is a chain of linear layers or the widths of one. K is read from the model's weights: √3 × their standard
    deviation × √n, the largest of the inner layers. Biases are not counted, as in the paper. The guarantee is for
    networks drawn like this one; `certificate.largest` is about this one itself.
    """
    widths, K = (tuple(model), None) if not isinstance(model, nn.Module) else measure_chain(model)
    if K is not None and "law" not in options:
        options["law"] = Uniform(K)
    found = largest(theorem, widths, epsilon, delta, sharp=sharp, **options)
    return None if found is None else found.sparsity


def measure_chain(model: nn.Module) -> tuple[tuple[int, ...], float]:
    """Return the widths of a chain of linear layers, and the K that matches the largest variance of its inner ones."""
    other = [m for m in model.modules() if isinstance(m, (nn.modules.conv._ConvNd, nn.RNNBase))]
    if other:
        raise PomonaError(
            f"the theorem is about chains of linear layers, and the model has {type(other[0]).__name__}: "
            "take pomona.theory.certificate for it."
        )
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    is_chain = all(a.out_features == b.in_features for a, b in pairwise(layers))
    require(
        len(layers) >= 3 and is_chain,
        f"the theorem needs a chain of three linear layers or more, got {len(layers)}.",
    )
    inner = [m.weight.detach() for m in layers[1:-1]]
    K = max(float((3 * w.double().pow(2).mean() * max(w.shape)).sqrt()) for w in inner)
    return (layers[0].in_features, *(m.out_features for m in layers)), K
