"""How much the theorems of Qian & Klabjan (2021) prune: α or sparsity to counts, and the conditions on α."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from ...errors import PomonaError, require
from ..validation import require_positive
from .bound import TooNarrow
from .network import inner_layer_sizes, layer_shapes, with_hidden_width

WIDEST = 10**60  # the search for a width stops here
FLOOR_ROUNDING = 1e-12  # relative; keeps ⌊D^(1−α)⌋ from dropping by one where D^(1−α) is a whole number
WEIGHTS_ALPHA_LIMIT = 1.0  # at α = 1 one weight of a layer is pruned
KERNELS_ALPHA_LIMIT = 2.0  # at α = 2 one kernel of a convolution is pruned (Theorem 3)


def resolve_pruning(
    widths: Sequence[int],
    alpha: float | None,
    sparsity: float | None,
    form: str,
    delta: float,
    alpha_limit: float = WEIGHTS_ALPHA_LIMIT,
    with_replacement: bool = False,
    **positives: float,
) -> tuple[tuple[int, ...], float, tuple[int, ...]]:
    """Validate a theorem's arguments and return the widths, α and N_k.

    A sparsity is that of the smallest pruned layer; with replacement it is the expected one. `positives` are further
    arguments that must be positive. Raise TooNarrow where the widths break assumption (ii), and PomonaError for other
    bad arguments.
    """
    require_positive(**positives)
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
        alpha = alpha_of_sparsity(sparsity, widths, alpha_limit, with_replacement)
    if alpha is None:
        raise PomonaError("say how much is pruned: give alpha or sparsity.")
    unit = "weight" if alpha_limit == WEIGHTS_ALPHA_LIMIT else "kernel"
    require(
        0 < alpha < alpha_limit,
        f"alpha must lie between 0, where all is pruned, and {alpha_limit:g}, where one {unit} is, got {alpha:g}.",
    )
    # D^(1−α) may be far beyond the integers that floats hold exactly; there one more or less does not matter.
    counts = (min(D, int(D ** (1 - alpha / alpha_limit) * (1 + FLOOR_ROUNDING))) for D in inner_layer_sizes(widths))
    return widths, alpha, tuple(counts)


def alpha_of_sparsity(sparsity: float, widths: tuple[int, ...], alpha_limit: float, with_replacement: bool) -> float:
    """Return the α that prunes this fraction of the smallest inner layer."""
    require(0 < sparsity < 1, f"sparsity must lie between 0 and 1, got {sparsity:g}.")
    share = -math.log1p(-sparsity) if with_replacement else sparsity
    require(
        share < 1,
        f"D draws with replacement prune 63.2 % on average, and {sparsity:.1%} are asked for: draw distinct ones.",
    )
    smallest = min(inner_layer_sizes(widths))
    alpha = -alpha_limit * math.log(share) / math.log(max(2, smallest))
    if alpha >= alpha_limit:
        raise TooNarrow(f"a share of {sparsity:g} is less than one of the {smallest:,} weights of a layer.")
    return alpha


def most_alpha(widths: tuple[int, ...], form: str = "corrected") -> float:
    """Return the largest α that leaves enough draws for Lemma 6.

    `form` is "corrected" or "printed" for conditions (3) and (4), or "kernels" for Theorem 3's condition.
    """
    if form == "kernels":
        d = widths[1]
        return 2 - (math.log(d + 1) + math.log(math.log(max(d, 3)))) / math.log(max(d, 2))
    if form == "printed":  # the paper has a minus, and an index that is one layer too far
        sides = [(side, a * b) for a, b in pairwise(widths[2:]) for side in (a, b)]
        sign = -1
    else:
        sides = [(side, a * b) for a, b in layer_shapes(widths)[1:-1] for side in (a, b)]
        sign = 1
    return min(1 - (math.log(s + 1) + sign * math.log(math.log(max(s, 2)))) / math.log(max(D, 2)) for s, D in sides)


def require_enough_draws(widths: tuple[int, ...], alpha: float, form: str) -> None:
    """Raise TooNarrow for an α that prunes too little for Lemma 6 to hold, with the width that would allow it."""
    limit = most_alpha(widths, form)
    if alpha <= limit:
        return
    low = high = min(widths[1:-1])
    while high <= WIDEST and most_alpha(with_hidden_width(widths, high), form) < alpha:
        low, high = high, 2 * high
    while high <= WIDEST and high - low > 1:
        middle = (low + high) // 2
        is_enough = most_alpha(with_hidden_width(widths, middle), form) >= alpha
        low, high = (low, middle) if is_enough else (middle, high)
    condition = "Theorem 3's condition on α" if form == "kernels" else "conditions (3) and (4)"
    remedy = f"hidden layers of {high:,} would do" if high <= WIDEST else "no width would do"
    raise TooNarrow(
        f"{condition}: alpha={alpha:g} prunes too little for rows and columns to lose alike; at these widths it may be "
        f"at most {limit:.4f}, and {remedy}; the sharp form does without."
    )
