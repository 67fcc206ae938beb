"""An empirical audit of private steps: canaries are included or left out, and an adversary guesses which.

If a run is (ε, δ)-private, guesses at independent coin flips are correct no more often than as many flips of a coin
with probability e^ε / (1 + e^ε) (Steinke, Nasr and Jagielski, NeurIPS 2023). More correct guesses refute that ε. The
largest ε that is refuted with confidence is a lower bound; for δ = 0 it is that of Clopper and Pearson.
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
from .budget import Budget
from .private_step import PrivateStep
from .random_source import Source

GUESSED_SHARES = 1.0, 0.1  # of the canaries: all of them, and those the adversary is most certain of
CANARY_NORM = 10  # gradient norm of a canary over the clipping norm: a step without clipping is detected


class TwoLayers(nn.Module):
    """The sum of two linear layers, whose weights begin at zero."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(size, 1, bias=False), nn.Linear(size, 1, bias=False)
        for layer in (self.first, self.second):
            nn.init.zeros_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


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
    """Return a lower bound on ε, from `runs` runs of `PrivateStep` with `canaries` canaries each.

    Each canary has a weight in each of two layers that no other canary moves, and gradients ten times the clipping
    norm. The adversary sees the trained weights. `change` may modify the step, to test that the audit detects a defect;
    `options` are those of `PrivateStep`.
    """
    require(budget.rows == canaries, f"the budget is for {budget.rows} rows, but there are {canaries} canaries.")
    generator = torch.Generator().manual_seed(seed)
    scores, members = [], []
    for run in range(runs):
        member = torch.rand(canaries, generator=generator) < 0.5
        scores.append(score_canaries(budget, member, Source(seed=seed + run), change, **options))
        members.append(member)
    return epsilon_lower_bound(torch.cat(scores), torch.cat(members), budget.delta, confidence)


def score_canaries(
    budget: Budget, member: Tensor, source: Source, change: Callable[[PrivateStep], None] | None, **options: object
) -> Tensor:
    """Train on the canaries that are members and return the sum of the trained weights of every canary, its score.

    A canary that is not a member has a gradient of zero.
    """
    model = TwoLayers(len(member))
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
    features = torch.diag(CANARY_NORM * step.clip * member.float())
    for rows in step:
        step(features[rows], rows)
    return (model.first.weight + model.second.weight).detach()[0]


def epsilon_lower_bound(
    scores: Tensor, members: Tensor, delta: float, confidence: float = 0.95, shares: Sequence[float] = GUESSED_SHARES
) -> float:
    """Return the largest ε that guesses at any of several shares of the canaries refute.

    The confidence holds for all shares together.
    """
    middle = scores.quantile(scores.new_tensor([0.1, 0.9])).mean()  # about half of the canaries are members
    is_correct = (scores > middle) == members
    most_certain = (scores - middle).abs().argsort(descending=True)
    refuted = []
    for share in shares:
        guesses = max(round(share * len(is_correct)), 1)
        correct = int(is_correct[most_certain[:guesses]].sum())
        share_confidence = 1 - (1 - confidence) / len(shares)
        refuted.append(largest_refuted_epsilon(correct, guesses, len(is_correct), delta, share_confidence))
    return max(refuted)


def largest_refuted_epsilon(correct: int, guesses: int, canaries: int, delta: float, confidence: float) -> float:
    """Return the largest ε at which so many correct guesses have a probability below 1 − confidence."""

    def excess(epsilon: float) -> float:
        return correct_guess_probability(correct, guesses, canaries, epsilon, delta) - (1 - confidence)

    if excess(0.0) >= 0:
        return 0.0
    high = 1.0
    while excess(high) < 0:
        high *= 2
    return float(brentq(excess, 0.0, high, xtol=1e-9))


def correct_guess_probability(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Return the largest probability of at least so many correct guesses under (ε, δ)-privacy.

    This is Theorem 5.2 of Steinke, Nasr and Jagielski (2023).
    """
    if not correct:
        return 1.0
    p, fewer = 1 / (1 + math.exp(-epsilon)), np.arange(1, correct + 1)
    # P(fewer than correct − 1), P(fewer than correct − 2), …, P(fewer than 0)
    below = np.append(bdtr(correct - 1 - fewer[:-1], guesses, p), 0.0)
    slope = float(((bdtr(correct - 1, guesses, p) - below) / fewer).max())
    return min(float(bdtrc(correct - 1, guesses, p)) + 2 * canaries * delta * slope, 1.0)
