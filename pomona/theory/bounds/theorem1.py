"""Theorem 1 of Qian & Klabjan (2021): magnitude pruning of uniform weights.

Beyond Lemma 3 it needs one fact: given the smallest magnitude T that stays, the removed entries are independent and
uniform on [−T, T], and zeros elsewhere only make the expected norm smaller. So ‖W − W*‖ is bounded like ‖W‖, at
scale T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...errors import require
from .bound import Bound, NotCovered, select_form
from .distributions import LATALA, Uniform
from .lemmas import lemma3, order_statistic_bound
from .network import inner_layer_sizes, layer_shapes, lipschitz_product, propagated_error
from .pruning import resolve_pruning


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
    """Return Theorem 1's bound for pruning the N_k smallest of a layer's uniform weights.

    ‖W_k‖ ≤ c0 except with probability e^(−4 δ0 d) (Lemma 3), where c0 = K (√(π/2) + τ), δ0 = τ²/32, and τ is such that
    all l norms fail with probability δ/10, unless both are given. ‖W_k − W_k*‖ ≤ t = d^−α except with probability
    c2 d^−α (Markov), where the paper has c2 = C K (2√2 + 24^¼) and E‖W_k − W_k*‖ is at most √(π/2) K (N + 1)/(D + 1).
    The sharp form takes all norms from their tails, layer by layer, and does not need assumption (ii).
    """
    law, form = law or Uniform(), select_form(printed, sharp)
    if not isinstance(law, Uniform):
        raise NotCovered(
            f"Theorem 1 needs uniform weights, not {type(law).__name__}: Lemma 2 bounds the norms of others, not "
            "the size of their smallest ones; take Theorem 2 (random), or the estimates C.1 and E.1."
        )
    widths, alpha, pruned = resolve_pruning(widths, alpha, sparsity, form, delta, radius=radius, C=C)
    depth, d = len(widths) - 1, min(widths[1:-1])
    scale = radius * lipschitz_product(lipschitz, depth - 1)
    if sharp:
        error, constants = sharp_error(widths, pruned, law, delta)
        return Bound("Theorem 1", form, scale * error, 1 - delta, widths, alpha, pruned, constants)
    require((c0 is None) == (delta0 is None), "c0 and delta0 belong together (Lemma 3): give both or neither.")
    if c0 is None or delta0 is None:
        c0, delta0 = lemma3(law, depth, d, delta)
    t, rare = d**-alpha, math.exp(-4 * delta0 * d)
    if printed:
        c2 = C * law.K * (2 * math.sqrt(2) + 24**0.25)
        error = (2 ** (depth - 2) - 1) * t * scale * c0 ** (depth - 1)
        probability = (1 - 2 * rare) * (1 - (depth - 2) * c2 * t - (depth + 1) * (depth - 2) * rare)
        probability = probability if t <= c0 else 0.0  # (29)
    else:
        removed = expected_removed_norms(widths, alpha, law)
        c2 = max(removed) / t**2
        error = scale * propagated_error([c0] * depth, [t] * (depth - 2))
        probability = 1 - sum(removed) / t - depth * rare
    constants = {"C": C} if printed else {}
    constants |= {"c0": c0, "delta0": delta0, "c2": c2, "C1": 1 / c0, "C2": error / t if t else 0.0}
    constants |= {"C3": (depth**2 - 2) * c2, "C4": math.log(depth**2 - 2) / (4 * delta0), "C5": 1 / (4 * delta0)}
    return Bound("Theorem 1", form, error, probability, widths, alpha, pruned, constants)


def expected_removed_norms(widths: tuple[int, ...], alpha: float, law: Uniform) -> list[float]:
    """Return upper bounds of E‖W_k − W_k*‖ of the inner layers.

    They use D^(1−α) where the theorem has its floor N, so that the probability rises with α without steps.
    """
    layers = zip(layer_shapes(widths)[1:-1], inner_layer_sizes(widths), strict=True)
    return [law.expected(*shape) * (D ** (1 - alpha) + 1) / (D + 1) for shape, D in layers]


def sharp_error(
    widths: tuple[int, ...], pruned: Sequence[int], law: Uniform, delta: float
) -> tuple[float, dict[str, float]]:
    """Return the error at unit radius and slope that holds with probability 1 − δ, and the largest norms behind it.

    Half of δ is for the norms of the layers, half for those of the removed parts.
    """
    depth, shapes = len(widths) - 1, layer_shapes(widths)
    norms = [law.exceeded(law.expected(*s), max(s), delta / (2 * depth)) for s in shapes]
    share = delta / (4 * (depth - 2))
    removed = [
        order_statistic_bound(N, s[0] * s[1], share) * law.exceeded(law.expected(*s), max(s), share)
        for N, s in zip(pruned, shapes[1:-1], strict=True)
    ]
    return propagated_error(norms, removed), {"largest ‖W‖": max(norms), "largest ‖removed‖": max(removed)}
