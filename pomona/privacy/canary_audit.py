"""An audit: how private is a step really? Canaries are put in or left out, and an adversary guesses which.

Where a run is (ε, δ)-private, guesses at independent coin flips are right no more often than so many flips of a
coin of e^ε / (1 + e^ε) (Steinke, Nasr and Jagielski, NeurIPS 2023). So what is right too often refutes an ε: the
largest one that is refuted with confidence is a lower bound, for δ = 0 that of Clopper and Pearson.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import bdtr, bdtrc
from torch import Tensor, nn

from ..errors import require
from .accounting import Budget
from .private_step import PrivateStep
from .random_source import Source

SHARES = 1.0, 0.1  # of the canaries that are guessed at: all of them, and the surest


def audit(
    budget: Budget,
    *,
    canaries: int = 1024,
    runs: int = 24,
    confidence: float = 0.95,
    seed: int = 0,
    change: Callable[[PrivateStep], None] | None = None,
    **options: object,
) -> float:
    """A lower bound on ε, from `runs` runs of `PrivateStep` with so many canaries each.

    Each canary has a weight of its own and a gradient ten times as large as may be; the adversary sees the weights.
    `change` may break the step, to see whether that is found out; `options` are `PrivateStep`'s.
    """
    require(budget.rows == canaries, f"the budget is for {budget.rows} rows, and there are {canaries} canaries.")
    torch_seed = torch.Generator().manual_seed(seed)
    scores, members = [], []
    for run in range(runs):
        member = torch.rand(canaries, generator=torch_seed) < 0.5
        scores.append(attack(budget, member, Source(seed=seed + run), change, **options))
        members.append(member)
    return lower_bound(torch.cat(scores), torch.cat(members), budget.delta, confidence)


def attack(
    budget: Budget, member: Tensor, source: Source, change: Callable[[PrivateStep], None] | None, **options: object
) -> Tensor:
    """How much of each canary shows in the trained weights; one that is left out has no gradient at all."""
    model = nn.Linear(len(member), 1, bias=False)
    nn.init.zeros_(model.weight)
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), 1.0),
        budget,
        loss=lambda output, target: -output.mean(),
        source=source,
        **{"method": "dpsgd", **options},  # type: ignore[arg-type]
    )
    if change is not None:
        change(step)
    features = torch.diag(10 * step.clip * member.float())
    for rows in step:
        step(features[rows], rows)
    return model.weight.detach()[0]


def lower_bound(
    scores: Tensor, members: Tensor, delta: float, confidence: float = 0.95, shares: Sequence[float] = SHARES
) -> float:
    """The ε that the scores refute, guessing at several shares of the canaries; the confidence is for all of them."""
    middle = scores.quantile(scores.new_tensor([0.1, 0.9])).mean()  # about half of them are in
    right = (scores > middle) == members
    surest = (scores - middle).abs().argsort(descending=True)
    found = []
    for share in shares:
        guesses = max(round(share * len(right)), 1)
        correct = int(right[surest[:guesses]].sum())
        found.append(refuted(correct, guesses, len(right), delta, 1 - (1 - confidence) / len(shares)))
    return max(found)


def refuted(correct: int, guesses: int, canaries: int, delta: float, confidence: float) -> float:
    """The largest ε at which so many correct guesses would be too unlikely."""

    def excess(epsilon: float) -> float:
        return chance(correct, guesses, canaries, epsilon, delta) - (1 - confidence)

    if excess(0.0) >= 0:
        return 0.0
    high = 1.0
    while excess(high) < 0:
        high *= 2
    return float(brentq(excess, 0.0, high, xtol=1e-9))


def chance(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """The largest probability of so many correct guesses, or more, under (ε, δ)-privacy (their Theorem 5.2)."""
    if not correct:
        return 1.0
    sure, fewer = 1 / (1 + math.exp(-epsilon)), np.arange(1, correct + 1)
    below = np.append(bdtr(correct - 1 - fewer[:-1], guesses, sure), 0.0)  # fewer than correct − 1, … , than 0
    slope = float(((bdtr(correct - 1, guesses, sure) - below) / fewer).max())
    return min(float(bdtrc(correct - 1, guesses, sure)) + 2 * canaries * delta * slope, 1.0)
