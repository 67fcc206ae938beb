"""Theorem 2 of Qian & Klabjan (2021): random pruning of weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...errors import require
from ..validation import require_positive
from .bound import Bound, NotCovered, select_form
from .distributions import LATALA, Law, Uniform, latala
from .lemmas import bin_count_bound, lemma6, no_repeat
from .network import layer_shapes, lipschitz_product, propagated_error
from .pruning import require_enough_draws, resolve_pruning
from .subgaussian import DependentRows


def random(
    widths: Sequence[int],
    *,
    alpha: float | None = None,
    sparsity: float | None = None,
    delta: float = 0.05,
    law: Law | DependentRows | None = None,
    norms: Sequence[float] | None = None,
    deltas: Sequence[float] | None = None,
    lipschitz: float | Sequence[float] = 1.0,
    radius: float = 1.0,
    C: float = LATALA,
    replacement: bool = True,
    printed: bool = False,
    sharp: bool = False,
) -> Bound:
    """Return Theorem 2's bound for pruning N_k weights of a layer, drawn with replacement.

    Assumption (iv), ‖W_k‖ ≤ N_k except with probability δ_k, is taken from the law with Σ δ_k = δ/4, unless `norms` and
    `deltas` are given. ‖W_k − W_k*‖ ≤ d^(−α/4) except with probability c2 d^(−α/4), c2 = C (2 √(3 K1) + K2^¼), if no
    row or column loses more than three times its share (Lemma 6). The sharp form takes shares and norms from their
    tails. Without `replacement` (E.2) the draws are distinct. Rows and columns are then not independent, and their
    failure probabilities add. Weights with `DependentRows` (E.1) have the sharp form only, and it needs no C.

    The proof's statement (II) is conditional on masks that prune rows and columns evenly. Its term 2(k−1) d^(−1/3), for
    masks that do not, is dropped on the way, and rightly: their probability is the factor in front.
    """
    law, form = law or Uniform(), select_form(printed, sharp)
    widths, alpha, pruned = resolve_pruning(
        widths, alpha, sparsity, form, delta, with_replacement=replacement, radius=radius, C=C
    )
    depth, d, inner = len(widths) - 1, min(widths[1:-1]), layer_shapes(widths)[1:-1]
    scale = radius * lipschitz_product(lipschitz, depth - 1)
    if isinstance(law, DependentRows) and not sharp:
        raise NotCovered("only the sharp form covers dependent rows: Lemma 4 needs independent weights.")
    N, fails = assumed_norms(law, widths, norms, deltas, delta)
    if sharp:
        error, constants = sharp_error(widths, pruned, law, C, N, fails, delta)
        return Bound("Theorem 2", form, scale * error, 1 - delta, widths, alpha, pruned, constants, replacement)
    assert not isinstance(law, DependentRows)
    require_enough_draws(widths, alpha, form)
    t, c2 = d ** (-alpha / 4), C * (2 * math.sqrt(3 * law.K1) + law.K2**0.25)
    if printed:
        error = (2 ** (depth - 2) - 1) * t * scale * math.prod(N)
        lost = sum((depth - k) * f for k, f in enumerate(fails[:-1], 1))
        probability = (1 - d ** (-1 / 3)) ** (2 * (depth - 2)) * (1 - fails[-1]) * (1 - (depth - 2) * c2 * t - lost)
        probability = probability if t <= min(N[1:-1]) else 0.0  # (15)
        if not replacement:
            probability *= math.prod(math.exp(no_repeat(n, a * b)) for n, (a, b) in zip(pruned, inner, strict=True))
    else:
        error = scale * propagated_error(N, [t] * (depth - 2))
        crowded = [lemma6(side) for shape in inner for side in shape]
        even = math.prod(1 - u for u in crowded) if replacement else 1 - sum(crowded)
        probability = even * (1 - (depth - 2) * c2 * t - sum(fails))
    constants = {"C": C, "c2": c2, "C1": 1 / min(N[1:-1]), "C2": error / t}
    constants |= {"C3": 3.0 * (depth - 2), "C4": 3 * c2 * (depth - 2), "delta0": delta - sum(fails)}
    return Bound("Theorem 2", form, error, probability, widths, alpha, pruned, constants, replacement)


def assumed_norms(
    law: Law | DependentRows,
    widths: tuple[int, ...],
    norms: Sequence[float] | None,
    deltas: Sequence[float] | None,
    delta: float,
) -> tuple[list[float], list[float]]:
    """Return N_k and δ_k of assumption (iv), as given or from the law."""
    depth = len(widths) - 1
    if norms is None:
        require(deltas is None, "deltas are the probabilities with which norms fail: give both or neither.")
        share = delta / (4 * depth)
        return [norm_level(law, s, share) for s in layer_shapes(widths)], [share] * depth
    fails = [0.0] * depth if deltas is None else [float(f) for f in deltas]
    require(
        len(norms) == len(fails) == depth,
        f"assumption (iv) has a norm and a delta for each of the {depth} layers, got {len(norms)} and {len(fails)}.",
    )
    require_positive(**{f"norm {k}": n for k, n in enumerate(norms, 1)})
    require(
        sum(fails) < delta,
        f"delta={delta:g} cannot be met (5): the norms alone fail with {sum(fails):g}; give a larger delta, or larger "
        "norms.",
    )
    return [float(n) for n in norms], fails


def norm_level(law: Law | DependentRows, shape: tuple[int, int], failure: float) -> float:
    """Return a level that the norm of a full matrix exceeds with probability `failure` at most."""
    if isinstance(law, DependentRows):
        return law.norm_level(*shape, failure)
    return law.exceeded(law.expected(*shape), max(shape), failure)


def sharp_error(
    widths: tuple[int, ...],
    pruned: Sequence[int],
    law: Law | DependentRows,
    C: float,
    norms: Sequence[float],
    fails: Sequence[float],
    delta: float,
) -> tuple[float, dict[str, float]]:
    """Return the error at unit radius and slope that holds with probability 1 − δ, and the constants behind it.

    A quarter of δ is for the norms (by default), a quarter for the shares of rows and columns, the rest for the removed
    parts.
    """
    depth, inner = len(widths) - 1, layer_shapes(widths)[1:-1]
    left = delta - sum(fails)
    share_failure, norm_failure = left / (6 * (depth - 2)), 2 * left / (3 * (depth - 2))
    removed = [
        removed_norm_level(law, C, shape, count, share_failure, norm_failure)
        for count, shape in zip(pruned, inner, strict=True)
    ]
    constants = {} if isinstance(law, DependentRows) else {"C": C}
    constants |= {"largest ‖W‖": max(norms), "largest ‖removed‖": max(removed)}
    return propagated_error(norms, removed), constants


def removed_norm_level(
    law: Law | DependentRows, C: float, shape: tuple[int, int], count: int, share_failure: float, norm_failure: float
) -> float:
    """Return a level that ‖W − W*‖ exceeds with probability `norm_failure` at most, for `count` entries at random.

    It assumes that no row and no column loses more entries than all but a probability `share_failure` do.
    """
    rows, columns = shape
    if isinstance(law, DependentRows):
        return law.removed_level(rows, columns, count, norm_failure)
    in_row, in_column = bin_count_bound(count, rows, share_failure), bin_count_bound(count, columns, share_failure)
    by_lemma4 = latala(law, C, rows, columns, min(in_row, columns), min(in_column, rows), count)
    # Zeros never make an expected norm larger.
    return law.exceeded(min(by_lemma4, law.expected(rows, columns)), max(shape), norm_failure)
