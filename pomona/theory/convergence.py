"""Where dynamic pruning with feedback must arrive: section 4 of Lin et al., ICLR 2020.

A run makes the steps w_{t+1} = w_t − γ_t g(w̃_t), t = 0 … T, with E g(w̃) = ∇f(w̃) for an L-smooth f.
Its masks may be any, and are judged by δ_t = ‖w_t − w̃_t‖² / ‖w_t‖² (equation 1). Every estimate is a
sum of terms, each a constant of the proof times something measured.

`G` (the root of E‖g(w̃_t)‖²), `delta` and `norm` (‖w_t‖) are numbers, or arrays whose last axis is t;
other axes are runs, over which the expectation is taken. `Trace` measures them on a run, `curvature` L.

The proofs give away a share θ of the gap (or of the gradient) to pay for the pruning error. The document
has θ = 1/2 everywhere; `sharp=True` takes the best. The proofs, and where the document errs, are in
docs/convergence.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.optim import SGD, Optimizer

from ..core.pruner import Pruner
from ..errors import require

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Term:
    """A summand of an estimate: a constant of the proof times what was measured."""

    constant: float
    measured: float

    @property
    def value(self) -> float:
        return self.constant * self.measured


@dataclass(frozen=True)
class Estimate:
    """An upper bound, by its terms; and `trivial`, what is known without the theorem."""

    name: str
    terms: Mapping[str, Term]
    trivial: float = math.inf

    @property
    def bound(self) -> float:
        return sum(term.value for term in self.terms.values())

    @property
    def vacuous(self) -> bool:
        """Whether the theorem says nothing new."""
        return not self.bound < self.trivial

    def __str__(self) -> str:
        terms = " + ".join(f"{term.value:.4g} ({name})" for name, term in self.terms.items())
        return f"{self.name}: ≤ {self.bound:.4g} = {terms}{', vacuous' if self.vacuous else ''}"


# ---- the settings of the theorems


def rates(mu: float, T: int) -> Array:
    """γ_t = 4 / (μ (t + 2)), the steps of Theorem 4.1."""
    check(T, mu=mu)
    return 4 / (mu * (np.arange(T + 1.0) + 2))


def weights(T: int) -> Array:
    """p_t = 2 (t + 1) / ((T + 1) (T + 2)), with which Theorem 4.1 averages over the iterates."""
    check(T)
    return 2 * np.arange(1.0, T + 2) / ((T + 1) * (T + 2))


def rate(*, L: float, G: ArrayLike, gap: float, T: int, printed: bool = False) -> float:
    """γ = √(2Δ / (L G² (T + 1))), the constant step that makes Theorem 4.2's bound smallest; Δ is `gap`.

    The printed one lacks the 2, and has √t for √(T + 1), with which the proof does not go through.
    """
    check(T, L=L, gap=gap)
    square = float(squares(G, T).mean())
    check(T, G=square)
    return math.sqrt((1 if printed else 2) * gap / (L * square * (T + 1)))


# ---- the estimates


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
    """Theorem 4.1, for a μ-strongly convex f and γ_t = `rates(mu, T)`: Σ p_t f(w̃_t) − f* is at most

        Σ p_t γ_t G_t²  +  (2L + μ) Σ p_t δ_t ‖w_t‖².

    `printed` has the proof's last line, 8 G² / (μ (T + 2)) and 3L, with the largest G_t. Without any
    theorem f(w̃_t) − f* ≤ ‖∇f(w̃_t)‖² / 2μ ≤ G_t² / 2μ; `known` may hold a better gap, such as f(0) − f*.
    """
    check(T, L=L, mu=mu)
    check_order(L, mu)
    require(not (sharp and printed), "the printed form has its own constants: leave out sharp or printed.")
    p, square, error = weights(T), squares(G, T), errors(delta, norm, T)
    pruning, trivial = float(p @ error), min(known, float(p @ square) / (2 * mu))
    if printed:
        terms = {"noise": Term(8 / (mu * (T + 2)), float(square.max())), "pruning": Term(3 * L, pruning)}
    else:
        noise = float((p * rates(mu, T)) @ square)
        theta = share((noise + mu * pruning) / 2, L * pruning / 2) if sharp else 0.5
        left = 2 * (1 - theta)
        cost = L / theta + mu if theta else 0.0  # θ is 0 only where nothing was pruned
        terms = {"noise": Term(1 / left, noise), "pruning": Term(cost / left, pruning)}
    return Estimate("Theorem 4.1", terms, trivial)


def last(
    *, L: float, mu: float, G: ArrayLike, T: int, delta: ArrayLike = 0.0, norm: ArrayLike = 0.0, known: float = math.inf
) -> Estimate:
    """The dense model after the last step, f(w_{T+1}) − f*, under Theorem 4.1's steps: at most

        L/μ Σ p_t γ_t G_t²  +  L/μ (L + μ) Σ p_t δ_t ‖w_t‖².

    With δ = 0 it is plain SGD, whose end one-shot pruning cuts: this is the factor L/μ that it loses.
    """
    check(T, L=L, mu=mu)
    check_order(L, mu)
    p = weights(T)
    terms = {
        "noise": Term(L / mu, float((p * rates(mu, T)) @ squares(G, T))),
        "pruning": Term(L / mu * (L + mu), float(p @ errors(delta, norm, T))),
    }
    return Estimate("last iterate", terms, known)


def one_shot(
    *, L: float, gap: float, delta: float, norm: float, known: float = math.inf, sharp: bool = False
) -> Estimate:
    """Inequality 4, for a dense model with f(w) − f* = `gap` that is pruned once: f(w̃) − f* is at most

        2 (f(w) − f*)  +  L δ ‖w‖²,

    and with `sharp` (√gap + √(L δ / 2) ‖w‖)². `gap` is what was measured, or for the end of a run of SGD
    `last(…).bound`.
    """
    return Estimate("inequality 4", four(L, gap, float(errors(delta, norm, 0)[0]), sharp), known)


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
    """The dense iterates of a run of DPF, Σ p_t f(w_t) − f*: inequality 4 with the two models exchanged, at most

        2 (Σ p_t f(w̃_t) − f*)  +  L Σ p_t δ_t ‖w_t‖².

    `gap` is what was measured of the pruned iterates, or `convex(…).bound`.
    """
    return Estimate("dense iterates", four(L, gap, float(weights(T) @ errors(delta, norm, T)), sharp), known)


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
    """Theorem 4.2, for any L-smooth f and a constant step γ: the mean of ‖∇f(w̃_t)‖² is at most

        2 Δ / (γ (T + 1))  +  L γ G²  +  L² mean δ_t ‖w_t‖²,

    with Δ = f(w_0) − f*, or any `gap` above it. γ is `gamma`, or the `rate` that makes it smallest: then
    the first two are 2 √(2 Δ L G² / (T + 1)) together, and 3 √(Δ L G² / (T + 1)) for the printed rate.
    Without any theorem ‖∇f‖² ≤ G².
    """
    gamma = rate(L=L, G=G, gap=gap, T=T, printed=printed) if gamma is None else gamma
    check(T, L=L, gap=gap, gamma=gamma)
    square, pruning = float(squares(G, T).mean()), float(errors(delta, norm, T).mean())
    first, noise = 1 / (gamma * (T + 1)), L * gamma / 2
    theta = share(first * gap + noise * square, L**2 * pruning / 4) if sharp else 0.5
    left = 1 - theta
    terms = {
        "start": Term(first / left, gap),
        "noise": Term(noise / left, square),
        "pruning": Term(L**2 / (4 * theta * left) if theta else 0.0, pruning),
    }
    return Estimate("Theorem 4.2", terms, square)


# ---- what a run measures


class Trace:
    """δ_t, ‖w_t‖, ‖g(w̃_t)‖ and γ_t at each step of a run.

        trace = convergence.Trace(optimizer, pruner)    # after pruner.attach
        ...                                             # the training loop, as it is
        convergence.convex(**trace.measured, L=L, mu=mu)

    Without a pruner it follows plain SGD, of which nothing is pruned before its end.
    """

    def __init__(self, optimizer: Optimizer, pruner: Pruner | None = None) -> None:
        wrong = [key for key in ("momentum", "weight_decay") if any(group.get(key) for group in optimizer.param_groups)]
        require(
            isinstance(optimizer, SGD) and not wrong,
            f"the theorems are about steps w − γ g, and {type(optimizer).__name__}"
            f"{f' with {wrong[0]}' if wrong else ''} makes others: use SGD alone, with any penalty in the loss.",
        )
        if pruner is not None:
            require(
                pruner.method.weights == "soft" and bool(pruner.slots),
                f"the theorems are about dense weights moved by gradients at pruned ones, and {pruner} has no such "
                "pair: attach DPF first, or leave the pruner out and give one_shot what it cuts.",
            )
        self.slots = pruner.slots + pruner.coupled if pruner else []
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.gammas: list[float] = []
        self.squares: dict[str, list[Tensor]] = {"lost": [], "whole": [], "gradient": []}
        self.handles = [
            optimizer.register_step_pre_hook(self.before),
            optimizer.register_step_post_hook(self.after),
        ]

    @torch.no_grad()
    def before(self, optimizer: Optimizer, *_: Any) -> None:
        """Note the weights: of pruned parameters the dense ones, whatever they hold at the moment."""
        dense = {id(slot.parameter): slot.dense for slot in self.slots}
        self.gammas.append(float(optimizer.param_groups[0]["lr"]))
        self.squares["lost"].append(square(slot.dense - slot.projected() for slot in self.slots))
        self.squares["whole"].append(square(dense.get(id(p), p) for p in self.parameters))

    @torch.no_grad()
    def after(self, *_: Any) -> None:
        """Note the gradients, which a closure makes only within the step."""
        self.squares["gradient"].append(square(p.grad for p in self.parameters if p.grad is not None))

    def stop(self) -> None:
        """Let go of the optimizer."""
        for handle in self.handles:
            handle.remove()

    @property
    def measured(self) -> dict[str, Any]:
        """`delta`, `norm`, `G` and `T`, as the estimates take them."""
        require(bool(self.gammas), "the run has made no step since it is traced: train first.")
        lost, whole, gradient = (torch.stack(each).cpu().numpy() for each in self.squares.values())
        with np.errstate(invalid="ignore"):  # 0/0 where all weights are 0, and so is their error
            delta = np.nan_to_num(lost / whole)
        return {"delta": delta, "norm": np.sqrt(whole), "G": np.sqrt(gradient), "T": len(lost) - 1}

    @property
    def rates(self) -> Array:
        """γ_t, to be held against `rates(mu, T)`."""
        return np.array(self.gammas)


def square(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of all squares, in double precision and without waiting for the device."""
    parts = [tensor.detach().double().square().sum() for tensor in tensors]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)


def curvature(loss: Callable[[], Tensor], parameters: Iterable[Tensor], steps: int = 100, seed: int = 0) -> float:
    """The largest |eigenvalue| of the loss's Hessian at these weights, by power iteration.

    It approaches from below, and L is the largest over all weights a run may meet: an estimate of L, no bound.
    """
    weights = list(parameters)
    slope = torch.autograd.grad(loss(), weights, create_graph=True)
    draw = torch.Generator().manual_seed(seed)
    v = [torch.randn(w.shape, generator=draw, dtype=w.dtype).to(w.device) for w in weights]
    found = 0.0
    for _ in range(steps):
        size = math.sqrt(float(square(v)))
        if not size:  # the Hessian is zero
            break
        v = [x / size for x in v]
        v = list(torch.autograd.grad(slope, weights, v, retain_graph=True, materialize_grads=True))
        found = math.sqrt(float(square(v)))
    return found


# ---- what they share


def share(a: float, b: float) -> float:
    """The θ in [0, 1/2] at which (a + b/θ) / (1 − θ) is least; there it is (√b + √(a + b))²."""
    return math.sqrt(b) / (math.sqrt(b) + math.sqrt(a + b)) if b else 0.0


def four(L: float, gap: float, error: float, sharp: bool) -> dict[str, Term]:
    """(1 + s) gap + (1 + 1/s) (L/2) ‖w − w̃‖², at s = 1 or where it is least."""
    check(0, L=L)
    require(0 <= gap < math.inf, f"a gap f(w) − f* must be finite and not negative, got {gap:g}: is f* the minimum?")
    half = L * error / 2
    if not sharp:
        return {"gap": Term(2.0, gap), "pruning": Term(L, error)}
    # Where one of the two is zero, the other stands alone.
    return {
        "gap": Term(1 + math.sqrt(half / gap) if gap else 0.0, gap),
        "pruning": Term(L / 2 * (1 + math.sqrt(gap / half)) if half else 0.0, error),
    }


def squares(G: ArrayLike, T: int) -> Array:
    """E‖g(w̃_t)‖² for each t."""
    return over_time(np.square(np.asarray(G, dtype=float)), T, "G")


def errors(delta: ArrayLike, norm: ArrayLike, T: int) -> Array:
    """E‖w_t − w̃_t‖² = E δ_t ‖w_t‖² for each t."""
    lost, size = np.asarray(delta, dtype=float), np.asarray(norm, dtype=float)
    # Each is checked alone, so that broadcasting cannot take runs for steps.
    for name, values in (("delta", lost), ("norm", size)):
        over_time(values, T, name)
    require(bool((lost >= 0).all()), f"δ = ‖w − w̃‖² / ‖w‖² cannot be negative, got {lost.min():g}.")
    return over_time(lost * size**2, T, "delta")


def over_time(values: Array, T: int, name: str) -> Array:
    """One finite number for each t, averaged over runs."""
    require(
        values.ndim == 0 or values.shape[-1] == T + 1,
        f"{name} has {values.shape[-1] if values.ndim else 1} entries along its last axis, and t = 0 … T={T} needs "
        f"{T + 1}: give one for each step, or a single number.",
    )
    require(bool(np.isfinite(values).all()), f"{name} must be finite for every t: has the run diverged, or w been 0?")
    return np.broadcast_to(values, (*values.shape[:-1], T + 1)).reshape(-1, T + 1).mean(0)


def check(T: int, **positive: float) -> None:
    """Refuse a run of no steps, and constants that are not positive."""
    require(T >= 0, f"T is the last step's number, counted from 0, got {T}.")
    for name, value in positive.items():
        require(0 < value < math.inf, f"{name} must be positive and finite, got {value:g}.")


def check_order(L: float, mu: float) -> None:
    """Refuse constants that no function has."""
    require(mu <= L, f"μ={mu:g} exceeds L={L:g}, but a function is never more convex than smooth: exchange them?")
