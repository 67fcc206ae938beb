"""Estimates of section 4 of Lin et al. (2020): strongly convex and nonconvex losses, and pruning at the end."""

from __future__ import annotations

import math

from numpy.typing import ArrayLike

from ...errors import require
from ..validation import refuse_sharp_and_printed
from .estimate import Estimate, Term
from .step_sizes import rate, rates, weights
from .time_series import gradient_second_moments, pruning_errors, require_mu_at_most_L, require_valid_run

PAPER_SHARE = 0.5  # θ in the paper's proofs


def convex(
    *,
    L: float,
    mu: float,
    G: ArrayLike,
    delta: ArrayLike,
    norm: ArrayLike,
    T: int,
    known: float = math.inf,
    sharp: bool = False,
    printed: bool = False,
) -> Estimate:
    """Return Theorem 4.1's bound of Σ p_t f(w̃_t) − f*, for a μ-strongly convex f and γ_t = `rates(mu, T)`:

        Σ p_t γ_t G_t²  +  (2L + μ) Σ p_t δ_t ‖w_t‖².

    `printed` has the proof's last line, 8 G² / (μ (T + 2)) and 3L, with the largest G_t. Without any theorem
    f(w̃_t) − f* ≤ ‖∇f(w̃_t)‖² / 2μ ≤ G_t² / 2μ; `known` may hold a better gap, such as f(0) − f*.
    """
    require_valid_run(T, L=L, mu=mu)
    require_mu_at_most_L(L, mu)
    refuse_sharp_and_printed(sharp, printed)
    p, second_moments, errors = weights(T), gradient_second_moments(G, T), pruning_errors(delta, norm, T)
    pruning, trivial = float(p @ errors), min(known, float(p @ second_moments) / (2 * mu))
    if printed:
        terms = {"noise": Term(8 / (mu * (T + 2)), float(second_moments.max())), "pruning": Term(3 * L, pruning)}
    else:
        noise = float((p * rates(mu, T)) @ second_moments)
        theta = optimal_share((noise + mu * pruning) / 2, L * pruning / 2) if sharp else PAPER_SHARE
        left = 2 * (1 - theta)
        cost = L / theta + mu if theta else 0.0  # θ is 0 only where nothing was pruned
        terms = {"noise": Term(1 / left, noise), "pruning": Term(cost / left, pruning)}
    return Estimate("Theorem 4.1", terms, trivial)


def last(
    *, L: float, mu: float, G: ArrayLike, T: int, delta: ArrayLike = 0.0, norm: ArrayLike = 0.0, known: float = math.inf
) -> Estimate:
    """Return a bound of f(w_{T+1}) − f* for the dense model after the last step, with Theorem 4.1's rates:

        L/μ Σ p_t γ_t G_t²  +  L/μ (L + μ) Σ p_t δ_t ‖w_t‖².

    With δ = 0 it is plain SGD, whose last model one-shot pruning takes: the factor L/μ is what one-shot pruning loses.
    """
    require_valid_run(T, L=L, mu=mu)
    require_mu_at_most_L(L, mu)
    p = weights(T)
    terms = {
        "noise": Term(L / mu, float((p * rates(mu, T)) @ gradient_second_moments(G, T))),
        "pruning": Term(L / mu * (L + mu), float(p @ pruning_errors(delta, norm, T))),
    }
    return Estimate("last iterate", terms, known)


def one_shot(
    *, L: float, gap: float, delta: float, norm: float, known: float = math.inf, sharp: bool = False
) -> Estimate:
    """Return inequality 4's bound of f(w̃) − f* for a dense model with f(w) − f* = `gap` that is pruned once:

        2 (f(w) − f*)  +  L δ ‖w‖²,

    and with `sharp` (√gap + √(L δ / 2) ‖w‖)². `gap` is measured, or `last(…).bound` for the end of a run of SGD.
    """
    return Estimate("inequality 4", inequality4_terms(L, gap, float(pruning_errors(delta, norm, 0)[0]), sharp), known)


def dense(
    *,
    L: float,
    gap: float,
    delta: ArrayLike,
    norm: ArrayLike,
    T: int,
    known: float = math.inf,
    sharp: bool = False,
) -> Estimate:
    """Return a bound of Σ p_t f(w_t) − f* for the dense iterates of a DPF run: inequality 4 with the models exchanged:

        2 (Σ p_t f(w̃_t) − f*)  +  L Σ p_t δ_t ‖w_t‖².

    `gap` is measured on the pruned iterates, or `convex(…).bound`.
    """
    error = float(weights(T) @ pruning_errors(delta, norm, T))
    return Estimate("dense iterates", inequality4_terms(L, gap, error, sharp), known)


def nonconvex(
    *,
    L: float,
    G: ArrayLike,
    gap: float,
    delta: ArrayLike,
    norm: ArrayLike,
    T: int,
    gamma: float | None = None,
    sharp: bool = False,
    printed: bool = False,
) -> Estimate:
    """Return Theorem 4.2's bound of the mean of ‖∇f(w̃_t)‖², for any L-smooth f and a constant rate γ:

        2 Δ / (γ (T + 1))  +  L γ G²  +  L² mean δ_t ‖w_t‖²,

    with Δ = f(w_0) − f*, or any `gap` above it. γ is `gamma`, or the `rate` that minimizes the bound: then the first
    two terms are 2 √(2 Δ L G² / (T + 1)) together, and 3 √(Δ L G² / (T + 1)) for the printed rate. Without any theorem
    ‖∇f‖² ≤ G².
    """
    gamma = rate(L=L, G=G, gap=gap, T=T, printed=printed) if gamma is None else gamma
    require_valid_run(T, L=L, gap=gap, gamma=gamma)
    second_moment = float(gradient_second_moments(G, T).mean())
    pruning = float(pruning_errors(delta, norm, T).mean())
    start, noise = 1 / (gamma * (T + 1)), L * gamma / 2
    theta = optimal_share(start * gap + noise * second_moment, L**2 * pruning / 4) if sharp else PAPER_SHARE
    left = 1 - theta
    terms = {
        "start": Term(start / left, gap),
        "noise": Term(noise / left, second_moment),
        "pruning": Term(L**2 / (4 * theta * left) if theta else 0.0, pruning),
    }
    return Estimate("Theorem 4.2", terms, second_moment)


def optimal_share(a: float, b: float) -> float:
    """Return the θ in [0, 1/2] that minimizes (a + b/θ) / (1 − θ); the minimum is (√b + √(a + b))²."""
    return math.sqrt(b) / (math.sqrt(b) + math.sqrt(a + b)) if b else 0.0


def inequality4_terms(L: float, gap: float, error: float, sharp: bool) -> dict[str, Term]:
    """Return the terms of (1 + s) gap + (1 + 1/s) (L/2) ‖w − w̃‖², at s = 1 or, if sharp, at the best s."""
    require_valid_run(0, L=L)
    require(0 <= gap < math.inf, f"a gap f(w) − f* must be finite and not negative, got {gap:g}: is f* the minimum?")
    half = L * error / 2
    if not sharp:
        return {"gap": Term(2.0, gap), "pruning": Term(L, error)}
    # Where one of the two is zero, only the other remains.
    return {
        "gap": Term(1 + math.sqrt(half / gap) if gap else 0.0, gap),
        "pruning": Term(L / 2 * (1 + math.sqrt(gap / half)) if half else 0.0, error),
    }
